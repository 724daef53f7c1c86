"""Validation beside stops: a stop is seen between its micro-batches, and the next attempt makes up for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.pod.causes import Cause
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import (
    PhaseEvent,
    RequestEvent,
    SaveCommand,
    SaveEvent,
    StepEvent,
    StopCommand,
    ValidationEvent,
)
from stoker.trainer.protocol.parallel_dims import ParallelDims
from stoker.trainer.rank.build import RankContext
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.mesh import AxisGroups
from stoker.trainer.rank.pipeline.passes import PipelinePasses
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import RecordingChannel, SyntheticBatches, alone, context_of, tiny_config, train

EVERY = 2
STEPS = 3
RANKS = 4
Numbers = list[tuple[int, float]]
NEVER = -1


class LongValidation(SyntheticBatches):
    """A validation of `length` micro-batches over all ranks. Commands arrive at this rank while the third is read.

    Of a shorter one they arrive at its end.
    """

    def __init__(self, config: TrainerConfig, context: RankContext, length: int, *commands: Any) -> None:
        super().__init__(config)
        self.context, self.length, self.commands = context, length, list(commands)
        self.read = 0
        """Micro-batches of validation so far."""

    def validation(self, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        for index in range(dp_rank, self.length, dp_size):
            self.read += 1
            if self.read == 3:
                self.receive_commands()
            yield self.micro_batch(1_000_000 + index)
        self.receive_commands()

    def receive_commands(self) -> None:
        while self.commands:
            self.context.channel.put(self.commands.pop(0))


def validated(folder: Path | str, **changes: Any) -> TrainerConfig:
    source = {"name": "held-out", "path": "none"}
    fields = {"training__total_steps": STEPS, "data__validation": {"source": source, "every_steps": EVERY}}
    return tiny_config(folder, **{**fields, **changes})


def trained(context: RankContext) -> tuple[Numbers, Numbers]:
    """Return the losses of steps and of validations."""
    assert isinstance(context.channel, RecordingChannel)
    steps = [(event.step, event.loss) for event in context.channel.all(StepEvent)]
    return steps, [(event.step, event.loss) for event in context.channel.all(ValidationEvent)]


@dataclass(frozen=True)
class Attempt:
    """What one attempt on one rank did."""

    cause: Cause
    steps: Numbers
    validations: Numbers
    read: int
    context: RankContext


def attempt(folder: Path | str, *commands: Any, length: int = 20, **changes: Any) -> Attempt:
    context, config = alone(), validated(folder, **changes)
    batches = LongValidation(config, context, length, *commands)
    cause = train(config, context, batches=batches)
    return Attempt(cause, *trained(context), batches.read, context)


def test_a_stop_ends_a_validation_saves_and_the_next_attempt_makes_up_for_it(tmp_path: Path) -> None:
    whole = attempt(tmp_path / "whole")
    first = attempt(tmp_path / "parts", StopCommand(mode="interrupt"))
    assert (first.cause, first.steps, first.validations) == (Cause.INTERRUPTED, whole.steps[:2], [])
    assert first.read <= 4, "not the 20 of a whole validation"
    assert isinstance(first.context.channel, RecordingChannel)
    saves = [(event.step, event.reason, event.verified) for event in first.context.channel.all(SaveEvent)]
    assert saves[-1] == (2, "interrupt", True)
    second = attempt(tmp_path / "parts")
    assert second.cause == Cause.COMPLETED
    assert (second.steps, second.validations) == (whole.steps[2:], whole.validations)
    assert [step for step, _ in whole.validations] == [2, 3]
    assert isinstance(second.context.channel, RecordingChannel)
    phases = [event.phase for event in second.context.channel.all(PhaseEvent)]
    assert phases[phases.index("FirstStep") :][:4] == ["FirstStep", "Validating", "FirstStep", "Training"]


def test_the_log_has_the_validation_that_the_next_attempt_made_up_for(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for commands in ([StopCommand(mode="suspend")], []):
        attempt(tmp_path, *commands, logging__jsonl=str(log))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    places = [(line["kind"], line["step"]) for line in lines]
    assert places[:4] == [("step", 1), ("step", 2), ("validation", 2), ("step", 3)]


def test_a_stop_with_the_last_micro_batches_keeps_the_validation(tmp_path: Path) -> None:
    stopped = attempt(tmp_path, StopCommand(mode="cancel"), length=2)
    assert (stopped.cause, [step for step, _ in stopped.validations]) == (Cause.CANCELLED, [2])
    assert not CheckpointReader(CheckpointRoot(tmp_path / "root").committed()[0].path).manifest.meta["validation_due"]


def test_a_stop_of_the_step_before_leaves_the_validation_to_the_next_attempt(tmp_path: Path) -> None:
    whole, context = attempt(tmp_path / "whole", data__validation=every_step()), alone()
    context.channel.put(StopCommand(mode="interrupt"))
    config = validated(tmp_path / "parts", data__validation=every_step())
    train(config, context, batches=LongValidation(config, context, 20))
    assert trained(context) == (whole.steps[:1], [])
    rest = attempt(tmp_path / "parts", data__validation=every_step())
    assert (rest.steps, rest.validations) == (whole.steps[1:], whole.validations)


def every_step() -> dict[str, Any]:
    return {"source": {"name": "held-out", "path": "none"}, "every_steps": 1}


def test_a_stop_of_the_made_up_validation_saves_nothing_and_leaves_it_again(tmp_path: Path) -> None:
    whole = attempt(tmp_path / "whole")
    for _ in range(2):
        assert attempt(tmp_path / "parts", StopCommand(mode="suspend")).cause == Cause.INTERRUPTED
    assert [found.step for found in CheckpointRoot(tmp_path / "parts" / "root").committed()] == [2]
    rest = attempt(tmp_path / "parts")
    assert (rest.steps, rest.validations) == (whole.steps[2:], whole.validations)


@pytest.mark.parametrize(("at_step", "makes_up"), [(2, False), (3, True)], ids=["on the way", "last"])
def test_a_later_attempt_trains_on_unless_it_is_the_last_step(tmp_path: Path, at_step: int, makes_up: bool) -> None:
    """Where attempts live shorter than the validation takes, all of them would be stopped during it."""
    validation = {**every_step(), "every_steps": at_step}
    for number in range(2):
        job: dict[str, Any] = {"job__attempt": number, "job__writer": f"0a1b2c3{number}"}
        attempt(tmp_path, StopCommand(mode="interrupt"), data__validation=validation, **job)
    third = attempt(tmp_path, data__validation=validation, job__attempt=2, job__writer="0a1b2c32")
    assert (third.cause, [step for step, _ in third.validations]) == (Cause.COMPLETED, [3])
    assert [step for step, _ in third.steps] == ([] if makes_up else [3])


def test_a_stop_of_the_last_validation_leaves_it_to_an_attempt_without_steps(tmp_path: Path) -> None:
    whole, at_the_end = attempt(tmp_path / "whole"), {**every_step(), "every_steps": 100}
    first = attempt(tmp_path / "parts", StopCommand(mode="interrupt"), data__validation=at_the_end)
    assert (first.cause, first.steps, first.validations) == (Cause.INTERRUPTED, whole.steps, [])
    last = attempt(tmp_path / "parts", data__validation=at_the_end)
    assert (last.cause, last.steps, last.validations) == (Cause.COMPLETED, [], whole.validations[-1:])


def test_a_validation_that_the_next_attempt_no_longer_has_is_not_made_up_for(tmp_path: Path) -> None:
    attempt(tmp_path, StopCommand(mode="interrupt"))
    rest = attempt(tmp_path, data__validation=None)
    assert (rest.cause, [step for step, _ in rest.steps], rest.read) == (Cause.COMPLETED, [3], 0)


def test_a_save_that_is_requested_meanwhile_is_made_after_the_validation(tmp_path: Path) -> None:
    done = attempt(tmp_path, SaveCommand(id="now"))
    assert isinstance(done.context.channel, RecordingChannel)
    assert [(event.id, event.state, event.folder[:13]) for event in done.context.channel.all(RequestEvent)] == [
        ("now", "Done", "step-00000002")
    ]
    assert [step for step, _ in done.validations] == [2, 3]


LAYOUTS = {
    "data": (ParallelDims(shard=4), {}, 24),
    "data, stage 3": (ParallelDims(shard=2), {"memory__zero_stage": 3}, 12),
    "tensor": (ParallelDims(shard=2, tensor=2), {}, 12),
    "context": (ParallelDims(shard=2, context=2), {}, 12),
    "pipeline": (ParallelDims(pipeline=2), {"training__sequence_length": 8}, 2 * PipelinePasses.max_evaluated + 1),
}
"""Grid, fields and the micro-batches of a validation."""


class Contexts:
    """What a rank keeps: one context for each grid."""

    def __init__(self, _rank: int, _ranks: int) -> None:
        self._groups = AxisGroups(torch.device("cpu"))
        self._made: dict[ParallelDims, RankContext | None] = {}

    def of(self, dims: ParallelDims) -> RankContext | None:
        if dims not in self._made:
            self._made[dims] = context_of(dims, groups=self._groups)
        made = self._made[dims]
        return None if made is None else replace(made, channel=RecordingChannel())


def attempt_of_rank(contexts: Contexts, name: str, folder: str, stops_at: int) -> tuple[Cause, Numbers, Numbers] | None:
    """One attempt on this rank, of which rank `stops_at` gets a stop during a validation."""
    dims, changes, length = LAYOUTS[name]
    context = contexts.of(dims)
    if context is None:
        return None
    layout = {"parallelism__pipeline": dims.pipeline, "parallelism__tensor": dims.tensor}
    layout |= {"parallelism__context": dims.context, "gang__ranks_per_node": dims.world_size}
    config = validated(folder, **layout, **changes)
    commands = [StopCommand(mode="suspend")] if context.mesh.rank == stops_at else []
    cause = train(config, context, batches=LongValidation(config, context, length, *commands))
    return cause, *trained(context)


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(RANKS, Contexts) as made:
        yield made


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_see_the_stop_of_one_between_the_same_micro_batches(
    tmp_path: Path, world: RankWorld, name: str
) -> None:
    size = LAYOUTS[name][0].world_size

    def run(folder: str, stops_at: int = NEVER) -> list[tuple[Cause, Numbers, Numbers]]:
        return world.call(attempt_of_rank, name, str(tmp_path / folder), stops_at)[:size]

    whole, stopped, rest = run("whole"), run("parts", size - 1), run("parts")
    (_, steps, _), validations = whole[0], [found for *_, found in whole]
    assert stopped == [(Cause.INTERRUPTED, steps[:2], [])] * size
    assert [found[1] for found in rest] == [steps[2:]] * size
    assert [found for *_, found in rest] == validations, "the leading rank reports each of them once"
