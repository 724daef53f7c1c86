"""Layouts over NCCL with the fused kernels in bf16: as close to one GPU as data parallelism is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.trainer.rank.build import RankContext
from stoker.trainer.rank.mesh import AxisGroups
from testing.trainer.layouts import Layout, losses_of
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import SMALL, alone, context_of, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]
MODEL = replace(SMALL, vocab_size=128)
EXPERTS = replace(MODEL, architecture="qwen3-moe", num_experts=8, num_experts_per_token=2, moe_intermediate_size=64)
SEQUENCE: dict[str, Any] = {"parallelism__sequence_parallel": True}
FUSED = {"kernels": "fused", "attention": "stoker", "memory__precision": "bf16", "training__total_steps": 4}
ROWS = (
    Layout(shard=2, model=MODEL),
    Layout(tensor=2, model=MODEL),
    Layout(tensor=2, model=MODEL, changes=SEQUENCE),
    Layout(tensor=2, model=MODEL, changes=SEQUENCE, recompute=True, zero_stage=2),
    Layout(tensor=2, model=replace(MODEL, tie_embeddings=False), changes=SEQUENCE),
    Layout(replicate=2, model=MODEL, zero_stage=2),
    Layout(shard=2, model=MODEL, zero_stage=3, recompute=True),
    Layout(shard=2, model=EXPERTS, expert=2),
    *(
        Layout(context=2, model=MODEL, changes={"parallelism__context_method": method})
        for method in ("AllGather", "Ring", "Ulysses")
    ),
    Layout(context=2, model=replace(MODEL, architecture="mistral", sliding_window=9), recompute=True, zero_stage=2),
    *(
        Layout(pipeline=2, model=MODEL, changes={"parallelism__pipeline_schedule": schedule})
        for schedule in ("GPipe", "OneFOneB", "ZeroBubble")
    ),
    Layout(pipeline=2, model=MODEL, changes={"memory__activation_checkpointing": "selective"}),
    Layout(context=2, model=EXPERTS),
)
ZERO_BUBBLE: dict[str, Any] = {"parallelism__pipeline_schedule": "ZeroBubble"}
FOUR = (
    Layout(pipeline=2, shard=2, model=MODEL, zero_stage=2),
    Layout(pipeline=2, shard=2, model=MODEL, zero_stage=3, recompute=True),
    Layout(pipeline=2, shard=2, model=replace(MODEL, tie_embeddings=False), zero_stage=3, changes=ZERO_BUBBLE),
    Layout(context=2, shard=2, expert=2, model=EXPERTS),
)


def open_groups(rank: int, _size: int) -> AxisGroups:
    return AxisGroups(torch.device("cuda", rank))


def run_row(groups: AxisGroups, layout: Layout, folder: str) -> list[tuple[int, float, float]]:
    context = context_of(layout.dims, f"cuda:{torch.cuda.current_device()}", groups)
    assert context is not None
    return train_on(context, layout, folder)


def train_on(context: RankContext, layout: Layout, folder: str) -> list[tuple[int, float, float]]:
    train(layout.config(folder, **FUSED), context, layout.model)
    return losses_of(context)


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(2, open_groups, backend="nccl") as world:
        yield world


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_a_layout_over_nccl_is_close_to_one_gpu(world: RankWorld, tmp_path: Path, layout: Layout) -> None:
    assert_close_to_one(world.call(run_row, layout, str(tmp_path), timeout_s=120.0), layout)


@pytest.fixture(scope="module")
def four() -> Iterator[RankWorld]:
    with RankWorld(4, open_groups, backend="nccl") as world:
        yield world


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
@pytest.mark.parametrize("layout", FOUR, ids=str)
def test_a_layout_of_four_over_nccl_is_close_to_one_gpu(four: RankWorld, tmp_path: Path, layout: Layout) -> None:
    assert_close_to_one(four.call(run_row, layout, str(tmp_path), timeout_s=120.0), layout)


def assert_close_to_one(got: list[Any], layout: Layout) -> None:
    assert got == [got[0]] * len(got)
    with tempfile.TemporaryDirectory() as folder:
        expected = train_on(alone("cuda"), Layout(model=layout.model), folder)
    np.testing.assert_allclose(got[0], expected, rtol=5e-3)
