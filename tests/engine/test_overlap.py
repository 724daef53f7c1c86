"""Overlapped steps: with the next step always under way, every request has the output of single steps."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.messages import Delta
from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.executor import RankState
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.sampling import SamplingParams
from testing.engine.audits import assert_sound
from tests.engine.conftest import MakeEngine
from tests.engine.test_engine import Answers, Faulty, drive, random_prompts, tokens_of


class Late:
    """A runner that computes a step only when its result is awaited, after all earlier ones.

    It stands for a device at its slowest.
    """

    def __init__(self, runner: Any, stages: int = 1) -> None:
        self.runner, self.stages = runner, stages
        self.steps: list[Pending] = []

    def submit(self, step: StepInput) -> Pending:
        self.steps.append(Pending(self, step))
        under_way = sum(not one.done for one in self.steps)
        assert under_way <= self.stages + 1, "at most one step in each stage while another is prepared"
        return self.steps[-1]

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        return False

    def check(self) -> None:
        pass

    def rank_states(self) -> tuple[RankState, ...]:
        return ()

    def close(self) -> None:
        pass


class Pending:
    duration_s = None

    def __init__(self, executor: Late, step: StepInput) -> None:
        self.executor, self.step, self.done = executor, step, False
        self.output: StepOutput | None = None
        self.error: Exception | None = None

    def compute(self) -> None:
        self.done = True
        try:
            self.output = self.executor.runner.run(self.step)
        except Exception as error:  # noqa: BLE001 - raised to who waits
            self.error = error

    def result(self) -> StepOutput:
        for one in self.executor.steps:
            if not one.done:
                one.compute()
            if one is self:
                break
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


PARAMS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=11, ignore_eos=True),
    SamplingParams(n=3, seed=4, temperature=1.2, max_tokens=6, ignore_eos=True),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=5, max_tokens=12),
    SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0, min_tokens=4, bad_token_ids=(7, 8), logit_bias={9: 3.0}, max_tokens=8),
    SamplingParams(seed=6, max_tokens=1),
    SamplingParams(seed=7, temperature=2.0, stop_token_ids=tuple(range(3, 60)), max_tokens=30),
]


def answer_all(engine: LLMEngine, count: int = 16) -> tuple[Answers, dict[tuple[str, int], list[Delta]]]:
    for index, prompt in enumerate(random_prompts(count, seed=9, shared=True)):
        engine.add_request(str(index), prompt, PARAMS[index % len(PARAMS)], priority=index % 3)
    deltas = drive(engine)
    by_choice: dict[tuple[str, int], list[Delta]] = {}
    for delta in deltas:
        by_choice.setdefault((delta.request_id, delta.choice), []).append(delta)
    return tokens_of(deltas), by_choice


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {}


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    setting=st.fixed_dictionaries(
        {
            "num_blocks": st.sampled_from([1200, 60, 45]),
            "budget": st.sampled_from([12, 40, 256]),
            "seats": st.sampled_from([6, 64]),
            "chunk": st.sampled_from([None, 3, 8]),
            "prefix_cache": st.booleans(),
            "worth_tokens": st.sampled_from([4, math.inf]),
        }
    ),
    execute=st.sampled_from([Late, None]),
)
def test_every_answer_is_the_same_with_overlap_on_any_schedule(
    setting: dict[str, Any], execute: Any, make_engine: MakeEngine, expected: dict[str, Any]
) -> None:
    if not expected:
        expected["all"] = answer_all(make_engine(deterministic=True))
    late = {"execute": execute} if execute else {}
    engine = make_engine(deterministic=True, overlap=True, **setting, **late)
    answers, deltas = answer_all(engine)
    wanted, wanted_deltas = expected["all"]
    assert answers == wanted
    for key, ours in deltas.items():
        theirs = wanted_deltas[key]
        assert [delta.finish_reason for delta in ours] == [delta.finish_reason for delta in theirs]
        assert [delta.logprobs for delta in ours] == [delta.logprobs for delta in theirs]
        assert [delta.prompt_logprobs for delta in ours] == [delta.prompt_logprobs for delta in theirs]
    stats = engine.stats()
    assert stats.owned_blocks == 0
    assert stats.finished["error"] == stats.finished["abort"] == 0


def test_a_step_is_submitted_before_the_one_before_it_is_waited_for(make_engine: MakeEngine) -> None:
    engine = make_engine(overlap=True, execute=Late)
    engine.add_request("a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    steps = engine.executor.steps  # type: ignore[attr-defined]
    seen = []
    while engine.has_unfinished:
        deltas = engine.step()
        seen.append((len(steps), sum(step.done for step in steps), len(deltas)))
    assert seen == [(1, 0, 0), (2, 1, 1), (3, 2, 1), (4, 3, 1), (4, 4, 1)], "no step after the known last one"


def test_a_stop_token_costs_one_step_without_output(make_engine: MakeEngine) -> None:
    free = make_engine()
    prompt = random_prompts(1, seed=8)[0]
    free.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    tokens = tokens_of(drive(free))["a", 0]
    place = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    engine = make_engine(overlap=True, execute=Late)
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(tokens[place],)))
    deltas = drive(engine)
    assert tokens_of(deltas)["a", 0] == tokens[: place + 1]
    assert deltas[-1].finish_reason == "stop"
    assert len(engine.executor.steps) == place + 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("execute", [Late, None])
def test_an_abort_at_any_moment_frees_everything_and_leaves_the_others_alone(
    execute: Any, make_engine: MakeEngine
) -> None:
    late = {"execute": execute} if execute else {}
    prompt = random_prompts(1, seed=3)[0]
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=9, ignore_eos=True)
    alone = make_engine(deterministic=True)
    alone.add_request("other", prompt, params)
    wanted = tokens_of(drive(alone))["other", 0]
    engine = make_engine(
        deterministic=True, overlap=True, chunk=4, budget=12, seats=6, num_blocks=60, prefix_cache=False, **late
    )
    for moment in range(14):
        engine.add_request("gone", list(range(3, 20)), SamplingParams(n=2, max_tokens=5, ignore_eos=True))
        engine.add_request("other", prompt, params)
        deltas: list[Delta] = []
        for _ in range(moment):
            deltas += [delta for _, delta in engine.step()]
        engine.abort_request("gone")
        assert_sound(engine.scheduler.audit())
        deltas += drive(engine)
        assert tokens_of([delta for delta in deltas if delta.request_id == "other"])["other", 0] == wanted, moment
        assert engine.stats().free_blocks == 60
        assert engine.requests == {}


@pytest.mark.parametrize("execute", [Late, None])
def test_a_bad_request_fails_alone_although_the_next_step_is_under_way(execute: Any, make_engine: MakeEngine) -> None:
    late = {"execute": execute} if execute else {}
    prompts = random_prompts(7)
    params = [PARAMS[index % len(PARAMS)] for index in range(7)]
    alone = make_engine(deterministic=True)
    for index, prompt in enumerate(prompts):
        alone.add_request(str(index), prompt, params[index])
    wanted = tokens_of(drive(alone))
    engine = make_engine(deterministic=True, overlap=True, wrap=Faulty, chunk=9, num_blocks=90, **late)
    engine.add_request("bad", [13, 5, 6], SamplingParams(n=2, temperature=0))
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params[index])
        if index == 3:
            engine.step()
            engine.add_request("bad later", [13, *range(3, 30)], SamplingParams(temperature=0))
    deltas = drive(engine)
    answers = tokens_of(deltas)
    assert {key: tokens for key, tokens in answers.items() if not key[0].startswith("bad")} == wanted
    errors = {(d.request_id, d.choice): d.error for d in deltas if d.finish_reason == "error"}
    assert errors == dict.fromkeys([("bad", 0), ("bad", 1), ("bad later", 0)], "RuntimeError: thirteen")
    assert engine.requests == {}


class Stumbling:
    """A runner that fails at every fifth step of several sequences: their halves are tried again."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.count = runner, 0

    def run(self, step: StepInput) -> StepOutput:
        output = self.runner.run(step)
        self.count += len(step.seats) > 1
        if len(step.seats) > 1 and self.count % 5 == 0:
            raise RuntimeError("stumbled")
        return output


@pytest.mark.parametrize("execute", [Late, None])
def test_a_step_that_fails_once_costs_no_request_anything(execute: Any, make_engine: MakeEngine) -> None:
    late = {"execute": execute} if execute else {}
    wanted, _ = answer_all(make_engine(deterministic=True))
    engine = make_engine(deterministic=True, overlap=True, wrap=Stumbling, num_blocks=60, chunk=8, seats=12, **late)
    assert answer_all(engine)[0] == wanted
    assert engine.stats().finished["error"] == 0


@pytest.mark.parametrize("execute", [Late, None])
def test_choices_are_right_whichever_step_fails_before_it_has_computed_anything(
    execute: Any, make_engine: MakeEngine
) -> None:
    """The step after the failing one has begun already and has given choices copies of the prompt's last block."""

    def answers(failing_step: int | None, **setting: Any) -> Answers:
        engine = make_engine(deterministic=True, chunk=8, prefix_cache=False, **setting)
        model = engine.executor.runner.model  # type: ignore[attr-defined]
        embed, passes = model.embed, count()

        def embed_or_fail(tokens: Any) -> Any:
            if next(passes) == failing_step:
                raise RuntimeError("out of memory")
            return embed(tokens)

        model.embed = embed_or_fail
        for number, length in enumerate((13, 11, 5)):
            params = SamplingParams(n=3 - number, seed=4, temperature=1.2, max_tokens=4, ignore_eos=True)
            engine.add_request(str(number), range(30, 30 + length), params)
        return tokens_of(drive(engine))

    late = {"execute": execute} if execute else {}
    wanted = answers(None)
    for step in range(7):
        assert answers(step, overlap=True, **late) == wanted, step


def test_logits_that_are_not_finite_fail_only_their_request_although_a_step_is_under_way(
    make_engine: MakeEngine,
) -> None:
    import torch

    engine = make_engine(overlap=True, execute=Late)
    model = engine.executor.runner.model  # type: ignore[attr-defined]
    embed = model.embed
    model.embed = lambda tokens: torch.where(tokens[:, None] == 77, float("nan"), embed(tokens))
    engine.add_request("bad", [5, 77, 6], SamplingParams(temperature=0))
    engine.add_request("good", [5, 7, 6], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.add_request("next", [8, 9], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    ends = {delta.request_id: delta for delta in drive(engine) if delta.finish_reason}
    assert engine.stats().finished == {"stop": 0, "length": 2, "abort": 0, "error": 1}
    assert ends["good"].finish_reason == ends["next"].finish_reason == "length"


def test_a_lost_executor_is_heard_of_when_its_step_is_due(make_engine: MakeEngine) -> None:
    class Dead(Stumbling):
        def run(self, step: StepInput) -> StepOutput:
            raise ExecutorLost("rank 1 is gone")

    engine = make_engine(overlap=True, wrap=Dead)
    engine.add_request("a", [3], SamplingParams(temperature=0))
    engine.step()
    with pytest.raises(ExecutorLost, match="rank 1 is gone"):
        engine.step()
