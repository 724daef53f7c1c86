"""Tools and reasoning on the wire: calls in answers and streams, forced calls, calls in the history."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from stoker.engine.core.messages import CoreState
from stoker.engine.http.openai.parser_choice import ParserChoice
from stoker.engine.output_grammar import OutputGrammar
from testing.engine.fake_core import FACTS, ByteCodec
from testing.engine.serving import Serving, run, serving, until

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
CLOCK = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


class HermesCodec(ByteCodec):
    template_source = "<tool_call>"


class LlamaCodec(ByteCodec):
    template_source = "<|python_tag|>"


class MistralCodec(ByteCodec):
    template_source = "[TOOL_CALLS]"


class ThinkingCodec(ByteCodec):
    def render_chat(self, messages: Any, **settings: Any) -> str:
        return super().render_chat(messages, **settings) + "<think>\n"


@asynccontextmanager
async def roomy(tmp_path: Path, codec: Any) -> AsyncIterator[Serving]:
    """A server whose model takes long answers."""
    async with serving(tmp_path, codec) as s:
        await s.core.set_state(CoreState("Serving", "", replace(FACTS, max_model_len=2000)))
        await until(lambda: s.front.served.facts is not None and s.front.served.facts.max_model_len == 2000)
        yield s


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"say:{text}"}]


async def message(s: Serving, text: str, **more: Any) -> tuple[dict[str, Any], str]:
    answer = await s.post(CHAT, messages=say(text), tools=[WEATHER, TIME], **more)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"], choice["finish_reason"]


def calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def test_an_equal_copy_of_a_function_does_no_harm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, HermesCodec) as s:
            for choice in ("auto", "required"):
                said = CALL if choice == "auto" else '[{"name": "weather", "parameters": {"city": "Paris"}}]'
                answer = await s.post(CHAT, messages=say(said), tools=[WEATHER, TIME, WEATHER], tool_choice=choice)
                assert answer.status_code == 200, answer.text
                assert calls(answer.json()["choices"][0]["message"]) == [("weather", '{"city": "Paris"}')]

    run(scenario)


def test_calls_are_found_in_a_whole_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, HermesCodec) as s:
            one, finish = await message(s, f"Let me look.\n{CALL}{CLOCK}")
            assert finish == "tool_calls"
            assert (one["content"], calls(one)) == (
                "Let me look.", [("weather", '{"city": "Paris"}'), ("time", "{}")],
            )  # fmt: skip
            ids = [call["id"] for call in one["tool_calls"]]
            assert len(set(ids)) == 2
            assert all(one.startswith("call_") for one in ids)
            alone, _ = await message(s, CALL, parallel_tool_calls=False)
            assert alone["content"] is None
            assert len(alone["tool_calls"]) == 1
            plain, finish = await message(s, "Hi there.")
            assert (plain, finish) == ({"role": "assistant", "content": "Hi there.", "refusal": None}, "stop")
            shown, finish = await message(s, CALL, tool_choice="none")
            assert (shown["content"], finish) == (CALL, "stop")
            cut, finish = await message(s, CALL, max_tokens=50)
            assert (calls(cut), finish) == ([("weather", '{"city')], "length")

    run(scenario)


def test_a_stream_has_the_id_and_name_of_a_call_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, HermesCodec) as s:
            events = await s.stream(CHAT, messages=say(f"Hm. {CALL}{CLOCK}"), tools=[WEATHER, TIME])
            choices = [event["choices"][0] for event in events[:-1]]
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hm."
            deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
            begins = [delta for delta in deltas if "id" in delta]
            assert [(one["index"], one["type"], one["function"]) for one in begins] == [
                (0, "function", {"name": "weather", "arguments": ""}),
                (1, "function", {"name": "time", "arguments": ""}),
            ]
            assert all(set(one) == {"index", "function"} for one in deltas if one not in begins)
            first = [one["function"]["arguments"] for one in deltas if one["index"] == 0]
            assert "".join(first) == '{"city": "Paris"}'
            assert len(first) > 4  # as they arrive
            finishes = [choice["finish_reason"] for choice in choices]
            assert finishes == [None] * (len(finishes) - 1) + ["tool_calls"]

    run(scenario)


def test_the_official_client_reads_streamed_calls(tmp_path: Path) -> None:
    def ask(url: str) -> tuple[str | None, Any]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            tools: Any = [WEATHER, TIME]
            messages: Any = say(CALL)
            with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
                choice = stream.get_final_completion().choices[0]
            assert choice.message.tool_calls is not None
            return choice.finish_reason, choice.message.tool_calls[0].function

    async def scenario() -> None:
        async with roomy(tmp_path, HermesCodec) as s:
            finish, function = await asyncio.to_thread(partial(ask, s.url))
            assert (finish, function.name, function.arguments) == ("tool_calls", "weather", '{"city": "Paris"}')

    run(scenario)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_stop_text_does_not_cut_the_arguments_of_a_forced_call(tmp_path: Path, choice: Any) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, ByteCodec) as s:
            call = '{"city": "Rome"}'
            said = f'[{{"name": "weather", "parameters": {call}}}]' if choice == "required" else call
            forced, _ = await message(s, said, tool_choice=choice, stop=["city"])
            assert calls(forced) == [("weather", call)]
            free, finish = await message(s, "the city", tool_choice="none", stop=["city"])
            assert (free["content"], finish) == ("the ", "stop")

    run(scenario)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_no_stop_token_reaches_the_core_with_a_forced_call(tmp_path: Path, choice: Any) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, ByteCodec) as s:
            for tool_choice in (choice, "none"):
                await message(s, "{}", tool_choice=tool_choice, stop_token_ids=[ord("}")])
            forced, free = (request.params.stop_token_ids for request in s.core.requests)
            assert (forced, free) == ((), (ord("}"),))

    run(scenario)


def test_forced_calls_have_a_grammar_and_need_no_parser(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, ByteCodec) as s:
            listed = '[{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "time", "parameters": {}}]'
            required, finish = await message(s, listed, tool_choice="required")
            assert (calls(required), finish) == ([("weather", '{"city": "Rome"}'), ("time", "{}")], "tool_calls")
            assert required["content"] is None
            grammar = s.core.requests[-1].params.grammar
            assert grammar is not None
            assert (grammar.kind, grammar.field) == ("json_schema", "tools")
            assert json.loads(grammar.text)["minItems"] == 1
            choice = {"type": "function", "function": {"name": "weather"}}
            named, finish = await message(s, '{"city": "Oslo"}', tool_choice=choice)
            assert (calls(named), finish) == ([("weather", '{"city": "Oslo"}')], "stop")  # as OpenAI's
            grammar = s.core.requests[-1].params.grammar
            assert grammar is not None
            parameters: dict[str, Any] = WEATHER["function"]["parameters"]  # type: ignore[index]
            assert json.loads(grammar.text) == {**parameters, "additionalProperties": False}

    run(scenario)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called_and_the_template_is_shown_all(tmp_path: Path, mode: str) -> None:
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "weather"}}]},
    }
    answer = CALL if mode == "auto" else f"[{CALL.removeprefix('<tool_call>').removesuffix('</tool_call>')}]"

    async def scenario() -> None:
        async with roomy(tmp_path, HermesCodec) as s:
            one, finish = await message(s, answer, tool_choice=choice)
            assert (calls(one), finish) == ([("weather", '{"city": "Paris"}')], "tool_calls")
            request = s.core.requests[-1]
            assert bytes(request.prompt_tokens).startswith(b"<tool>weather<tool>time<user>")
            assert request.params.grammar is not None
            assert (request.params.grammar.kind, request.params.grammar.field) == (
                "structural_tag" if mode == "auto" else "json_schema",
                "tools",
            )
            if mode == "required":
                return
            other, finish = await message(s, CLOCK, tool_choice=choice)
            assert (other["content"], other.get("tool_calls"), finish) == (CLOCK, None, "stop"), "by no path at all"
            await message(s, "{}", tool_choice=choice, response_format={"type": "json_object"})
            assert s.core.requests[-1].params.grammar == OutputGrammar.json_object("response_format")

    run(scenario)


def test_a_model_whose_form_of_calls_is_not_known_refuses_auto_unless_the_engine_names_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, ByteCodec) as s:
            refused = await s.post(CHAT, messages=say("x"), tools=[WEATHER])
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, "tools", "tool_parser_unknown")
            assert "--tool-call-parser" in error["message"]
            s.front.parsers = ParserChoice(tool_calls="hermes")
            assert (await message(s, CALL))[1] == "tool_calls"

    run(scenario)


def test_mistrals_markers_stay_in_the_text_and_its_ids_are_short(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, MistralCodec) as s:
            one, _ = await message(s, '[TOOL_CALLS][{"name": "time", "arguments": {}}]')
            assert calls(one) == [("time", "{}")]
            assert len(one["tool_calls"][0]["id"]) == 9
            assert s.core.requests[-1].params.skip_special_tokens is False

    run(scenario)


def test_json_that_the_request_asks_for_is_content(tmp_path: Path) -> None:
    """It may look like a call: here it names a function of the request."""
    text = '{"name": "time", "parameters": {}}'
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}

    async def scenario() -> None:
        async with roomy(tmp_path, LlamaCodec) as s:
            called, finish = await message(s, text)
            assert (calls(called), finish) == ([("time", "{}")], "tool_calls")
            plain, finish = await message(s, text, **asked)
            assert (plain, finish) == ({"role": "assistant", "content": text, "refusal": None}, "stop")
            assert s.core.requests[-1].params.skip_special_tokens
        async with roomy(tmp_path, ByteCodec) as s:  # nor need it be known how this model writes calls
            plain, finish = await message(s, text, **asked)
            assert (plain["content"], finish) == (text, "stop")

    run(scenario)


def test_calls_in_the_history_reach_the_template_with_arguments_as_objects(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Recording(HermesCodec):
        def render_chat(self, messages: Any, **settings: Any) -> str:
            seen.extend(messages)
            return super().render_chat(messages, **settings)

    history: list[dict[str, Any]] = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "say:warm"},
    ]  # fmt: skip

    async def scenario() -> None:
        async with roomy(tmp_path, Recording) as s:
            answer = await s.post(CHAT, messages=history, tools=[WEATHER])
            assert answer.json()["choices"][0]["message"]["content"] == "warm"
            assert seen[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
            assert (seen[1]["content"], seen[2]["tool_call_id"]) == ("", "call_1")
            for arguments in ("{", "3"):
                history[1]["tool_calls"][0]["function"]["arguments"] = arguments
                refused = await s.post(CHAT, messages=history)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.tool_calls")

    run(scenario)


@pytest.mark.parametrize(("codec", "text"), [(ByteCodec, "<think>so</think>\nyes"), (ThinkingCodec, "so</think>yes")])
def test_reasoning_has_a_field_of_its_own(tmp_path: Path, codec: Any, text: str) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, codec) as s:
            body = {"messages": say(text), "max_tokens": 60}
            s.front.parsers = ParserChoice(reasoning="think")
            if codec is ThinkingCodec:  # the fake core repeats the whole prompt
                body["messages"] = say("x")
                answer = (await s.post(CHAT, **body)).json()["choices"][0]["message"]
                assert (answer["content"], answer["reasoning_content"]) == ("", "x<assistant><think>\n")
                return
            answer = (await s.post(CHAT, **body)).json()["choices"][0]["message"]
            assert (answer["content"], answer["reasoning_content"], answer["reasoning"]) == ("yes", "so", "so")
            deltas = [event["choices"][0]["delta"] for event in (await s.stream(CHAT, **body))[:-1]]
            for field in ("reasoning_content", "reasoning"):
                assert "".join(delta.get(field, "") for delta in deltas) == "so"
            assert "".join(delta.get("content") or "" for delta in deltas) == "yes"
            hidden = (await s.post(CHAT, **body, include_reasoning=False)).json()["choices"][0]["message"]
            assert hidden == {"role": "assistant", "content": "yes", "refusal": None}
            deltas = [
                event["choices"][0]["delta"] for event in (await s.stream(CHAT, **body, include_reasoning=False))[:-1]
            ]
            assert {key for delta in deltas for key in delta} == {"role", "content"}
            s.front.parsers = ParserChoice()
            assert (await s.post(CHAT, **body)).json()["choices"][0]["message"]["content"] == text

    run(scenario)


@pytest.mark.parametrize(
    ("codec", "choice", "place"),
    [(ByteCodec, "auto", "none"), (ByteCodec, "think", "before"), (ThinkingCodec, "think", "begun")],
)
def test_reasoning_comes_before_what_follows_a_grammar(tmp_path: Path, codec: Any, choice: Any, place: str) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path, codec) as s:
            s.front.parsers = ParserChoice(reasoning=choice)
            forced = {"tools": [WEATHER], "tool_choice": "required"}
            call = '[{"name": "weather", "parameters": {}}]'
            for fields, text in (({"response_format": {"type": "json_object"}}, "{}"), (forced, call)):
                answer = await s.post(CHAT, messages=say(f"<think>so</think>\n\n{text}"), **fields)
                grammar = s.core.requests[-1].params.grammar
                assert grammar is not None
                assert grammar.reasoning == place
                if place == "before":
                    message = answer.json()["choices"][0]["message"]
                    assert message["reasoning"] == "so"
                    assert message["content"] == ("{}" if fields is not forced else None)
                    assert bool(message.get("tool_calls")) == (fields is forced)
            await s.post("/v1/completions", prompt="say:{}", response_format={"type": "json_object"})
            assert s.core.requests[-1].params.grammar == OutputGrammar.json_object("response_format"), (
                "a prompt has none"
            )

    run(scenario)


@pytest.mark.parametrize(
    ("template", "choice", "found"),
    [(None, "auto", False), ("<think>", "auto", True), ("<think>", "none", False), (None, "think", True)],
)
def test_reasoning_is_looked_for_where_the_template_has_its_marks(
    tmp_path: Path, template: str | None, choice: Any, found: bool
) -> None:
    class Codec(ByteCodec):
        template_source: str | None = template

    async def scenario() -> None:
        async with roomy(tmp_path, Codec) as s:
            s.front.parsers = ParserChoice(reasoning=choice)
            answer = (await s.post(CHAT, messages=say("<think>so</think>yes"))).json()["choices"][0]["message"]
            assert (answer.get("reasoning"), answer["content"]) == (
                ("so", "yes") if found else (None, "<think>so</think>yes")
            )

    run(scenario)


@pytest.mark.parametrize(
    ("prefilled", "found"), [("<think>say:so", ("so", "")), ("<think>a</think>say:so", (None, "so"))]
)
def test_an_answer_goes_on_with_prefilled_reasoning(
    tmp_path: Path, prefilled: str, found: tuple[str | None, str]
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.front.parsers = ParserChoice(reasoning="think")
            body = {
                "messages": [*say("a"), {"role": "assistant", "content": prefilled}],
                "continue_final_message": True,
            }
            answer = (await s.post(CHAT, **body, add_generation_prompt=False)).json()["choices"][0]["message"]
            assert (answer.get("reasoning"), answer["content"]) == found

    run(scenario)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_and_the_effort_reach_the_template(tmp_path: Path, field: str) -> None:
    seen: list[Any] = []

    class Recording(ByteCodec):
        def render_chat(self, messages: Any, **settings: Any) -> str:
            seen.append((messages[0], settings))
            return super().render_chat(messages, **settings)

    async def scenario() -> None:
        async with roomy(tmp_path, Recording) as s:
            messages = [{"role": "assistant", "content": "a", field: "why"}, *say("hi")]
            assert (await s.post(CHAT, messages=messages, reasoning_effort="low")).status_code == 200
            own = {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"}
            assert (await s.post(CHAT, messages=messages, **own)).status_code == 200
            assert (seen[0][0]["reasoning"], seen[0][0]["reasoning_content"]) == ("why", "why")
            assert [settings["reasoning_effort"] for _, settings in seen] == ["low", "high"]

    run(scenario)
