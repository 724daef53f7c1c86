"""Every layout of ranks equals one rank: losses, gradients (the moments are sums of them) and weights after ten steps.

A row is one line. Add it to the list of its subject.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testing.trainer.layouts import (
    MIXED,
    SPARSE,
    TIED,
    TOLERANCE,
    Layout,
    LayoutWorld,
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
    Layout(shard=2, model=SPARSE),
    Layout(shard=2, expert=2, model=SPARSE),
    Layout(shard=4, expert=2, model=SPARSE),
    Layout(shard=4, expert=4, model=MIXED, zero_stage=2),
    Layout(shard=4, expert=4, model=SPARSE, recompute=True),
    Layout(shard=8, expert=8, model=SPARSE),
    Layout(shard=4, expert=2, model=SPARSE, zero_stage=0),
    Layout(shard=4, expert=2, model=SPARSE, zero_stage=3),
    Layout(shard=4, expert=2, model=MIXED, zero_stage=3, recompute=True),
    Layout(shard=2, expert=2, model=SPARSE, micro_batch=2),
    Layout(replicate=2, shard=2, expert=2, model=SPARSE),
)
ROWS = (*DATA, *TENSOR, *REPLICATE, *EXPERT)


@pytest.fixture(scope="module")
def world() -> Iterator[LayoutWorld]:
    with LayoutWorld(8) as world:
        yield world


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_a_layout_equals_one_rank(world: LayoutWorld, tmp_path: Path, layout: Layout) -> None:
    got, expected = world.run(layout, tmp_path), reference(layout.model, layout.micro_batch)
    assert [tokens for tokens, *_ in got.routing] == [tokens for tokens, *_ in expected.routing]
    np.testing.assert_allclose(
        [losses for _, *losses in got.routing], [losses for _, *losses in expected.routing], 1e-6
    )
    np.testing.assert_allclose(got.losses, expected.losses, rtol=TOLERANCE)
    far = {name: gap for name, gap in relative_difference(got.state, expected.state).items() if gap > TOLERANCE}
    assert not far
