"""Wrong requests: each is answered in OpenAI's shape, with the field and a code, and harms no other request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.core.messages import CoreState
from stoker.engine.http.api_keys import load_api_keys
from stoker.engine.http.errors import ApiError
from stoker.engine.http.openai.params import GenerationDefaults
from stoker.engine.http.openai.protocol import ChatBody, CompletionBody
from testing.engine.fake_core import FACTS, ByteCodec
from testing.engine.serving import events, run, serving, until

CHAT = {"messages": [{"role": "user", "content": "say:x"}]}
MOST_DIGITS = 10**4300 - 1
"""The largest integer that Python reads; it does not write one with a digit more."""
BAD_COMPLETIONS = [
    pytest.param({}, "prompt", "Field required", id="no prompt"),
    pytest.param({"prompt": []}, "prompt", "at least one prompt", id="empty list"),
    pytest.param({"prompt": [[]]}, "prompt", "at least one token", id="empty tokens"),
    pytest.param(
        {"prompt": [1.5]}, "prompt", "prompt: a text, a list of texts, token ids from 0", id="fractions as tokens"
    ),
    pytest.param({"prompt": [-1]}, "prompt", "is needed (got [-1])", id="negative token"),
    pytest.param({"prompt": [258]}, "prompt", "token ids from 0 to 257 are allowed, got 258", id="unknown token"),
    pytest.param({"prompt": "x", "max_tokens": 0}, "max_tokens", "0 is only allowed with echo", id="nothing to do"),
    pytest.param(
        {"prompt": "x", "max_tokens": 0, "echo": True, "use_beam_search": True},
        "max_tokens",
        "not allowed with use_beam_search",
        id="nothing to search",
    ),
    pytest.param(
        {"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 1},
        "min_tokens",
        "at most max_tokens, 0, got 1",
        id="more than nothing",
    ),
    pytest.param(
        {"prompt": "x", "max_tokens": -1}, "max_tokens", "greater than or equal to 0", id="negative max_tokens"
    ),
    pytest.param({"prompt": "x", "max_tokens": MOST_DIGITS}, "max_tokens", "less than 2147483648", id="many digits"),
    pytest.param({"prompt": [MOST_DIGITS]}, "prompt", "are allowed, got 999", id="token of many digits"),
    pytest.param({"prompt": "x", "temperature": -1}, "temperature", "must be a number from 0", id="temperature"),
    pytest.param({"prompt": "x", "temperature": "hot"}, "temperature", "valid number", id="temperature as text"),
    pytest.param({"prompt": "x", "temperature": True}, "temperature", "valid number", id="temperature as truth"),
    pytest.param({"prompt": "x", "n": "2"}, "n", "valid integer (got '2')", id="n as text"),
    pytest.param({"prompt": "x", "n": True}, "n", "valid integer (got True)", id="n as truth"),
    pytest.param({"prompt": "x", "echo": 1}, "echo", "valid boolean (got 1)", id="echo as number"),
    pytest.param({"prompt": "x", "priority": 10**30}, "priority", "less than 2147483648", id="priority"),
    pytest.param({"prompt": "x", "top_k": 10**30}, "top_k", "from -1 to 2147483647", id="top_k"),
    pytest.param({"prompt": "x", "stop_token_ids": [10**30]}, "stop_token_ids", "from 0 to", id="stop token"),
    pytest.param({"prompt": "x", "repetition_penalty": 1e-9}, "repetition_penalty", "from 0.01", id="repetition"),
    pytest.param({"prompt": "x", "logit_bias": {"9" * 20: 1}}, "logit_bias", "token ids (got '999", id="far token"),
    pytest.param({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "999...)", id="farther token"),
    pytest.param({"prompt": "x", "top_p": 0}, "top_p", "above 0", id="top_p"),
    pytest.param({"prompt": "x", "n": 0}, "n", "from 1 to 128", id="n"),
    pytest.param({"prompt": "x", "logprobs": 21}, "logprobs", "from 0 to 20", id="too many logprobs"),
    pytest.param({"prompt": "x", "logprobs": -1}, "logprobs", "from 0 to 20", id="negative logprobs"),
    pytest.param(
        {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "must be token ids (got 'a')", id="bias of a word"
    ),
    pytest.param({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100", id="bias too strong"),
    pytest.param({"prompt": "x", "stop": [""]}, "stop", "texts of 1 to", id="empty stop"),
    pytest.param({"prompt": "x", "stop": 1}, "stop", "a text or a list of texts is needed (got 1)", id="stop a number"),
    pytest.param({"prompt": "x", "stop": "y" * 5000}, "stop", "yyy... (5002 characters)", id="long stop"),
    pytest.param({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16", id="too many stops"),
    pytest.param(
        {"prompt": "x", "stream_options": {}},
        "stream_options",
        "only allowed with stream=true",
        id="options, no stream",
    ),
    pytest.param({"prompt": "x", "cache_salt": ""}, "cache_salt", "at least 1 character", id="empty cache salt"),
    pytest.param({"prompt": "x", "cache_salt": 3}, "cache_salt", "valid string", id="cache salt a number"),
    pytest.param(
        {"prompt": "x", "thinking_token_budget": 9}, "thinking_token_budget", "not supported yet", id="budget"
    ),
    pytest.param({"prompt": "x", "repetition_detection": {}}, "repetition_detection", "not supported yet", id="loops"),
    pytest.param({"prompt": "x", "logprob_token_ids": [1]}, "logprob_token_ids", "not supported yet", id="scored ids"),
    pytest.param({"prompt": "x", "kv_transfer_params": {}}, "kv_transfer_params", "not supported yet", id="transfer"),
    pytest.param({"prompt": "x", "suffix": "y"}, "suffix", 'not supported yet: suffix; allowed: ""', id="suffix"),
    pytest.param({"prompt": "x", "vllm_xargs": {"a": 1}}, "vllm_xargs", "vllm_xargs; allowed: {}", id="xargs"),
    pytest.param({"prompt": "x", "detokenize": False}, "detokenize", "detokenize; allowed: true", id="no text"),
    pytest.param({"prompt": "x", "prompt_embeds": "y"}, "prompt_embeds", "prompt_embeds; leave it out", id="embeds"),
    pytest.param({"prompt": "x", "guided_json": 3}, "guided_json", "", id="guided_json"),
    pytest.param({"prompt": "x", "guided_json": "{"}, "guided_json", "must be JSON", id="guided_json no JSON"),
    pytest.param({"prompt": "x", "guided_choice": []}, "guided_choice", "1 to 1024", id="no choice"),
    pytest.param(
        {"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]},
        "guided_choice",
        "together with guided_regex",
        id="two grammars",
    ),
    pytest.param({"prompt": "x", "structured_outputs": {}}, "structured_outputs", "one of json", id="no grammar"),
    pytest.param({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "at least one", id="none allowed"),
    pytest.param({"prompt": "x", "bad_words": [" "]}, "bad_words", "not blank", id="bad word"),
    pytest.param({"prompt": "x", "bad_words": ["y" * 65]}, "bad_words", "at most 64 tokens", id="long bad word"),
]
BAD_CHATS = [
    pytest.param(
        {**CHAT, "min_tokens": 3, "max_completion_tokens": 2},
        "min_tokens",
        "at most max_completion_tokens, 2, got 3",
        id="limit by its newer name",
    ),
    pytest.param({"messages": []}, "messages", "at least 1 item", id="no message"),
    pytest.param({"messages": [{"content": "x"}]}, "messages.0.role", "Field required", id="no role"),
    pytest.param({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "", id="content is a number"),
    pytest.param(
        {"messages": [{"role": "martian", "content": "x"}]}, "messages", "no role martian", id="template refuses"
    ),
    pytest.param(
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.content.text",
        "type text needs it",
        id="no text",
    ),
    pytest.param(
        {**CHAT, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self cannot be set", id="self"
    ),
    pytest.param({**CHAT, "cache_salt": ""}, "cache_salt", "at least 1 character", id="empty cache salt"),
    pytest.param(
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]},
        "messages.tool_calls",
        "arguments must be a JSON object (maximum recursion",
        id="arguments too deep",
    ),
    pytest.param({**CHAT, "max_tokens": MOST_DIGITS}, "max_tokens", "less than 2147483648", id="many digits"),
    pytest.param({**CHAT, "max_tokens": 0}, "max_tokens", "greater than or equal to 1", id="max_tokens"),
    pytest.param(
        {**CHAT, "top_logprobs": 2}, "top_logprobs", "only allowed with logprobs=true", id="top_logprobs alone"
    ),
    pytest.param(
        {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20", id="too many"
    ),
    pytest.param({**CHAT, "tools": [{"type": "function"}]}, "tools.0.function", "with a name is needed", id="tools"),
    pytest.param(
        {
            **CHAT,
            "tools": [
                {"type": "function", "function": {"name": "f"}},
                {"type": "function", "function": {"name": "g"}},
                {"type": "function", "function": {"name": "f", "description": "another"}},
            ],
        },
        "tools",
        "tools.0 and tools.2 differ and both have the name f",
        id="two functions of one name",
    ),
    pytest.param({**CHAT, "tool_choice": "required"}, "tool_choice", "only allowed with tools", id="tool_choice"),
    pytest.param(
        {
            **CHAT,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "file"}]}},
        },
        "tool_choice.allowed_tools.tools.0",
        "must name one of the request's functions f, got {'type': 'file'}",
        id="allowed tools",
    ),
    pytest.param(
        {
            **CHAT,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
        },
        "tool_choice",
        "together with response_format",
        id="two formats",
    ),
    pytest.param({**CHAT, "response_format": {"type": "xml"}}, "response_format.type", "'json_schema'", id="format"),
    pytest.param(
        {**CHAT, "response_format": {"type": "json_schema"}}, "response_format", "json_schema is needed", id="schema"
    ),
]


MARTIAN = [{"role": "martian", "content": "x"}]
BAD_TOKENIZE = [
    pytest.param({}, "prompt", "a text is needed, or messages", id="nothing to tokenize"),
    pytest.param({"prompt": "x", **CHAT}, "messages", "not allowed together with prompt", id="prompt and messages"),
    pytest.param({"prompt": ["x"]}, "prompt", "valid string", id="list of prompts"),
    pytest.param({"messages": MARTIAN}, "messages", "no role martian", id="template refuses"),
    pytest.param({**CHAT, "tools": [{"type": "x"}]}, "tools.0.type", "x", id="tool of an unknown type"),
    pytest.param({**CHAT, "continue_final_message": True}, "continue_final_message", "only allowed", id="goes on"),
]
BAD_DETOKENIZE = [
    pytest.param({}, "tokens", "Field required", id="no tokens"),
    pytest.param({"tokens": "x"}, "tokens", "valid array", id="text as tokens"),
    pytest.param({"tokens": [258]}, "tokens", "from 0 to 257 are allowed, got 258", id="unknown token"),
]


@pytest.mark.parametrize(
    ("path", "table"),
    [
        ("/v1/completions", BAD_COMPLETIONS),
        ("/v1/chat/completions", BAD_CHATS),
        ("/tokenize", BAD_TOKENIZE),
        ("/detokenize", BAD_DETOKENIZE),
    ],
)
def test_a_bad_request_is_a_clear_400(tmp_path: Path, path: str, table: Sequence[Any]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for case in table:
                body, param, message = case.values
                for stream in (False, True):  # the status is right for a stream too
                    if stream and "stream_options" in body:
                        continue
                    answer = await s.post(path, **{**body, "stream": stream})
                    error = answer.json()["error"]
                    found = (answer.status_code, error["type"], error["param"], message in error["message"])
                    assert found == (400, "invalid_request_error", param, True), (case.id, error)
                    assert set(error) == {"message", "type", "param", "code"}
                    assert error["code"]
            assert s.core.requests == []
            assert (await s.post("/v1/completions", prompt="say:x")).status_code == 200

    run(scenario)


FIELDS = sorted(
    {*CompletionBody.model_fields, *ChatBody.model_fields, "anything"} - {"messages", "chat_template_kwargs"}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("0123456789", max_size=12), inner, max_size=3),
    max_leaves=4,
)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    wrongs=st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2), min_size=30, max_size=30)
)
def test_whatever_a_field_holds_the_answer_is_its_own_or_names_the_field(tmp_path: Path, wrongs: list[Any]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for wrong in wrongs:
                for path, body in (("/v1/completions", {"prompt": "say:x"}), ("/v1/chat/completions", CHAT)):
                    answer = await s.http.post(path, content=json.dumps({**body, **wrong}))
                    assert answer.status_code in (200, 400) or "model" in wrong, (wrong, answer.text)
                    if answer.status_code == 400:
                        error = answer.json()["error"]
                        named = str(error["param"]).partition(".")[0]
                        assert named in wrong or error["code"] == "invalid_json", (wrong, error)

    run(scenario)


class LargerCodec(ByteCodec):
    """The tokenizer of another model: a bracket is a token that this one does not have."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens = super().encode(text, add_special_tokens=add_special_tokens)
        return [FACTS.vocab_size if token == ord("[") else token for token in tokens]


def test_a_token_that_the_tokenizer_alone_has_is_no_mistake_of_the_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, codec=LargerCodec) as s:
            messages = [{"role": "user", "content": "say:["}]
            for path, body in (("completions", {"prompt": "say:["}), ("chat/completions", {"messages": messages})):
                answer = await s.http.post(f"/v1/{path}", json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (500, "foreign_tokenizer")
                assert "made the token 258 of the prompt, and the model has those up to 257" in answer.text
                assert answer.headers["x-should-retry"] == "false"
            assert (await s.http.post("/v1/completions", json={"prompt": "say:x"})).status_code == 200

    run(scenario)


def test_too_long_a_prompt_is_refused_in_the_words_that_clients_look_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            error = (await s.post("/v1/completions", prompt="x" * 190, max_tokens=20)).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
            assert error["message"].startswith(
                "This model's maximum context length is 200 tokens. "
                "However, you requested 211 tokens (191 in the prompt, 20"
            )
            messages = [{"role": "user", "content": "x" * 300}]
            error = (await s.post("/v1/chat/completions", messages=messages)).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")

    run(scenario)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_tokens": 300}, "max_tokens"),
        ({"max_completion_tokens": 300}, "max_completion_tokens"),
        ({"max_completion_tokens": 300, "max_tokens": 1}, "max_completion_tokens"),
        ({"max_completion_tokens": 1, "max_tokens": 300}, None),
    ],
)
def test_the_limit_that_does_not_fit_is_named_as_it_was_given(
    tmp_path: Path, limits: dict[str, int], named: str | None
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = await s.post("/v1/chat/completions", **CHAT, **limits)
            assert answer.json().get("error", {}).get("param") == named

    run(scenario)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(b"{", "invalid_json", id="half an object"),
        pytest.param(b"\xff\xfe", "invalid_json", id="not UTF-8"),
        pytest.param(b'{"prompt": "\\ud800"}', "invalid_json", id="half a character"),
        pytest.param(b"[1]", "invalid_value", id="a list"),
        pytest.param(b'{"prompt": "x", "temperature": NaN}', "invalid_value", id="NaN"),
    ],
)
def test_a_body_that_is_not_json_is_a_400(tmp_path: Path, content: bytes, code: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = await s.http.post("/v1/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)

    run(scenario)


def test_keys_sizes_models_methods_and_paths(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, api_keys=("k1", "k2"), max_body_bytes=200) as s:

            async def status(method: str, path: str, key: str | None = "k2", **request: Any) -> tuple[int, Any]:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                answer = await s.http.request(method, path, headers=headers, **request)
                return answer.status_code, answer.json()["error"]["code"] if answer.status_code >= 400 else None

            completions = "/v1/completions"
            assert await status("POST", completions, json={"prompt": "say:x"}) == (200, None)
            assert await status("POST", completions, None, json={"prompt": "say:x"}) == (401, "invalid_api_key")
            assert await status("POST", completions, "k", json={"prompt": "say:x"}) == (401, "invalid_api_key")
            assert await status("POST", completions, content=b"x" * 201) == (413, "request_too_large")
            assert await status("POST", completions, json={"prompt": "x", "model": "big"}) == (404, "model_not_found")
            assert await status("GET", "/v1/models/other-name") == (200, None)
            assert await status("GET", "/v1/models/none") == (404, "model_not_found")
            assert await status("GET", completions) == (405, "method_not_allowed")
            assert await status("GET", "/v1/unknown") == (404, "unknown_path")
            assert await status("POST", "/chat/completions") == (404, "unknown_path")
            assert await status("GET", "/health", None) == (200, None)
            assert (await s.http.get("/readyz")).status_code == 200
            assert (await s.http.get("/version")).json() == {"version": "0.1"}

    run(scenario)


def test_a_full_queue_and_a_draining_engine_ask_to_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = await s.post("/v1/completions", prompt="refuse", stream=True)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "queue_full"
            await s.core.set_state(CoreState("Draining", "draining", FACTS))
            await until(lambda: s.front.core.state.phase == "Draining")
            answer = await s.post("/v1/completions", prompt="say:x")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert (await s.http.get("/health")).status_code == 503
            assert (await s.http.get("/readyz")).status_code == 503

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_that_fails_leaves_the_others_alone(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            good = [asyncio.ensure_future(s.post("/v1/completions", prompt="slow say:abcdefgh")) for _ in range(3)]
            bad = await s.post("/v1/completions", prompt="slow fail say:abcdefgh", stream=stream)
            if stream:
                *texts, error, done = events(bad.text)
                assert "".join(chunk["choices"][0]["text"] for chunk in texts) == "abc"
                assert (error["error"]["code"], done) == ("generation_failed", "[DONE]")
            else:
                assert (bad.status_code, bad.json()["error"]["code"]) == (500, "generation_failed")
            assert "not finite" in bad.text
            assert [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*good)] == ["abcdefgh"] * 3

    run(scenario)


def test_a_stream_that_a_lost_rank_ends_can_go_on_at_another_engine(tmp_path: Path) -> None:
    """Its last event has the code by which routers resume it."""

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            streamed = await s.post("/v1/completions", prompt="slow lost say:abcdefgh", stream=True)
            *_, error, done = events(streamed.text)
            assert (error["error"]["code"], done) == ("engine_lost", "[DONE]")
            whole = await s.post("/v1/completions", prompt="slow lost say:abcdefgh")
            assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_lost")
            assert "RankFailed: rank 1 has ended" in whole.text

    run(scenario)


def test_a_core_that_dies_ends_streams_with_an_error_and_readiness_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = {"prompt": "held say:" + "x" * 50, "stream": True, "max_tokens": 60}
            async with s.http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_text()
                begun = await anext(lines)
                s.front.core.lose("the core process was killed by signal 9")
                rest = "".join([line async for line in lines])
            assert begun.startswith("data: ")
            assert [item["error"]["code"] for item in events(rest)[-2:-1]] == ["engine_lost"]
            assert events(rest)[-1] == "[DONE]"
            assert (await s.http.get("/readyz")).status_code == 503
            assert (await s.post("/v1/completions", prompt="say:x")).status_code == 503

    run(scenario)


@pytest.mark.parametrize(
    ("status", "retry_after_s", "headers"),
    [
        (400, None, {}),
        (404, None, {}),
        (409, None, {"x-should-retry": "false"}),
        (409, 1, {"retry-after": "1"}),
        (429, 1, {"retry-after": "1"}),
        (500, None, {"x-should-retry": "false"}),
        (503, None, {"x-should-retry": "false"}),
        (503, 1, {"retry-after": "1"}),
    ],
)
def test_clients_are_told_not_to_repeat_what_would_be_refused_again(
    status: int, retry_after_s: int | None, headers: dict[str, str]
) -> None:
    assert ApiError(status, "no", retry_after_s=retry_after_s).headers() == headers


def test_the_official_client_asks_once_for_what_cannot_be(tmp_path: Path) -> None:
    def ask(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=2) as client:
            with pytest.raises(openai.ConflictError, match="this engine serves one model"):
                client.models.delete("tiny")
            with pytest.raises(openai.InternalServerError, match="The request failed"):
                client.completions.create(model="tiny", prompt="fail say:abcd")

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            await asyncio.to_thread(ask, s.url)
            assert len(s.core.requests) == 1

    run(scenario)


def test_defaults_of_the_model_are_used_and_shown(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.7, "top_k": 20, "do_sample": true, "eos_token_id": 2}'
    )
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults(temperature=0.7, top_k=20)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults(temperature=0.0)
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_p must be"):
        GenerationDefaults.load(tmp_path)
    assert GenerationDefaults.load(tmp_path / "none") == GenerationDefaults()


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ValueError, match="at least one API key"):
        load_api_keys(str(tmp_path / "keys"))
