"""Every layout of ranks equals one rank: losses, gradients (the moments are sums of them) and weights after ten steps.

A row is one line. Add it to the list of its subject.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testing.trainer.layouts import (
    MIXED,
    MOMENT_TOLERANCE,
    SPARSE,
    STEPS,
    TIED,
    TOLERANCE,
    WINDOWED,
    Layout,
    LayoutWorld,
    Result,
    reference,
    relative_difference,
)

SEQUENCE: dict[str, Any] = {"parallelism__sequence_parallel": True}

DATA = (
    Layout(shard=2),
    Layout(shard=4, zero_stage=0),
    Layout(shard=2, zero_stage=2, micro_batch=2),
    Layout(shard=8, model=TIED),
)
TENSOR = (
    Layout(tensor=2),
    Layout(tensor=4, model=TIED),
    Layout(tensor=2, changes=SEQUENCE),
    Layout(tensor=4, changes=SEQUENCE),
    Layout(tensor=2, changes=SEQUENCE, model=TIED, micro_batch=2),
    Layout(tensor=2, changes=SEQUENCE, recompute=True),
    Layout(tensor=2, recompute=True),
    Layout(tensor=2, shard=2),
    Layout(tensor=2, shard=2, changes=SEQUENCE),
    Layout(tensor=2, shard=2, changes=SEQUENCE, zero_stage=0),
    Layout(tensor=2, shard=2, changes=SEQUENCE, zero_stage=2),
    Layout(tensor=2, shard=4, changes=SEQUENCE, recompute=True, micro_batch=2),
    Layout(tensor=4, shard=2, changes=SEQUENCE),
    Layout(tensor=2, shard=2, zero_stage=0, model=TIED),
)
REPLICATE = (
    Layout(replicate=2),
    Layout(replicate=2, shard=2),
    Layout(replicate=4, shard=2, zero_stage=2),
    Layout(replicate=2, shard=2, zero_stage=0, micro_batch=2),
    Layout(replicate=2, shard=4, zero_stage=2, recompute=True),
    Layout(replicate=2, tensor=2, changes=SEQUENCE),
    Layout(replicate=2, shard=2, tensor=2, changes=SEQUENCE),
    Layout(replicate=2, shard=2, tensor=2, changes=SEQUENCE, zero_stage=2, model=TIED),
    Layout(replicate=2, shard=2, tensor=2, zero_stage=0),
)
EXPERT = (
    Layout(shard=2, expert=2, model=SPARSE, micro_batch=2),
    Layout(shard=4, expert=2, model=SPARSE, zero_stage=0),
    Layout(shard=4, expert=4, model=MIXED, zero_stage=2),
    Layout(shard=8, expert=8, model=SPARSE),
    Layout(shard=4, expert=2, model=MIXED, zero_stage=3, recompute=True),
    Layout(replicate=2, shard=2, expert=2, model=SPARSE),
)
RING: dict[str, Any] = {"parallelism__context_method": "Ring"}
ULYSSES: dict[str, Any] = {"parallelism__context_method": "Ulysses"}
CONTEXT = (
    Layout(context=2),
    Layout(context=8, zero_stage=2),  # two tokens of a piece: some ranks have none that counts
    Layout(context=2, shard=2, zero_stage=0, micro_batch=2),
    Layout(context=2, shard=2, zero_stage=3, recompute=True),
    Layout(context=4, recompute=True, model=WINDOWED),
    Layout(context=2, tensor=2, changes=SEQUENCE),
    Layout(context=2, replicate=2, model=TIED, zero_stage=2),
    Layout(context=2, pipeline=2, recompute=True),
    Layout(context=2, changes={"memory__activation_checkpointing": "selective"}),
    Layout(context=2, changes=RING, zero_stage=2),
    Layout(context=4, changes=RING, model=WINDOWED, micro_batch=2),
    Layout(context=4, shard=2, changes=RING, zero_stage=3, recompute=True),
    Layout(context=2, tensor=2, changes=RING, zero_stage=0),
    Layout(context=2, changes=ULYSSES, recompute=True),
    Layout(context=8, changes=ULYSSES, micro_batch=2),
    Layout(context=2, tensor=2, changes={**ULYSSES, **SEQUENCE}, zero_stage=2, model=WINDOWED),
    Layout(context=2, pipeline=2, changes=ULYSSES, model=TIED),
)
PIPELINE = (
    Layout(pipeline=2, tensor=2),
    Layout(pipeline=2, tensor=2, changes=SEQUENCE),
)
ROWS = (*DATA, *TENSOR, *REPLICATE, *CONTEXT, *PIPELINE, *EXPERT)


@pytest.fixture(scope="module")
def world() -> Iterator[LayoutWorld]:
    with LayoutWorld(8) as world:
        yield world


PAIRS = (
    (Layout(shard=4), Layout(tensor=2, changes=SEQUENCE)),
    (Layout(tensor=2, changes=SEQUENCE), Layout(tensor=4, changes=SEQUENCE)),
    (Layout(tensor=4, changes=SEQUENCE), Layout(tensor=2, shard=2, zero_stage=2)),
    (Layout(tensor=2, shard=2, zero_stage=2), Layout(replicate=2, shard=2, zero_stage=0)),
    (Layout(replicate=2, shard=2, zero_stage=0), Layout(replicate=2, tensor=2, changes=SEQUENCE)),
    (Layout(replicate=2, tensor=2, changes=SEQUENCE), Layout(shard=4)),
    (Layout(shard=4, expert=2, model=SPARSE), Layout(shard=4, expert=4, model=SPARSE, zero_stage=3)),
    (Layout(shard=4, expert=4, model=SPARSE, zero_stage=3), Layout(shard=2, model=SPARSE)),
    (Layout(context=4), Layout(context=2, shard=2, changes=RING, zero_stage=3)),
    (Layout(context=2, shard=2, changes=RING, zero_stage=3), Layout(context=2, changes=ULYSSES, zero_stage=2)),
    (Layout(context=2, changes=ULYSSES, zero_stage=2), Layout(context=2, tensor=2, zero_stage=0)),
    (Layout(context=2, tensor=2, zero_stage=0), Layout(context=4)),
)


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_a_layout_equals_one_rank(world: LayoutWorld, tmp_path: Path, layout: Layout) -> None:
    assert_equal(world.run(layout, tmp_path), reference(layout.model, layout.micro_batch))


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_a_run_goes_on_in_another_layout(world: LayoutWorld, tmp_path: Path, first: Layout, second: Layout) -> None:
    """Each layout is once the source of a checkpoint and once its target."""
    begun = world.run(first, tmp_path, training__total_steps=STEPS // 2)
    ended = world.run(second, tmp_path)
    assert [step for step, _, _ in begun.losses + ended.losses] == list(range(1, STEPS + 1))
    assert_equal(
        Result(begun.losses + ended.losses, ended.state, begun.routing + ended.routing),
        reference(second.model, second.micro_batch),
    )


RESUMED = (
    Layout(context=2, zero_stage=2),
    Layout(context=2, shard=2, changes=RING, recompute=True),
    Layout(context=2, tensor=2, changes=ULYSSES),
)
WIDE = (
    Layout(tensor=2, shard=2, changes=SEQUENCE),
    Layout(replicate=2),
    Layout(context=2, shard=2),
    Layout(context=2, shard=2, changes=RING),
)


@pytest.mark.parametrize("layout", RESUMED, ids=str)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(world: LayoutWorld, tmp_path: Path, layout: Layout) -> None:
    same = {"training__deterministic": "SameLayout"}
    whole = world.run(layout, tmp_path / "whole", **same)
    begun = world.run(layout, tmp_path / "parts", **same, training__total_steps=STEPS // 2)
    ended = world.run(layout, tmp_path / "parts", **same)
    assert begun.losses + ended.losses == whole.losses
    assert relative_difference(ended.state, whole.state) == dict.fromkeys(whole.state, 0.0)


@pytest.mark.parametrize("layout", WIDE, ids=str)
def test_any_data_parallel_keeps_its_bits_beside_other_axes(world: LayoutWorld, tmp_path: Path, layout: Layout) -> None:
    anyhow = {"training__deterministic": "AnyDataParallel"}
    wide = world.run(layout, tmp_path / "wide", **anyhow)
    narrow = world.run(replace(layout, shard=1, replicate=1), tmp_path / "narrow", **anyhow)
    assert wide.losses == narrow.losses
    assert relative_difference(wide.state, narrow.state) == dict.fromkeys(narrow.state, 0.0)


def assert_equal(got: Result, expected: Result) -> None:
    np.testing.assert_allclose(got.losses, expected.losses, rtol=TOLERANCE)
    assert [tokens for tokens, *_ in got.routing] == [tokens for tokens, *_ in expected.routing]
    routers = [[losses for _, *losses in run.routing] for run in (got, expected)]
    np.testing.assert_allclose(routers[0], routers[1], rtol=TOLERANCE)
    gaps = relative_difference(got.state, expected.state)
    limits = {name: TOLERANCE if name.startswith("model.") else MOMENT_TOLERANCE for name in gaps}
    assert not {name: gap for name, gap in gaps.items() if gap > limits[name]}
