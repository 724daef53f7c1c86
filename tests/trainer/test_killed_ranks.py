"""A rank is killed by SIGKILL at a random step, in a layout of each axis: the next run has the bits of a whole one.

Step, rank and place within the step are drawn anew in each test run; a failure names them.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.trainer.rank.data.batch import MicroBatch
from testing.trainer.layouts import (
    DEEP_SPARSE,
    ROW_S,
    SPARSE,
    TIED,
    Layout,
    MotifBatches,
    OpenGroups,
    losses_of,
    open_groups,
    read_state,
    relative_difference,
    run_row,
)
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import context_of, train

STEPS, RANKS = 6, 4
SEQUENCE: dict[str, Any] = {"parallelism__sequence_parallel": True}
RING: dict[str, Any] = {"parallelism__context_method": "Ring"}
ZERO_BUBBLE: dict[str, Any] = {"parallelism__pipeline_schedule": "ZeroBubble"}
INTERLEAVED: dict[str, Any] = {"parallelism__pipeline_schedule": "Interleaved"}
FIELDS: dict[str, Any] = {
    "training__total_steps": STEPS,
    "training__deterministic": "SameLayout",
    "checkpoint__interval_steps": 1,
    "checkpoint__async_save": False,
}

ROWS = {
    "shard": Layout(shard=4, zero_stage=3, changes={"memory__cpu_offload": True}),
    "replicate": Layout(replicate=2, shard=2, zero_stage=2, recompute=True),
    "tensor": Layout(tensor=2, shard=2, changes=SEQUENCE, model=TIED),
    "context": Layout(context=2, shard=2),
    "context, ring": Layout(context=2, changes=RING),
    "expert": Layout(tensor=2, shard=2, expert=4, changes=SEQUENCE, model=SPARSE, zero_stage=3),
    "pipeline": Layout(pipeline=2, shard=2, changes=ZERO_BUBBLE, zero_stage=3),
    "pipeline, interleaved": Layout(pipeline=2, stages=2, tensor=2, changes=INTERLEAVED, model=DEEP_SPARSE),
}


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(RANKS, open_groups) as world:
        yield world


@pytest.mark.parametrize("name", ROWS)
def test_a_run_whose_rank_was_killed_goes_on_bitwise(world: RankWorld, tmp_path: Path, name: str) -> None:
    layout, chance = ROWS[name], random.SystemRandom()
    rank, step = chance.randrange(layout.dims.world_size), chance.randrange(1, STEPS)
    batch = chance.randrange(layout.config("unused").training.global_batch_size // layout.dims.data_parallel)
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    uninterrupted, _ = world.call(run_row, layout, whole, FIELDS, timeout_s=ROW_S)[0]
    with pytest.raises(AssertionError, match=f"rank {rank} ended with exit code -9"):
        world.call(run_and_die, layout, parts, rank, (step, batch), timeout_s=ROW_S)
    resumed, _ = world.call(run_row, layout, parts, FIELDS, timeout_s=ROW_S)[0]
    where = f"rank {rank} was killed in step {step + 1} at micro-batch {batch}"
    assert resumed == uninterrupted[step:], where
    gaps = relative_difference(read_state(parts), expected := read_state(whole))
    assert gaps == dict.fromkeys(expected, 0.0), where


def test_every_axis_loses_a_rank() -> None:
    axes = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
    assert all(any(getattr(layout, axis) > 1 for layout in ROWS.values()) for axis in axes)


class DeadlyBatches(MotifBatches):
    """Kills this process when it takes one micro-batch of one step."""

    def __init__(self, layout: Layout, folder: str, moment: tuple[int, int]) -> None:
        super().__init__(layout.config(folder, **FIELDS), layout.model.vocab_size)
        self._moment = moment

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        for number, batch in enumerate(super().micro_batches(step, dp_rank, dp_size)):
            if (step, number) == self._moment:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


def run_and_die(held: OpenGroups, layout: Layout, folder: str, rank: int, moment: tuple[int, int]) -> Any:
    """Train the row on this rank. `moment`: the step, and its micro-batch, in which `rank` is killed."""
    context = context_of(layout.dims, groups=held.axes, save_groups=held.saves)
    if context is None:
        return None
    config = layout.config(folder, **FIELDS)
    batches = DeadlyBatches(layout, folder, moment if context.mesh.rank == rank else (-1, -1))
    train(config, context, layout.model, batches)
    return losses_of(context)
