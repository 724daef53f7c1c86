"""A request that goes on at another engine behind the tokens that the first one sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.grammars import GrammarCompiler
from stoker.engine.core.messages import Delta
from stoker.engine.errors import RequestRefused
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.sampling import SamplingParams
from testing.engine.audits import assert_sound
from testing.engine.tiny_tokenizer import EOS, VOCABULARY, tokenizer_json

PROMPT = list(range(40, 57))
Resumed = tuple[tuple[int, ...] | None, ...]


class Choice:
    """What one choice has given out."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.end: tuple[str | None, int | None] = (None, None)

    def add(self, delta: Delta) -> None:
        assert delta.error is None, delta.error
        assert self.end[0] is None
        self.tokens += delta.tokens
        self.logprobs += [score.logprob for score in delta.logprobs or ()]
        self.end = delta.finish_reason, delta.stop_token


def drive(engine: LLMEngine, params: SamplingParams, resumed: Resumed = ()) -> list[Choice]:
    """Run one request to its end, beside another one."""
    other = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    engine.add_request("other", list(range(30, 52)), other)
    engine.add_request("r", PROMPT, params, resumed=resumed)
    choices = [Choice() for _ in range(params.n)]
    while engine.has_unfinished:
        for _, delta in engine.step():
            if delta.request_id == "r":
                choices[delta.choice].add(delta)
        assert_sound(engine.scheduler.audit())
    return choices


def assert_goes_on(whole: Sequence[Choice], rest: Sequence[Choice], resumed: Resumed) -> None:
    for choice, before, behind in zip(whole, resumed, rest, strict=True):
        if before is None:
            assert (behind.tokens, behind.end) == ([], (None, None))
            continue
        assert [*before, *behind.tokens] == choice.tokens
        assert behind.end == choice.end
        assert behind.logprobs == pytest.approx(choice.logprobs[len(before) :], abs=1e-4)


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.3, "top_p": 0.9, "top_k": 50},
    "penalised": {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "min_tokens": {"temperature": 1.0, "min_tokens": 12, "bad_sequences": ((17, 4), (9,)), "stop_token_ids": (11, 88)},
}


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json(), VOCABULARY, (EOS,))


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    kind=st.sampled_from(sorted(PARAMS)),
    n=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    cuts=st.tuples(*[st.floats(0, 1)] * 3),
    overlap=st.booleans(),
)
def test_tokens_and_logprobs_are_those_of_an_undisturbed_run(
    make_engine: Callable[..., LLMEngine], kind: str, n: int, seed: int, cuts: tuple[float, ...], overlap: bool
) -> None:
    params = SamplingParams(n=n, seed=seed, max_tokens=16, logprobs=2, **PARAMS[kind])
    whole = drive(make_engine(), params)
    resumed = tuple(cut_at(choice, cut) for choice, cut in zip(whole, cuts, strict=False))
    if all(tokens is None for tokens in resumed):
        resumed = (tuple(whole[0].tokens[:1]) if len(whole[0].tokens) > 1 else (), *resumed[1:])
    assert_goes_on(whole, drive(make_engine(overlap=overlap), params, resumed), resumed)


def cut_at(choice: Choice, cut: float) -> tuple[int, ...] | None:
    """The first tokens; None beyond the last one, for a choice that has ended."""
    place = int(cut * (len(choice.tokens) + 1))
    ended = place > len(choice.tokens) or (place == len(choice.tokens) and choice.end[0] == "length")
    return None if ended else tuple(choice.tokens[:place])


@pytest.mark.parametrize("place", [0, 1, 7, 20])
def test_a_grammar_is_followed_behind_the_tokens(
    make_engine: Callable[..., LLMEngine], grammars: GrammarCompiler, place: int
) -> None:
    grammar = OutputGrammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 9})
    params = SamplingParams(temperature=1.2, seed=5, max_tokens=80, grammar=grammar)

    def made() -> LLMEngine:
        engine = make_engine()
        engine.grammars = grammars
        return engine

    whole = drive(made(), params)
    resumed = (tuple(whole[0].tokens[:place]),)
    assert len(whole[0].tokens) > 20
    assert_goes_on(whole, drive(made(), params, resumed), resumed)


def test_it_goes_on_in_a_full_engine(make_engine: Callable[..., LLMEngine]) -> None:
    """Two choices that do not fit at once are preempted and admitted again, as those of a new request are."""
    params = SamplingParams(n=2, seed=3, max_tokens=40, temperature=1.0, ignore_eos=True)
    whole = drive(make_engine(), params)
    resumed = tuple(tuple(choice.tokens[:15]) for choice in whole)
    small = make_engine(num_blocks=16, seats=2)
    assert_goes_on(whole, drive(small, params, resumed), resumed)


@pytest.mark.parametrize(
    ("resumed", "more", "message"),
    [
        pytest.param(((1,),), {"n": 2}, "tokens of 2 choices", id="number of choices"),
        pytest.param((None,), {}, "one unfinished", id="all have ended"),
        pytest.param(((1,) * 5,), {}, "less than max_tokens, 5", id="nothing is left"),
        pytest.param(((10**6,),), {}, "got 1000000", id="token"),
        pytest.param(((1,),), {"seed": None}, "needs a seed", id="seed"),
        pytest.param(((1,),), {"prompt_logprobs": 0}, "no prompt_logprobs", id="prompt's log-probabilities"),
    ],
)
def test_what_cannot_go_on_is_refused(
    make_engine: Callable[..., LLMEngine], resumed: Resumed, more: dict[str, Any], message: str
) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefused, match=message):
        engine.add_request("r", PROMPT, SamplingParams(**{"seed": 1, "max_tokens": 5, **more}), resumed=resumed)
    assert not engine.has_unfinished
