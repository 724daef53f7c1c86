"""Parameters beside OpenAI's own: truncation, scored prompts, the best of several answers, times in the usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.engine.core.token_rate import TokenCounts, TokenRate
from testing.engine.fake_core import BOS, EOS
from testing.engine.serving import run, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "say:hi"}]


@pytest.mark.parametrize(
    ("keep", "side", "kept"),
    [
        (6, "left", b"say:hi"),
        (400, "left", b"0123456789say:hi"),
        (-1, "left", b"0123456789say:hi"),
        (3, "right", b"012"),
        (-1, "right", b"0123456789say:hi"),
    ],
)
def test_a_prompt_is_cut_to_its_last_tokens_or_its_first(tmp_path: Path, keep: int, side: str, kept: bytes) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = {"prompt": "0123456789say:hi", "truncate_prompt_tokens": keep, "add_special_tokens": False}
            answer = await s.post(COMPLETIONS, echo=True, **body, truncation_side=side)
            assert answer.json()["choices"][0]["text"].startswith(kept.decode())
            assert bytes(s.core.requests[-1].prompt_tokens) == kept

    run(scenario)


def test_a_conversation_gets_special_tokens_on_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for fields, begin in (({}, []), ({"add_special_tokens": True}, [BOS])):
                await s.post(CHAT, messages=MESSAGES, **fields)
                tokens = list(s.core.requests[-1].prompt_tokens)
                assert tokens == [*begin, *b"<user>say:hi<assistant>"]
                assert (await s.post("/tokenize", messages=MESSAGES, **fields)).json()["tokens"] == tokens

    run(scenario)


def test_a_prompt_that_is_too_long_fits_after_truncation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body: dict[str, Any] = {"prompt": "x" * 300 + "say:hi", "max_tokens": 20}
            assert (await s.post(COMPLETIONS, **body)).status_code == 400
            answer = await s.post(COMPLETIONS, **body, truncate_prompt_tokens=-1)
            assert answer.json()["usage"]["prompt_tokens"] == 180
            del body["max_tokens"]
            answer = await s.post(COMPLETIONS, **body, truncate_prompt_tokens=-1)
            assert answer.json()["usage"]["prompt_tokens"] == 184, "16 tokens are the output's limit by default"
            long = [{"role": "user", "content": "x" * 300 + "say:hi"}]
            answer = await s.post(CHAT, messages=long, truncate_prompt_tokens=30)
            assert answer.json()["usage"]["prompt_tokens"] == 30

    run(scenario)


def test_the_prompts_log_probabilities_have_vllms_form(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = (await s.post(COMPLETIONS, prompt="a say:b", prompt_logprobs=2)).json()["choices"][0]
            first, second, *_ = answer["prompt_logprobs"]
            assert len(answer["prompt_logprobs"]) == len(s.core.requests[0].prompt_tokens)
            assert first is None
            assert second == {
                "97": {"logprob": -0.97, "rank": 1, "decoded_token": "a"},
                "98": {"logprob": -0.98, "rank": 2, "decoded_token": "b"},
            }
            assert answer["logprobs"] is None
            echoed = (await s.post(COMPLETIONS, prompt="a say:b", prompt_logprobs=3, echo=True, logprobs=1)).json()
            choice = echoed["choices"][0]
            assert len(choice["prompt_logprobs"][1]) == 3
            assert len(choice["logprobs"]["top_logprobs"][1]) == 1
            chat = (await s.post(CHAT, messages=MESSAGES, prompt_logprobs=0)).json()
            assert chat["prompt_logprobs"][0] is None
            own = [*s.core.requests[-1].prompt_tokens[1:]]
            ranks = [{token: found["rank"] for token, found in entry.items()} for entry in chat["prompt_logprobs"][1:]]
            assert ranks == [{str(token): token + 1} for token in own], "also of tokens that are not among the best"
            refused = await s.post(CHAT, messages=MESSAGES, prompt_logprobs=0, stream=True)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")

    run(scenario)


def test_token_ids_of_prompt_and_output_are_returned_on_request(tmp_path: Path) -> None:
    output = [*b"a\xc3\xa9", EOS]

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            ask = {"return_token_ids": True}
            plain = (await s.post(COMPLETIONS, prompt="say:a")).json()["choices"][0]
            assert not {"token_ids", "prompt_token_ids"} & {*plain}
            for more in ({}, {"echo": True, "n": 2}):
                choices = (await s.post(COMPLETIONS, prompt="say:aé", **ask, **more)).json()["choices"]
                assert choices[0]["token_ids"] == output
                assert all(choice["prompt_token_ids"] == [BOS, *"say:aé".encode()] for choice in choices)
            chunks = [event["choices"][0] for event in (await s.stream(COMPLETIONS, prompt="say:aé", **ask))[:-1]]
            assert [token for chunk in chunks for token in chunk["token_ids"]] == output
            assert [chunk["prompt_token_ids"] is not None for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
            scored = (await s.post(COMPLETIONS, prompt="say:a", max_tokens=0, echo=True, **ask)).json()["choices"][0]
            assert scored["token_ids"] == []

            messages = [{"role": "user", "content": "say:aé"}]
            whole = (await s.post(CHAT, messages=messages, **ask)).json()
            prompt = list(s.core.requests[-1].prompt_tokens)
            assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, output)
            events = (await s.stream(CHAT, messages=messages, n=2, **ask))[:-1]
            assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [prompt]
            first = [event["choices"][0] for event in events if event["choices"][0]["index"] == 0]
            assert [token for choice in first for token in choice.get("token_ids", ())] == output

    run(scenario)


def test_log_probabilities_may_name_tokens_by_their_ids(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            ask = {"return_tokens_as_token_ids": True}
            scores = (await s.post(COMPLETIONS, prompt="say:a", logprobs=1, **ask)).json()["choices"][0]["logprobs"]
            assert (scores["tokens"], list(scores["top_logprobs"][0])) == (["token_id:97"], ["token_id:97"])
            chat = (await s.post(CHAT, messages=MESSAGES, logprobs=True, **ask)).json()["choices"][0]["logprobs"]
            assert chat["content"][0]["token"].startswith("token_id:")

    run(scenario)


def test_the_best_of_several_answers_is_returned(tmp_path: Path) -> None:
    """The fake core's choice `c` has its number before the text; a higher character is less probable there."""

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = (await s.post(COMPLETIONS, prompt=["say:zz", "say:z"], n=2, best_of=3)).json()
            assert s.core.requests[0].params.n == 3
            assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
                (0, "1zz"), (1, "2zz"), (2, "1z"), (3, "2z"),
            ]  # fmt: skip
            assert all(choice["logprobs"] is None for choice in answer["choices"])
            assert answer["usage"]["completion_tokens"] > 14  # those that are not returned count, too
            for wrong in ({"n": 2, "best_of": 1}, {"best_of": 2, "stream": True}, {"best_of": 129}):
                refused = await s.post(COMPLETIONS, prompt="x", **wrong)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")

    run(scenario)


def test_the_end_token_counts_for_the_best_answer(tmp_path: Path) -> None:
    """The end token is the least probable one here: -2.57. The longer an answer is, the less it weighs in the mean.

    Choice 0 of the first prompt ends with its first token, choice 1 says its number before. Both of the second prompt
    have the same number of tokens but for the limit, which cuts choice 1 before its end.
    """

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = (await s.post(COMPLETIONS, prompt="say:", n=1, best_of=2)).json()
            assert [choice["text"] for choice in answer["choices"]] == ["1"]
            answer = (await s.post(COMPLETIONS, prompt="say:!!!", n=2, best_of=3, max_tokens=4)).json()
            found = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
            assert found == [("1!!!", "length"), ("2!!!", "length")], "the mean of !!! is higher without its end"

    run(scenario)


def test_an_echoed_prompt_does_not_change_the_best_answer(tmp_path: Path) -> None:
    """Choice 1 ends with its first token, 1, which is less probable than each of the eight of choice 0."""

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = {"prompt": "say:!!!!!!!!", "best_of": 2, "stop": ["1"], "max_tokens": 8}
            for echo in (False, True):
                (choice,) = (await s.post(COMPLETIONS, **body, echo=echo)).json()["choices"]
                assert choice["text"].endswith("say:!!!!!!!!!!!!!!!!" if echo else "!!!!!!!!")

    run(scenario)


def test_times_are_in_the_usage_on_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for path, body in ((COMPLETIONS, {"prompt": ["say:hi", "slow say:hi"]}), (CHAT, {"messages": MESSAGES})):
                plain: dict[str, Any] = {**body, "n": 2}
                assert "timing" not in (await s.post(path, **plain)).json()["usage"]
                times = (await s.post(path, **plain, include_timing=True)).json()["usage"]["timing"]
                assert set(times) == {"queue_s", "prefill_s", "decode_s", "total_s"}
                assert times["total_s"] >= times["decode_s"] >= 0
                stream = await s.stream(path, **plain, include_timing=True, stream_options={"include_usage": True})
                assert stream[-2]["usage"]["timing"]["total_s"] > 0

    run(scenario)


def test_token_rates_follow_the_last_ten_seconds() -> None:
    rate = TokenRate()
    assert rate.record(TokenCounts(100.0, 0, 0)) == (0, 0)
    assert rate.record(TokenCounts(105.0, 500, 50)) == (100, 10)
    assert rate.record(TokenCounts(110.0, 500, 100)) == (50, 10)
    assert rate.record(TokenCounts(120.0, 500, 100)) == (0, 0)
