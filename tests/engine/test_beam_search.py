"""Beam search: the pure search against all outputs, and its requests, answers and refusals on the wire."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.http.beam_search import BeamSearch, BeamSettings
from stoker.engine.http.openai.params import beam_settings
from stoker.engine.http.openai.protocol import CompletionBody
from stoker.engine.sampling import SamplingParams
from stoker.pod.marked_streams import MARK, RESUME_HEADER
from testing.engine.serving import run, serving, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
END = 3
Scores = Mapping[tuple[int, ...], TokenLogprobs]


def random_model(seed: int, max_tokens: int) -> Scores:
    """The scores behind every beginning of tokens 0 to 2, of four tokens each."""
    draw = random.Random(seed)
    beginnings = itertools.chain.from_iterable(itertools.product(range(END), repeat=n) for n in range(max_tokens))
    return {beginning: scored([draw.random() ** 3 + 1e-3 for _ in range(4)]) for beginning in beginnings}


def scored(weights: list[float]) -> TokenLogprobs:
    top = sorted(
        ((token, math.log(weight / sum(weights))) for token, weight in enumerate(weights)), key=lambda x: -x[1]
    )
    return TokenLogprobs(top[0][1], tuple(top))


def all_outputs(model: Scores, max_tokens: int, end_tokens: frozenset[int]) -> dict[tuple[int, ...], float]:
    """Log-probability of each whole output, which ends with an end token or has all its tokens."""
    outputs: dict[tuple[int, ...], float] = {}
    open_ones: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(max_tokens):
        made = {
            (*tokens, token): total + logprob
            for tokens, total in open_ones.items()
            for token, logprob in (model[tokens].top if tokens in model else ())
        }
        ends = {tokens for tokens in made if tokens[-1] in end_tokens or len(tokens) == max_tokens}
        outputs |= {tokens: made[tokens] for tokens in ends}
        open_ones = {tokens: total for tokens, total in made.items() if tokens not in ends and END not in tokens}
    return outputs


def searched(model: Scores, settings: BeamSettings, max_tokens: int) -> tuple[BeamSearch, int]:
    search, steps = BeamSearch(settings, max_tokens), 0
    while not search.done:
        search.step([model[beam.tokens] for beam in search.running])
        steps += 1
    return search, steps


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(12))
def test_a_wide_search_finds_the_best_of_all_outputs(seed: int, length_penalty: float) -> None:
    model, ends = random_model(seed, 3), frozenset({END})
    value = {tokens: total / len(tokens) ** length_penalty for tokens, total in all_outputs(model, 3, ends).items()}
    search, _ = searched(model, BeamSettings(10, length_penalty, ends), 3)
    best = sorted(value, key=lambda tokens: -value[tokens])[:3]
    found = [(*beam.tokens, *(() if beam.end_token is None else (beam.end_token,))) for beam in search.ended]
    assert found[:3] == best
    assert [beam.total / beam.num_tokens**length_penalty for beam in search.ended[:3]] == pytest.approx(
        [value[tokens] for tokens in best]
    )


def test_one_beam_is_greedy_and_each_token_has_its_score() -> None:
    model = random_model(1, 4)
    search, _ = searched(model, BeamSettings(1, 1.0, frozenset()), 1)
    (first,) = search.ended
    assert first.tokens == (model[()].top[0][0],)
    assert first.scores == (TokenLogprobs(model[()].top[0][1], model[()].top, 1),)


def test_a_search_stops_when_no_beginning_can_become_better() -> None:
    sure = scored([1e-6, 1e-6, 1e-6, 1.0])
    model = {
        (): sure,
        **{beginning: sure for n in range(1, 9) for beginning in itertools.product(range(END), repeat=n)},
    }
    for length_penalty in (0.0, -1.0):
        search, steps = searched(model, BeamSettings(1, length_penalty, frozenset({END})), 9)
        assert (steps, [beam.end_token for beam in search.ended]) == (1, [END])


def test_answers_are_the_most_probable_outputs(tmp_path: Path) -> None:
    """The fake core's output repeats the prompt; of two tokens the smaller is the more probable."""

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = {"prompt": "say:a", "use_beam_search": True, "n": 2, "max_tokens": 2}
            answer = (await s.post(COMPLETIONS, **body, logprobs=1, return_token_ids=True)).json()
            choices = answer["choices"]
            assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices] == [
                (0, "aa", "length"), (1, "ab", "length"),
            ]  # fmt: skip
            assert choices[1]["logprobs"]["token_logprobs"] == [-0.97, -0.98]
            assert choices[1]["logprobs"]["top_logprobs"] == [{"a": -0.97}, {"a": -0.97, "b": -0.98}]
            assert choices[1]["token_ids"] == [*b"ab"]
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 4)
            assert {request.params.logprobs for request in s.core.requests} == {4}
            assert len(s.core.requests) == 3, "one for the first token, one for each of two beams"
            assert not s.core.aborted
            life = (await s.http.get(f"/v1/requests/{answer['id']}")).json()
            assert (life["state"], life["output_tokens"]) == ("COMPLETED", 4)

            two = {"prompt": ["say:a", "say:x"], "use_beam_search": True, "best_of": 3, "max_tokens": 1}
            assert [choice["text"] for choice in (await s.post(COMPLETIONS, **two)).json()["choices"]] == ["a", "x"]
            chat = {
                "messages": [{"role": "user", "content": "say:a"}],
                "use_beam_search": True,
                "max_tokens": 1,
                "n": 3,
            }
            messages = [choice["message"]["content"] for choice in (await s.post(CHAT, **chat)).json()["choices"]]
            assert messages == ["a", "b", "c"]
            wide = {"prompt": "say:!", "use_beam_search": True, "n": 64, "max_tokens": 1}
            texts = [choice["text"] for choice in (await s.post(COMPLETIONS, **wide)).json()["choices"]]
            assert texts == [chr(ord("!") + place) for place in range(64)]

    run(scenario)


def test_a_stream_sends_each_output_whole_and_cannot_be_carried_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = {"prompt": "say:a", "use_beam_search": True, "n": 2, "max_tokens": 2, "stream": True}
            events = await s.stream(COMPLETIONS, **body)
            sent = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
            assert [(one["index"], one["text"], one["finish_reason"]) for one in sent] == [
                (0, "aa", "length"), (1, "ab", "length"),
            ]  # fmt: skip
            asked = await s.http.post(COMPLETIONS, json=body, headers={RESUME_HEADER.decode(): "1"})
            assert RESUME_HEADER.decode() not in asked.headers
            assert MARK not in asked.text

    run(scenario)


def test_end_tokens_end_an_output_unless_they_are_ignored() -> None:
    for ignore, expected in ((False, {7}), (True, set())):
        body = CompletionBody(prompt="x", use_beam_search=True, n=2, best_of=4, length_penalty=0.5, ignore_eos=ignore)
        assert beam_settings(body, SamplingParams(n=2), (7,)) == BeamSettings(4, 0.5, frozenset(expected))
    assert beam_settings(CompletionBody(prompt="x"), SamplingParams(), (7,)) is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 65}, "n"),
    ({"best_of": 65}, "best_of"),
    ({"length_penalty": 11}, "length_penalty"),
    ({"stop": "x"}, "stop"),
    ({"stop_token_ids": [3]}, "stop_token_ids"),
    ({"min_tokens": 1}, "min_tokens"),
    ({"logit_bias": {"3": 1}}, "logit_bias"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"allowed_token_ids": [3]}, "allowed_token_ids"),
    ({"guided_choice": ["x"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
]


def test_what_a_search_does_not_follow_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for more, param in REFUSED:
                answer = await s.post(COMPLETIONS, prompt="say:a", use_beam_search=True, **more)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), more
            assert not s.core.requests

    run(scenario)


def test_a_step_that_fails_ends_the_search_and_a_client_that_leaves_aborts_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            refused = await s.post(COMPLETIONS, prompt="refuse say:a", use_beam_search=True)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            body = {"prompt": "hang say:a", "use_beam_search": True, "n": 2}
            asked = asyncio.ensure_future(s.post(COMPLETIONS, **body))
            await until(lambda: bool(s.core.running))
            asked.cancel()
            await until(lambda: bool(s.core.aborted))
            assert not s.core.running

    run(scenario)
