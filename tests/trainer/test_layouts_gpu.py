"""Layouts over NCCL with the fused kernels in bf16: as close to one GPU as data parallelism is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.trainer.rank.build import RankContext
from stoker.trainer.rank.mesh import AxisGroups
from testing.trainer.layouts import Layout, losses_of, read_state, relative_difference
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import SMALL, alone, context_of, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]
MODEL = replace(SMALL, vocab_size=128)
EXPERTS = replace(MODEL, architecture="qwen3-moe", num_experts=8, num_experts_per_token=2, moe_intermediate_size=64)
SEQUENCE: dict[str, Any] = {"parallelism__sequence_parallel": True}
FUSED = {"kernels": "fused", "attention": "stoker", "memory__precision": "bf16", "training__total_steps": 4}
NOTHING: Mapping[str, Any] = {}
EIGHT_BITS: dict[str, Any] = {"memory__precision": "fp8"}
ROWS = (
    Layout(shard=2, model=MODEL),
    Layout(tensor=2, model=MODEL),
    Layout(tensor=2, model=MODEL, changes=SEQUENCE),
    Layout(tensor=2, model=MODEL, changes=SEQUENCE, recompute=True, zero_stage=2),
    Layout(tensor=2, model=replace(MODEL, tie_embeddings=False), changes=SEQUENCE),
    Layout(tensor=2, model=replace(MODEL, vocab_size=127), changes=SEQUENCE),
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
    Layout(context=2, model=EXPERTS, recompute=True, changes={"parallelism__context_method": "Ulysses"}),
    Layout(pipeline=2, model=MODEL, changes={"parallelism__pipeline_schedule": "ZeroBubble"}, lora=True),
    Layout(shard=2, model=EXPERTS, expert=2, lora=True),
    Layout(tensor=2, model=EXPERTS, changes=SEQUENCE, lora=True),
    Layout(pipeline=2, model=MODEL, zero_stage=2),
    Layout(pipeline=2, model=MODEL, zero_stage=3, recompute=True),
)
IN_EIGHT_BITS = (
    Layout(shard=2, model=EXPERTS, expert=2, changes=EIGHT_BITS),
    Layout(context=2, model=EXPERTS, changes=EIGHT_BITS),
    Layout(shard=2, model=EXPERTS, expert=2, zero_stage=3, changes={**EIGHT_BITS, "memory__fp8_recipe": "Rowwise"}),
)
OFFLOADED = (
    Layout(shard=2, model=MODEL),
    Layout(shard=2, model=MODEL, changes={"memory__precision": "fp32", "kernels": "reference", "attention": "auto"}),
    Layout(shard=2, model=MODEL, zero_stage=0),
    Layout(shard=2, model=MODEL, zero_stage=3),
    Layout(shard=2, model=EXPERTS, expert=2),
    Layout(pipeline=2, model=MODEL, changes={"parallelism__pipeline_schedule": "ZeroBubble"}),
)
ZERO_BUBBLE: dict[str, Any] = {"parallelism__pipeline_schedule": "ZeroBubble"}
FOUR = (
    Layout(pipeline=2, shard=2, model=MODEL, zero_stage=2),
    Layout(pipeline=2, shard=2, model=MODEL, zero_stage=3, recompute=True),
    Layout(pipeline=2, shard=2, model=replace(MODEL, tie_embeddings=False), zero_stage=3, changes=ZERO_BUBBLE),
    Layout(context=2, shard=2, expert=2, model=EXPERTS),
    *(
        Layout(pipeline=4, model=replace(MODEL, num_layers=4), changes={"parallelism__pipeline_schedule": schedule})
        for schedule in ("GPipe", "OneFOneB", "ZeroBubble")
    ),
)


def open_groups(rank: int, _size: int) -> AxisGroups:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return AxisGroups(torch.device("cuda", rank))


def run_row(
    groups: AxisGroups, layout: Layout, folder: str, changes: Mapping[str, Any] = NOTHING
) -> list[tuple[int, float, float]]:
    context = context_of(layout.dims, f"cuda:{torch.cuda.current_device()}", groups)
    assert context is not None
    return train_on(context, layout, folder, changes)


def train_on(
    context: RankContext, layout: Layout, folder: str, changes: Mapping[str, Any] = NOTHING
) -> list[tuple[int, float, float]]:
    config = layout.config(folder, **{**FUSED, **layout.changes, **changes})
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(config.training.deterministic != "Off")
    try:
        train(config, context, layout.model)
    finally:
        torch.use_deterministic_algorithms(before)
    return losses_of(context)


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(2, open_groups, backend="nccl") as world:
        yield world


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_a_layout_over_nccl_is_close_to_one_gpu(world: RankWorld, tmp_path: Path, layout: Layout) -> None:
    assert_close_to_one(world.call(run_row, layout, str(tmp_path), timeout_s=120.0), layout)


@pytest.mark.parametrize("layout", IN_EIGHT_BITS, ids=str)
def test_experts_beside_eight_bits_are_close_to_one_gpu(world: RankWorld, tmp_path: Path, layout: Layout) -> None:
    got = world.call(run_row, layout, str(tmp_path), timeout_s=120.0)
    assert got == [got[0]] * len(got)
    recipe = {key: value for key, value in layout.changes.items() if key.startswith("memory")}
    with tempfile.TemporaryDirectory() as folder:
        expected = train_on(alone("cuda"), Layout(model=layout.model, changes=recipe), folder)
    np.testing.assert_allclose(got[0], expected, rtol=2e-2)


@pytest.mark.parametrize("layout", OFFLOADED, ids=str)
def test_state_in_host_memory_or_in_a_file_changes_no_bit(world: RankWorld, tmp_path: Path, layout: Layout) -> None:
    places: dict[str, Any] = {
        "plain": {},
        "host": {"memory__cpu_offload": True},
        "file": {"memory__nvme_offload": {"path": str(tmp_path)}},
    }
    found = {}
    for name, place in places.items():
        changes = {"training__deterministic": "SameLayout", "training__total_steps": 5, **place}
        losses = world.call(run_row, layout, str(tmp_path / name), changes, timeout_s=120.0)
        found[name] = losses, read_state(tmp_path / name)
    for losses, state in found.values():
        assert losses == found["plain"][0]
        assert relative_difference(state, found["plain"][1]) == dict.fromkeys(state, 0.0)


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
        expected = train_on(alone("cuda"), Layout(model=layout.model, lora=layout.lora), folder)
    np.testing.assert_allclose(got[0], expected, rtol=5e-3)
