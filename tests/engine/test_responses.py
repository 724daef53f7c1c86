"""`/v1/responses`: whole answers, typed events, the official client, calls and reasoning as items."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from stoker.engine.core.messages import CoreState
from stoker.engine.http.job import Job, Usage
from stoker.engine.http.openai.answer import Envelope
from stoker.engine.http.openai.logprobs import TokenNames
from stoker.engine.http.openai.parser_choice import ParserChoice
from stoker.engine.http.openai.responses import ResponsesAnswer
from stoker.engine.http.openai.responses_body import ResponsesBody
from stoker.engine.http.openai.tools import tool_use
from stoker.engine.http.text import OutputText
from stoker.engine.http.update import Update
from stoker.engine.sampling import SamplingParams
from testing.engine.fake_core import EOS, FACTS, ByteCodec, scored
from testing.engine.serving import Serving, run, serving, until

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'

EARLIER = {"type": "function_call", "call_id": "1", "name": "weather"}


class HermesCodec(ByteCodec):
    template_source = "<tool_call>"


@asynccontextmanager
async def roomy(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, HermesCodec) as s:
        await s.core.set_state(CoreState("Serving", "", replace(FACTS, max_model_len=2000)))
        await until(lambda: s.front.served.facts is not None and s.front.served.facts.max_model_len == 2000)
        yield s


async def events(s: Serving, **body: Any) -> list[dict[str, Any]]:
    answer = await s.post(PATH, **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_text_is_answered_with_one_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            body = (await s.post(PATH, input="say:hey", instructions="be brief", temperature=0.0)).json()
            assert bytes(s.core.requests[0].prompt_tokens) == b"<system>be brief<user>say:hey<assistant>"
            assert (body["object"], body["status"], body["store"], body["error"]) == (
                "response",
                "completed",
                False,
                None,
            )
            assert body["id"].startswith("resp_")
            (item,) = body["output"]
            assert (item["type"], item["role"], item["content"][0]["text"]) == ("message", "assistant", "hey")
            assert body["usage"]["input_tokens"] == len(s.core.requests[0].prompt_tokens)
            assert body["usage"]["output_tokens"] == 4
            cut = (await s.post(PATH, input="say:hey", max_output_tokens=2)).json()
            assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            assert cut["output"][0]["content"][0]["text"] == "he"

    run(scenario)


def test_a_stream_has_openais_events(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            found = await events(s, input=[{"role": "user", "content": [{"type": "input_text", "text": "say:ab"}]}])
            assert [event["type"].removeprefix("response.") for event in found] == [
                "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
                "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
            ]  # fmt: skip
            last = found[-1]["response"]
            assert last["output"][0]["content"][0]["text"] == "ab" == found[6]["text"]
            assert len({event["item_id"] for event in found if "item_id" in event}) == 1

    run(scenario)


def test_a_stream_that_fails_says_so_and_ends_with_the_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            *blocks, error, done = (await s.post(PATH, input="fail say:abcdef", stream=True)).text.strip().split("\n\n")
            name, data = blocks[-1].split("\n")
            response = json.loads(data.removeprefix("data: "))["response"]
            assert (name, response["status"], response["error"]["code"]) == (
                "event: response.failed", "failed", "server_error",
            )  # fmt: skip
            assert response["error"]["message"].startswith("The request failed")
            assert [(item["status"], item["content"][0]["text"]) for item in response["output"]] == [
                ("incomplete", "abc")
            ]
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "generation_failed"
            assert done == "data: [DONE]"
            whole = await s.post(PATH, input="fail say:abcdef")
            assert (whole.status_code, whole.json()["error"]["code"]) == (500, "generation_failed")

    run(scenario)


def test_calls_and_reasoning_are_items_of_their_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            s.front.parsers = ParserChoice(reasoning="think")
            question = f"say:<think>hm</think>I look. {CALL}"
            body = (await s.post(PATH, input=question, tools=[TOOL])).json()
            assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
            call = body["output"][2]
            assert (call["name"], call["arguments"], call["status"]) == ("weather", '{"city": "Rome"}', "completed")
            assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
            found = await events(s, input=question, tools=[TOOL])
            kinds = {event["type"] for event in found}
            assert "response.function_call_arguments.delta" in kinds
            assert "response.reasoning_text.delta" in kinds
            history = [
                {"role": "user", "content": "weather?"},
                {**call, "id": "fc_1"},
                {"type": "function_call_output", "call_id": call["call_id"], "output": "say:warm"},
            ]
            answer = (await s.post(PATH, input=history, tools=[TOOL])).json()
            assert answer["output"][0]["content"][0]["text"] == "warm"

    run(scenario)


def test_formats_and_forced_calls_are_grammars(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}
            body = (await s.post(PATH, input="say:3", text={"format": form})).json()
            assert body["text"]["format"]["schema"] == {"type": "integer"}
            grammar = s.core.requests[-1].params.grammar
            assert grammar is not None
            assert json.loads(grammar.text) == {"type": "integer"}
            refused = (await s.post(PATH, input="badgrammar", text={"format": form})).json()["error"]
            assert refused["param"] == "text.format.schema"
            forced = {"type": "function", "name": "weather"}
            body = (await s.post(PATH, input="say:{}", tools=[TOOL], tool_choice=forced)).json()
            assert (body["output"][0]["type"], body["output"][0]["arguments"]) == ("function_call", "{}")
            some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
            said = 'say:[{"name": "weather", "parameters": {}}]'
            body = (await s.post(PATH, input=said, tools=[TOOL], tool_choice=some)).json()
            assert (body["output"][0]["type"], body["tool_choice"]) == ("function_call", some)
            for wrong, field, got in (
                ({**some, "mode": "named"}, "tool_choice.mode", "'named'"),
                ({**some, "tools": []}, "tool_choice.tools", "[]"),
                ({**some, "tools": [{"type": "function", "name": "time"}]}, "tool_choice.tools.0", "'time'"),
            ):
                error = (await s.post(PATH, input="x", tools=[TOOL], tool_choice=wrong)).json()["error"]
                assert (error["param"], error["message"].partition(":")[0]) == (field, field)
                assert error["message"].endswith(f"got {got}")

    run(scenario)


def test_sampling_fields_mean_what_they_mean_in_a_chat(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            fields = {"top_k": 3, "presence_penalty": 0.5, "repetition_penalty": 1.5, "ignore_eos": True}
            body = (
                await s.post(PATH, input="say:a.b", stop=["."], include=["reasoning.encrypted_content"], **fields)
            ).json()
            assert body["output"][0]["content"][0]["text"] == "a"
            params = s.core.requests[-1].params
            assert {name: getattr(params, name) for name in fields} == fields
            await s.post(PATH, input="say:a", structured_outputs={"choice": ["a"]}, reasoning={"effort": "low"})
            grammar = s.core.requests[-1].params.grammar
            assert grammar is not None
            assert (grammar.kind, grammar.text) == ("choice", '["a"]')

    run(scenario)


def test_scores_and_times_are_in_the_answer_on_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            s.front.parsers = ParserChoice(reasoning="think")
            question = f"say:<think>hm</think>ab {CALL}"
            asked: dict[str, Any] = {"input": question, "tools": [TOOL], "top_logprobs": 1}
            body = (await s.post(PATH, **asked, prompt_logprobs=0, include_timing=True)).json()
            part = body["output"][1]["content"][0]
            assert [entry["token"] for entry in part["logprobs"]] == ["a", "b"] == list(part["text"])
            assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [1, 1]
            assert len(body["prompt_logprobs"]) == body["usage"]["input_tokens"]
            assert body["usage"]["timing"]["total_s"] > 0
            found = await events(s, **asked)
            sent = [
                entry for event in found if event["type"].endswith("output_text.delta") for entry in event["logprobs"]
            ]
            assert (
                sent == part["logprobs"] == next(e["logprobs"] for e in found if e["type"].endswith("output_text.done"))
            )
            plain = (await s.post(PATH, input="say:x", include=["message.output_text.logprobs"])).json()
            assert plain["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []
            refused = (await s.post(PATH, input="x", stream=True, prompt_logprobs=1)).json()["error"]
            assert refused["message"] == "prompt_logprobs: not allowed with stream=true"

    run(scenario)


class Spoken:
    """A generation whose output is known: each update has so many tokens, of which each is a byte."""

    def __init__(self, text: str, size: int) -> None:
        self.text, self.size = text.encode(), size
        self.jobs = (Job("a", (3,), SamplingParams(logprobs=0), 0.0),)
        self.usage = [Usage(1, completion_tokens=len(self.text))]

    async def updates(self) -> AsyncGenerator[Update]:
        text = OutputText(ByteCodec(Path()).detokenizer(skip_special_tokens=True), ["<tool_calls>"])
        for start in range(0, len(self.text), self.size):
            tokens = tuple(self.text[start : start + self.size])
            piece = text.add(tokens)
            scores = tuple(scored(token, 0) for token in tokens)
            yield Update(0, 0, piece.text, tokens, piece.offsets, scores)
        yield Update(0, 0, text.finish().text, logprobs=(), finish="stop", end_token=EOS)


async def spoken(text: str, size: int) -> tuple[list[Any], int]:
    """The items of an answer whose updates have so many tokens, without ids, and its tokens of reasoning."""
    parsers = ParserChoice(reasoning="think").for_request(
        tool_use([{"type": "function", "function": {"name": "weather"}}], None, None), "<tool_call>",
        reasons_already=False,
    )  # fmt: skip
    body = ResponsesBody.model_validate({"input": "x", "top_logprobs": 1})
    generation: Any = Spoken(text, size)
    names = TokenNames(ByteCodec(Path()))
    answer = ResponsesAnswer(Envelope("id", 0, "m", None), generation, parsers, names, body, timing=False)
    whole = await answer.whole()
    items = [{key: value for key, value in item.items() if "id" not in key} for item in whole["output"]]
    return items, whole["usage"]["output_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("size", [2, 7, 200])
@pytest.mark.parametrize("text", [f"<think>häm</think>\n\naß <tool_b {CALL}", "plain €", "<think>cut"])
def test_an_answer_is_the_same_however_many_tokens_come_at_once(text: str, size: int) -> None:
    async def scenario() -> None:
        items, reasoned = await spoken(text, 1)
        assert await spoken(text, size) == (items, reasoned)
        message = next((item for item in items if item["type"] == "message"), None)
        if message is not None:
            part = message["content"][0]
            scored_text = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode()
            assert scored_text.strip() == part["text"]

    run(scenario)


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


CALLED: list[dict[str, Any]] = [
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "r" * 40},
]
LONG = "x" * 900
SHORTENED = [
    pytest.param([said("user", "a"), said("assistant", "b"), said("user", "c")], 1000, "<user>a<assistant>b<user>c"),
    pytest.param([said("user", LONG), said("assistant", LONG), said("user", "c")], 1000, "<user>c"),
    pytest.param([said("user", LONG), said("user", "b"), said("user", LONG)], 1000, f"<user>b<user>{LONG}"),
    pytest.param([said("system", "s"), said("user", LONG), said("user", LONG)], 1000, f"<system>s<user>{LONG}"),
    pytest.param([said("user", LONG), said("user", "b"), *CALLED], 1040, f"<user>b<assistant><tool>{'r' * 40}"),
    pytest.param([said("user", LONG), *CALLED, *CALLED], 1870, f"<assistant><tool>{'r' * 40}" * 2),
]


def test_the_oldest_items_are_left_out_with_truncation_auto(tmp_path: Path) -> None:
    """An output of so many tokens leaves the rest of 2,000 for the prompt."""

    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            for case in SHORTENED:
                items, most, kept = case.values
                limits = {"max_output_tokens": most, "truncation": "auto"}
                body = (await s.post(PATH, input=items, **limits)).json()
                assert body["truncation"] == "auto"
                assert bytes(s.core.requests[-1].prompt_tokens).decode() == f"{kept}<assistant>"
            instructed = {"instructions": "be brief", "max_output_tokens": 1000, "truncation": "auto"}
            await s.post(PATH, input=[said("user", LONG), said("assistant", LONG), said("user", "c")], **instructed)
            assert bytes(s.core.requests[-1].prompt_tokens) == b"<system>be brief<user>c<assistant>"
            error = (await s.post(PATH, input=LONG * 3, truncation="auto")).json()["error"]
            assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
            error = (await s.post(PATH, input=[said("user", LONG)] * 3)).json()["error"]
            assert error["code"] == "context_length_exceeded", "truncation is off where it is not asked for"

    run(scenario)


def test_an_output_of_a_function_may_be_parts_of_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            parts = [{"type": "input_text", "text": "say:x"}]
            items: list[Any] = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]
            items += [{"type": "function_call_output", "call_id": "1", "output": parts}]
            assert (await s.post(PATH, input=items)).status_code == 200
            assert bytes(s.core.requests[-1].prompt_tokens) == b"<assistant><tool>say:x<assistant>"

    run(scenario)


BAD: list[Any] = [
    pytest.param({}, "input", id="no input"),
    pytest.param({"input": []}, "input", id="empty"),
    pytest.param({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", id="stateful"),
    pytest.param({"input": "x", "background": True}, "background", id="background"),
    pytest.param({"input": [{"type": "item_reference", "id": "1"}]}, "input.0.type", id="reference"),
    pytest.param({"input": ["x"]}, "input", id="texts"),
    pytest.param({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id", id="no call"),
    pytest.param({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input.0.output", id="no output"),
    pytest.param({"input": "x", "top_logprobs": 21}, "top_logprobs", id="too many alternatives"),
    pytest.param({"input": "x", "truncation": "oldest"}, "truncation", id="truncation"),
    pytest.param({"input": "x", "best_of": 2}, "best_of", id="best of"),
    pytest.param({"input": "x", "n": 2}, "n", id="two answers"),
    pytest.param({"input": "x", "use_beam_search": True}, "use_beam_search", id="beams"),
    pytest.param({"input": "x", "return_token_ids": True}, "return_token_ids", id="token ids"),
    pytest.param({"input": "x", "prompt_logprobs": -1}, "prompt_logprobs", id="prompt's scores"),
    pytest.param({"input": "x", "vllm_xargs": {"a": 1}}, "vllm_xargs", id="xargs"),
    pytest.param({"input": "x", "detokenize": False}, "detokenize", id="no text"),
    pytest.param({"input": "x", "chat_template": "x"}, "chat_template", id="template"),
    pytest.param({"input": "x", "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", id="two grammars"),
    pytest.param({"input": "x", "messages": []}, "messages", id="chat's messages"),
    pytest.param({"input": "x", "max_tokens": 3}, "max_tokens", id="chat's limit"),
    pytest.param({"input": "x", "response_format": {"type": "json_object"}}, "response_format", id="chat's format"),
    pytest.param({"input": "x", "stop": [1]}, "stop", id="stop"),
    pytest.param({"input": "x", "cache_salt": ""}, "cache_salt", id="empty salt"),
    pytest.param({"input": "x", "thinking_token_budget": 9}, "thinking_token_budget", id="budget"),
    pytest.param({"input": "x", "kv_transfer_params": {}}, "kv_transfer_params", id="transfer"),
    pytest.param({"input": "x", "top_k": -2}, "top_k", id="top-k"),
    pytest.param({"input": [{"content": "x"}]}, "input.0.role", id="no role"),
    pytest.param({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type", id="tool"),
    pytest.param({"input": "x", "max_output_tokens": 0}, "max_output_tokens", id="limit"),
    pytest.param({"input": "x", "max_output_tokens": 3000}, "max_output_tokens", id="too long"),
    pytest.param({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format", id="no schema"),
    pytest.param({"input": "x", "temperature": -1}, "temperature", id="temperature"),
    pytest.param({"input": "x", "include": ["message.output_text.logprob"]}, "include.0", id="unknown include"),
    pytest.param({"input": "x", "metadata": [1]}, "metadata", id="metadata"),
    pytest.param({"input": "x", "metadata": {"a": 1}}, "metadata.a", id="metadata's value"),
    pytest.param({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name", id="tool without name"),
    pytest.param({"input": "x", "tools": [{**TOOL, "parameters": 1}]}, "tools.0.parameters", id="tool's parameters"),
    pytest.param({"input": [{"type": "function_call", "arguments": "{}"}]}, "input.0.name", id="call without name"),
    pytest.param({"input": [{**EARLIER, "arguments": "{"}]}, "input.0.arguments", id="call's arguments"),
]


def test_wrong_responses_name_their_own_fields(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            for case in BAD:
                body, param = case.values
                for stream in (False, True):
                    answer = await s.post(PATH, **body, stream=stream)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["param"]) == (400, param), (case.id, answer.text)
                    assert param in error["message"] or error["code"] == "context_length_exceeded", case.id

    run(scenario)


def test_an_error_about_the_limit_of_the_output_has_its_name_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            refused = (await s.post(PATH, input="x", max_output_tokens=5, min_tokens=6)).json()["error"]
            assert refused["message"] == "min_tokens must be at most max_output_tokens, 5, got 6"

    run(scenario)


def test_the_official_client_reads_responses(tmp_path: Path) -> None:
    def ask(url: str) -> tuple[str, str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            whole = client.responses.create(model="tiny", input="say:whole")
            for ask_again in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
                with pytest.raises(openai.NotFoundError, match=f"The response {whole.id} is not stored"):
                    ask_again(whole.id)
            with client.responses.stream(model="tiny", input="say:streamed") as stream:
                deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
                return whole.output_text, deltas, stream.get_final_response().output_text

    async def scenario() -> None:
        async with roomy(tmp_path) as s:
            answers = await asyncio.to_thread(partial(ask, s.url))
            assert answers == ("whole", "streamed", "streamed")

    run(scenario)
