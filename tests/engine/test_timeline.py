"""The time line of steps and requests, and how long a step stays open for requests that arrive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.core.step_budget import StepBudget
from stoker.engine.core.timeline import FileTimeline
from stoker.engine.execution.executor import RankState, StepRunner
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.sampling import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.test_engine import random_prompts, run

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MOMENTS = ["begun", "planned", "built", "submitted", "waiting", "waited", "taken", "sent"]


def test_a_timeline_has_every_step_and_request(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(overlap=True)
    engine.timeline = FileTimeline(tmp_path / "timeline.jsonl")
    for name, prompt in zip("ab", random_prompts(2), strict=True):
        engine.add_request(name, prompt, PARAMS)
    sent = 0
    while engine.has_unfinished:
        sent += sum(len(delta.tokens) for _, delta in engine.step())
        engine.timeline.sent()
    engine.timeline.captured(0.0)
    engine.timeline.close()
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert [step["step"] for step in steps] == list(range(engine.num_steps))
    for step in steps:
        times = [step[moment] for moment in MOMENTS]
        assert times == sorted(times)
        assert step["tokens"] >= step["decodes"] + step["prompts"]
    assert sum(step["tokens"] for step in steps) == engine.num_step_tokens
    assert sum(step["opened"] for step in steps) == 2
    requests = {line["request"]: line for line in lines if "request" in line}
    assert sum(line["output_tokens"] for line in requests.values()) == sent == 8
    for line in requests.values():
        assert line["queued_s"] <= line["scheduled_s"] <= line["first_token_s"] <= line["finished_s"]
    assert [line["capture"] for line in lines if "capture" in line] == [0.0]


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class SlowDevice:
    """A device that needs 10 ms for a step, one after the other, while the host goes on.

    `read_s`: time that the host needs to read the output of a step that has ended.
    """

    def __init__(self, runner: Any, clock: Clock, read_s: float = 0.0) -> None:
        self.runner, self.clock, self.read_s = runner, clock, read_s
        self.free_s = 0.0

    def submit(self, step: StepInput) -> Any:
        output = self.runner.run(step)
        self.free_s = done_s = max(self.free_s, self.clock.now_s) + 0.010
        return Computed(self, done_s, output)

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        return False

    def check(self) -> None:
        pass

    def rank_states(self) -> tuple[RankState, ...]:
        return ()

    def close(self) -> None:
        pass


class Computed:
    duration_s = 0.010

    def __init__(self, device: SlowDevice, done_s: float, output: Any) -> None:
        self.device, self.done_s, self.output = device, done_s, output

    def result(self) -> Any:
        clock = self.device.clock
        clock.now_s = max(clock.now_s, self.done_s) + self.device.read_s
        return self.output


class ClockedRunner:
    """A runner whose steps take 10 ms of a clock."""

    def __init__(self, runner: StepRunner, clock: Clock) -> None:
        self.runner, self.clock = runner, clock

    def run(self, step: StepInput) -> StepOutput:
        self.clock.now_s += 0.010
        return self.runner.run(step)


def test_a_step_that_was_computed_while_it_was_submitted_counts_as_busy_time(make_engine: MakeEngine) -> None:
    """The autoscaler's curve of a step comes from it, and the cost of recomputing."""
    clock = Clock()
    engine = make_engine(wrap=lambda runner: ClockedRunner(runner, clock))
    engine.clock = clock
    engine.add_request("a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    clock.now_s += 1  # no step
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats()
    assert stats.steps == 8
    assert stats.busy_s == pytest.approx(0.080)


def test_a_step_stays_open_until_the_device_needs_it(make_engine: MakeEngine) -> None:
    clock = Clock()
    engine = make_engine(overlap=True, seats=2, execute=lambda runner: SlowDevice(runner, clock))
    engine.clock = clock
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add_request("a", [3, 4, 5], params)
    for _ in range(8):
        engine.step()
    free_s = engine.executor.free_s  # type: ignore[attr-defined]
    assert clock.now_s == free_s - 0.010  # one step is under way and has just begun
    assert free_s - 0.003 < engine.open_until_s < free_s
    engine.add_request("b", [3, 4, 5], params)
    assert engine.open_until_s < clock.now_s  # what has arrived does not wait for more
    clock.now_s = free_s - 0.002
    engine.step()
    assert clock.now_s == free_s
    assert engine.open_until_s <= clock.now_s  # no seat is left, and a step with a prompt has no precedent
    while engine.has_unfinished:
        engine.step()
    assert engine.open_until_s == 0.0


def test_a_host_that_was_late_once_does_not_take_its_delay_for_the_device_s(make_engine: MakeEngine) -> None:
    """Over several ranks reading a step takes the host half a millisecond, so it cannot tell that it had ended."""
    clock = Clock()
    engine = make_engine(overlap=True, seats=2, execute=lambda runner: SlowDevice(runner, clock, read_s=0.0005))
    engine.clock = clock
    engine.add_request("a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(8):
        engine.step()
        clock.now_s += 0.5
    for _ in range(3):
        began_s = clock.now_s
        engine.step()
        assert engine.open_until_s - began_s < 2.1 * Computed.duration_s
        clock.now_s = max(clock.now_s, engine.open_until_s)


def test_steps_with_decodes_take_few_prompt_tokens_and_give_the_same_answers(make_engine: MakeEngine) -> None:
    prompts = random_prompts(20)
    wanted = run(make_engine(), prompts, PARAMS)
    engine = make_engine(overlap=True)
    engine.scheduler.budget = StepBudget(engine.scheduler.max_batch_tokens, 8, (16, 32))
    seen: list[tuple[int, int]] = []
    submit = engine.executor.submit

    def watched(step: StepInput) -> Any:
        decodes = sum(length == 1 for length in step.lengths)
        seen.append((decodes, step.num_tokens))
        return submit(step)

    engine.executor.submit = watched  # type: ignore[method-assign]
    assert run(engine, prompts, PARAMS) == wanted
    assert any(decodes and decodes < tokens for decodes, tokens in seen)
    assert all(tokens <= 256 for _, tokens in seen)
