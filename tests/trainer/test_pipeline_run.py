"""Whole runs through a pipeline: losses, gradient norms and state of one rank, validation, saves, resume and stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.checkpoint.dtype import to_float32
from stoker.checkpoint.manifest import Box
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.verify import verify
from stoker.pod.causes import Cause
from stoker.trainer.protocol.messages import Event, StepEvent, StopCommand, ValidationEvent
from stoker.trainer.protocol.parallel_dims import ParallelDims
from stoker.trainer.rank.build import RankContext
from stoker.trainer.rank.mesh import AxisGroups
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import TINY, RecordingChannel, alone, context_of, tiny_config, train

MODEL = replace(TINY, num_layers=5)
"""Tied embeddings: the table is at both ends."""
STEPS = 4
RANKS = 4
State = dict[str, np.ndarray[Any, Any]]
Numbers = list[tuple[int, float, float]]


@dataclass(frozen=True)
class Layout:
    """A case: sizes of the pipeline (the rest is data parallel), and other fields."""

    pipeline: int
    ranks: int
    schedule: str = "OneFOneB"
    stages: int = 1
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(pipeline=self.pipeline, shard=self.ranks // self.pipeline, stages_per_rank=self.stages)

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "gang__ranks_per_node": self.ranks,
            "parallelism__pipeline": self.pipeline,
            "parallelism__pipeline_schedule": self.schedule,
            "parallelism__stages_per_rank": self.stages,
            **self.changes,
        }


PLAIN = {"training__deterministic": "Off"}
LAYOUTS = {
    "2 ranks": Layout(2, 2),
    "2 ranks, plain sums, stage 0": Layout(2, 2, changes={**PLAIN, "memory__zero_stage": 0}),
    "2 ranks, gpipe, recompute": Layout(2, 2, "GPipe", changes={"memory__activation_checkpointing": "full"}),
    "2 ranks, one micro-batch": Layout(2, 2, changes={"training__micro_batch_size": 8, "training__sequence_length": 8}),
    "2 ranks, interleaved": Layout(2, 2, "Interleaved", 2),
    "2 ranks, zero-bubble": Layout(2, 2, "ZeroBubble"),
    "2 ranks, zero-bubble, 2 stages, plain sums": Layout(2, 2, "ZeroBubble", 2, changes=PLAIN),
    "4 ranks": Layout(4, 4),
    "4 ranks, zero-bubble, recompute": Layout(
        4, 4, "ZeroBubble", changes={"memory__activation_checkpointing": "full", "memory__zero_stage": 0}
    ),
    "2 x 2 data": Layout(2, 4),
    "2 x 2 data, stage 0": Layout(2, 4, changes={"memory__zero_stage": 0}),
    "2 x 2 data, interleaved": Layout(2, 4, "Interleaved", 2, changes={"training__micro_batch_size": 2}),
    "2 x 2 data, zero-bubble, each sent": Layout(
        2, 4, "ZeroBubble", 2, changes={"training__micro_batch_size": 4, "training__sequence_length": 8, **PLAIN}
    ),
    "2 x 2 data, zero-bubble, stage 3": Layout(2, 4, "ZeroBubble", changes={"memory__zero_stage": 3}),
}


class Contexts:
    """A rank's contexts by grid; groups are opened once."""

    def __init__(self, _rank: int, _size: int) -> None:
        self._groups = AxisGroups(torch.device("cpu"))
        self._made: dict[ParallelDims, RankContext | None] = {}

    def of(self, dims: ParallelDims) -> RankContext | None:
        if dims not in self._made:
            self._made[dims] = context_of(dims, groups=self._groups)
        made = self._made[dims]
        return None if made is None else replace(made, channel=RecordingChannel())


def numbers(context: RankContext) -> Numbers:
    assert isinstance(context.channel, RecordingChannel)
    return [(event.step, event.loss, event.grad_norm) for event in context.channel.all(StepEvent)]


def run(context: RankContext, folder: str, **fields: Any) -> tuple[Cause, Numbers, list[float]]:
    validation = {"data__validation": {"fraction": 0.5, "every_steps": 2}}
    config = tiny_config(folder, training__total_steps=STEPS, **(validation | fields))
    cause = train(config, context, MODEL)
    assert isinstance(context.channel, RecordingChannel)
    return cause, numbers(context), [event.loss for event in context.channel.all(ValidationEvent)]


def run_layout(
    contexts: Contexts, layout: Layout, folder: str, stops: bool = False
) -> tuple[Cause, Numbers, list[float]] | None:
    """Run a layout on its ranks; with `stops` the last one asks for a stop after its first step."""
    context = contexts.of(layout.dims)
    if context is None:
        return None
    if stops and context.mesh.rank == layout.ranks - 1:
        context.channel.put(StopCommand(mode="suspend"))
    return run(context, folder, **layout.fields)


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(RANKS, Contexts) as made:
        yield made


def final_state(folder: Path) -> State:
    """Return every tensor of the newest checkpoint, which must be whole."""
    found = CheckpointRoot(folder / "root").committed()[0]
    assert verify(found.path, found.digest).ok
    reader = CheckpointReader(found.path, found.digest)
    return {name: whole(reader, name) for name in reader.manifest.tensors}


def whole(reader: CheckpointReader, name: str) -> np.ndarray[Any, Any]:
    info = reader.tensor(name)
    box = Box((0,) * len(info.shape), info.shape)
    return to_float32(reader.read(name, box, (0, int(np.prod(info.shape)))), info.dtype)


Reference = tuple[Numbers, list[float], State]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Reference]:
    found: dict[str, Reference] = {}

    def of(changes: dict[str, Any]) -> Reference:
        kept = {key: value for key, value in changes.items() if not key.startswith(("gang", "parallelism", "memory"))}
        if str(kept) not in found:
            folder = tmp_path_factory.mktemp("alone")
            _, losses, validation = run(alone(), str(folder), **kept)
            found[str(kept)] = losses, validation, final_state(folder)
        return found[str(kept)]

    return of


def assert_same_state(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = np.linalg.norm(found[name] - tensor) / np.linalg.norm(tensor)
        # A moment is a sum of gradients that nearly cancel: its rounding is larger, measured by its own length.
        assert difference <= (1e-6 if name.startswith("model.") else 1e-5), (name, difference)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pipeline_equals_one_rank(
    tmp_path: Path, world: RankWorld, reference: Callable[[dict[str, Any]], Reference], name: str
) -> None:
    layout = LAYOUTS[name]
    answers = world.call(run_layout, layout, str(tmp_path))[: layout.ranks]
    losses, validation, state = reference(layout.fields)
    assert all(answer[:2] == answers[0][:2] for answer in answers), "every rank has the same numbers"
    cause, found, found_validation = answers[0]
    assert cause == Cause.COMPLETED
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    np.testing.assert_allclose(found_validation, validation, rtol=1e-6)
    assert_same_state(final_state(tmp_path), state)


def test_a_stopped_pipeline_continues_bitwise(tmp_path: Path, world: RankWorld) -> None:
    """The stop comes from the last rank; then a rank of the second stage is killed."""
    layout = LAYOUTS["2 x 2 data, zero-bubble, stage 3"]
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    _, uninterrupted, _ = world.call(run_layout, layout, whole)[0]
    cause, first, _ = world.call(run_layout, layout, parts, True)[0]
    assert (cause, first) == (Cause.INTERRUPTED, uninterrupted[:1])
    with pytest.raises(AssertionError, match="rank 2 ended with exit code -9"):
        world.call(run_and_die, layout, parts, 3)
    cause, rest, _ = world.call(run_layout, layout, parts)[0]
    assert cause == Cause.COMPLETED
    assert rest == uninterrupted[2:], "it resumed from the save of step 2"
    left, right = final_state(Path(whole)), final_state(Path(parts))
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)


class DeadlyChannel(RecordingChannel):
    """Kills this process when it reports a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def send(self, event: Event) -> None:
        super().send(event)
        if isinstance(event, StepEvent) and event.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(contexts: Contexts, layout: Layout, folder: str, step: int) -> None:
    """Run with a save at each step. Rank 2, of the second stage, is killed at the end of a step, before its save."""
    context = contexts.of(layout.dims)
    assert context is not None
    if context.mesh.rank == 2:
        context = replace(context, channel=DeadlyChannel(step))
    run(context, folder, checkpoint__interval_steps=1, checkpoint__async_save=False, **layout.fields)


def test_a_checkpoint_moves_between_pipelines_and_one_rank(
    tmp_path: Path, world: RankWorld, reference: Callable[[dict[str, Any]], Reference]
) -> None:
    """Without validation: one that a stop has left would see the stop of the next attempt, before its step."""
    losses, _, state = reference({})
    found, unvalidated = [], {"data__validation": None}
    for name in ("2 ranks, interleaved", "4 ranks"):
        layout = replace(LAYOUTS[name], changes={**LAYOUTS[name].changes, **unvalidated})
        cause, numbers_, _ = world.call(run_layout, layout, str(tmp_path), True)[0]
        assert cause == Cause.INTERRUPTED
        found += numbers_
        first = alone()
        first.channel.put(StopCommand(mode="suspend"))
        found += run(first, str(tmp_path), **unvalidated)[1]
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert_same_state(final_state(tmp_path), state)
