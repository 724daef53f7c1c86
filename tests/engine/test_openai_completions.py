"""`/v1/completions` on the wire, over a fake core whose tokens are bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.core.messages import CoreState
from stoker.pod.stream_comments import COMMENT
from testing.engine.fake_core import BOS, FACTS, ByteCodec, ByteDetokenizer
from testing.engine.serving import events, run, serving, until

PATH = "/v1/completions"


def test_a_whole_answer_has_openais_shape(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = await s.post(PATH, model="tiny", prompt="say:hey", max_tokens=10)
            body = answer.json()
            assert body.pop("id").startswith("cmpl-")
            assert isinstance(body.pop("created"), int)
            assert body == {
                "object": "text_completion",
                "model": "tiny",
                "system_fingerprint": "fp_abcdef0123",
                "choices": [
                    {"index": 0, "text": "hey", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
                ],
                "usage": {
                    "prompt_tokens": 8,
                    "completion_tokens": 4,  # the end token was generated too
                    "total_tokens": 12,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
            }

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        pytest.param("say:a", ["a"], id="text"),
        pytest.param(["say:a", "say:bb"], ["a", "bb"], id="texts"),
        pytest.param([BOS, *b"say:a"], ["a"], id="tokens"),
        pytest.param([[*b"say:a"], [*b"say:bb"], [*b"say:c"]], ["a", "bb", "c"], id="token lists"),
    ],
)
def test_every_form_of_prompt_is_understood(tmp_path: Path, prompt: Any, expected: list[str]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            choices = (await s.post(PATH, prompt=prompt)).json()["choices"]
            assert [(c["index"], c["text"]) for c in choices] == list(enumerate(expected))

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "more", "reason"),
    [
        pytest.param("say:a12", {"stop": ["2", "1"]}, "1", id="stop text"),
        pytest.param("say:a12", {"stop": "1", "include_stop_str_in_output": True}, "1", id="stop text that is kept"),
        pytest.param("say:a12", {}, None, id="end token"),
    ],
)
def test_the_stop_reason_is_what_the_request_named(
    tmp_path: Path, prompt: str, more: dict[str, Any], reason: str | int | None
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for path, body in (
                (PATH, {"prompt": prompt}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}),
            ):
                (choice,) = (await s.post(path, **body, **more)).json()["choices"]
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
                last = (await s.stream(path, **body, **more))[-2]["choices"][0]
                assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)

    run(scenario)


class Unblanked(ByteCodec):
    """A tokenizer of words: a text that stands alone does not begin with a blank."""

    def detokenizer(self, *, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> ByteDetokenizer:
        made = super().detokenizer(skip_special_tokens=skip_special_tokens)
        if not prompt:
            add, number = made.add, count()
            made.add = lambda token: add(token).lstrip(" " * (next(number) == 0))  # type: ignore[method-assign]
        return made


def test_a_completion_keeps_the_blank_before_its_first_word_and_an_answer_does_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, Unblanked) as s:
            for more in ({}, {"echo": True}):
                text = (await s.post(PATH, prompt="say: word", **more)).json()["choices"][0]["text"]
                assert text.removeprefix("say: word") == " word"
            messages = [{"role": "user", "content": "say: word"}]
            answer = (await s.post("/v1/chat/completions", messages=messages)).json()
            assert answer["choices"][0]["message"]["content"].startswith("word")

    run(scenario)


def test_more_prompts_than_the_queue_takes_follow_one_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            choices = (await s.post(PATH, prompt=[f"slow say:{number:09}" for number in range(700)])).json()["choices"]
            assert [choice["text"] for choice in choices] == [f"{number:09}" for number in range(700)]
            assert s.core.most_running <= 512

    run(scenario)


def test_n_answers_to_several_prompts_are_numbered_prompt_by_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = (await s.post(PATH, prompt=["say:a", "say:b"], n=2)).json()
            assert [c["text"] for c in body["choices"]] == ["a", "1a", "b", "1b"]
            chunks = await s.stream(PATH, prompt=["say:a", "say:b"], n=2)
            texts = ["", "", "", ""]
            for chunk in chunks[:-1]:
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            assert texts == ["a", "1a", "b", "1b"]
            finishes = [c["choices"][0]["index"] for c in chunks[:-1] if c["choices"][0]["finish_reason"]]
            assert sorted(finishes) == [0, 1, 2, 3]

    run(scenario)


def test_a_stream_is_the_whole_answer_in_pieces(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            chunks = await s.stream(PATH, prompt="say:h€y")
            assert chunks[-1] == "[DONE]"
            assert all("text" in chunk["choices"][0] and "usage" not in chunk for chunk in chunks[:-1])
            assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["h", "€", "y", ""]
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
            assert len({chunk["id"] for chunk in chunks[:-1]}) == 1

    run(scenario)


def test_usage_comes_in_one_last_chunk_without_choices_only_when_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            chunks = await s.stream(PATH, prompt="say:ab", stream_options={"include_usage": True})
            *others, last, done = chunks
            assert done == "[DONE]"
            assert [chunk["usage"] for chunk in others] == [None] * len(others)
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
            options = {"include_usage": True, "continuous_usage_stats": True}
            chunks = await s.stream(PATH, prompt="say:ab", stream_options=options)
            assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [1, 2, 3, 3]

    run(scenario)


def test_logprobs_of_the_output_have_names_values_alternatives_and_offsets(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = (await s.post(PATH, prompt="say:a€b", logprobs=2)).json()
            logprobs = body["choices"][0]["logprobs"]
            assert logprobs["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
            assert logprobs["token_logprobs"] == [-0.97, -2.26, -1.3, -1.72, -0.98]
            assert logprobs["top_logprobs"][0] == {"a": -0.97, "b": -0.98}
            assert logprobs["text_offset"] == [0, 1, 1, 1, 2]

    run(scenario)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_the_prompt_as_evaluation_harnesses_ask_for_it(tmp_path: Path, max_tokens: int) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            prompt = [*b"say:xy"]
            body = (await s.post(PATH, prompt=prompt, echo=True, max_tokens=max_tokens, logprobs=1, seed=1)).json()
            choice = body["choices"][0]
            assert choice["text"] == "say:xy" + "x" * max_tokens
            assert choice["finish_reason"] == "length"
            logprobs = choice["logprobs"]
            assert logprobs["token_logprobs"] == [None, *(-token / 100 for token in prompt[1:])] + [-1.2] * max_tokens
            assert logprobs["top_logprobs"][0] is None
            assert logprobs["text_offset"] == list(range(6 + max_tokens))
            assert len(logprobs["tokens"]) == 6 + max_tokens
            assert body["usage"]["completion_tokens"] == max_tokens

    run(scenario)


def test_a_prompt_that_fills_the_context_is_scored_where_nothing_is_generated(tmp_path: Path) -> None:
    longest = FACTS.max_model_len

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            ask: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0}
            whole = (await s.post(PATH, prompt=[97] * longest, **ask)).json()
            assert len(whole["choices"][0]["logprobs"]["tokens"]) == longest
            assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 0)
            cut = await s.post(PATH, prompt=[97] * (longest + 5), truncate_prompt_tokens=-1, **ask)
            assert cut.json()["usage"]["prompt_tokens"] == longest

            longer = (await s.post(PATH, prompt=[97] * (longest + 1), **ask)).json()["error"]
            assert (longer["param"], longer["code"]) == ("prompt", "context_length_exceeded")
            assert f"{longest + 1} tokens ({longest + 1} in the prompt, 0 in the completion)" in longer["message"]
            generates = (await s.post(PATH, prompt=[97] * longest, **ask | {"max_tokens": 1})).json()["error"]
            assert (generates["param"], generates["code"]) == ("prompt", "context_length_exceeded")

    run(scenario)


def test_an_echoed_prompt_comes_first_in_a_stream(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            chunks = await s.stream(PATH, prompt="say:ab", echo=True, logprobs=1)
            assert [c["choices"][0]["text"] for c in chunks[:-1]] == ["say:ab", "a", "b", ""]
            first, second = (c["choices"][0]["logprobs"] for c in chunks[:2])
            assert first["token_logprobs"][0] is None
            assert first["text_offset"] == [0, 0, 1, 2, 3, 4, 5]  # the begin token has no text
            assert second["text_offset"] == [6]

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_choice_at_the_core_too(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            if stream:
                chunks = await s.stream(
                    PATH, prompt="slow say:one two three", stop=[" t"], stream_options={"include_usage": True}
                )
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-2])
                finish, usage = chunks[-3]["choices"][0]["finish_reason"], chunks[-2]["usage"]
            else:
                body = (await s.post(PATH, prompt="slow say:one two three", stop=" t")).json()
                text, finish, usage = body["choices"][0]["text"], body["choices"][0]["finish_reason"], body["usage"]
            assert (text, finish, usage["completion_tokens"]) == ("one", "stop", 5)
            await until(lambda: len(s.core.finished) == 1)
            assert s.core.aborted == []
            assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
            metrics = (await s.http.get("/metrics")).text
            assert 'vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 1.0' in metrics

    run(scenario)


def test_parameters_reach_the_core_and_unknown_fields_are_accepted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body: dict[str, Any] = {
                "prompt": "say:a", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
                "seed": 3, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
                "logit_bias": {"65": -100},
                "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [9], "priority": 4, "user": "me",
                "input_length_override": 3, "n": None, "best_of": 1, "suffix": None,
            }  # fmt: skip
            assert (await s.post(PATH, **body)).status_code == 200
            request = s.core.requests[0]
            params = request.params
            assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (
                7,
                0.5,
                0.9,
                5,
                0.1,
            )
            assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
            assert (params.seed, params.min_tokens, params.ignore_eos, params.stop_token_ids) == (3, 1, True, (9,))
            assert (dict(params.logit_bias), request.priority) == ({65: -100.0}, 4)
            assert (await s.post(PATH, prompt="say:a")).status_code == 200
            assert s.core.requests[1].params.max_tokens == 16  # OpenAI's default
            assert s.core.requests[1].params.seed is not None

    run(scenario)


def test_the_cache_salt_reaches_the_core_on_every_route(tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        PATH: {"prompt": ["say:a", "say:b"]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "say:a"}], "max_tokens": 5},
        "/v1/responses": {"input": "say:a", "max_output_tokens": 5},
    }

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for path, body in bodies.items():
                for salt in ("tenant\n€", None):
                    s.core.requests.clear()
                    assert (await s.post(path, **body, cache_salt=salt)).status_code == 200
                    assert {one.params.cache_salt for one in s.core.requests} == {salt}, path

    run(scenario)


@pytest.mark.parametrize(
    ("headers", "path", "commented"),
    [
        ({}, PATH, True),
        ({}, "/v1/chat/completions", True),
        ({}, "/v1/responses", True),
        ({"x-stoker-comments": "0"}, PATH, False),
        ({"x-stoker-resume": "1"}, PATH, False),  # a router, whatever its version
    ],
)
def test_a_silent_stream_gets_comments_unless_a_router_sends_its_own(
    tmp_path: Path, headers: dict[str, str], path: str, commented: bool
) -> None:
    asked: Any = {
        PATH: {"prompt": "hang say:a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hang say:a"}]},
        "/v1/responses": {"input": "hang say:a"},
    }
    body = {**asked[path], "stream": True}

    async def scenario() -> None:
        async with serving(tmp_path, comment_interval_s=0.05) as s:
            async with AsyncExitStack() as stack:
                asking = asyncio.ensure_future(
                    stack.enter_async_context(s.http.stream("POST", path, json=body, headers=headers))
                )
                await until(lambda: bool(s.core.running))
                if not commented:
                    assert (await asyncio.wait({asking}, timeout=0.3))[0] == set()
                    asking.cancel()
                    return
                answer = await asking
                assert answer.headers["content-type"].startswith("text/event-stream")
                parts = answer.aiter_raw()
                assert [await anext(parts), await anext(parts)] == [COMMENT, COMMENT]
            await until(lambda: not s.app.running)

    run(scenario)


def test_a_refusal_behind_a_comment_is_an_event_and_no_token_is_counted_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, comment_interval_s=0.05) as s:
            async with s.http.stream("POST", PATH, json={"prompt": "hang say:a", "stream": True}) as answer:
                parts = answer.aiter_raw()
                assert await anext(parts) == COMMENT
                await s.core.set_state(CoreState("Failed", "a rank has ended"))
                rest = b"".join([part async for part in parts]).replace(COMMENT, b"").decode()
            error, done = events(rest)
            assert (error["error"]["type"], done) == ("server_error", "[DONE]")
            assert error["error"]["retry_after_s"] == 1, "the head has been sent"
            metrics = (await s.http.get("/metrics")).text
            assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 0.0' in metrics

    run(scenario)
