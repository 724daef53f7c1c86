"""The same loop on GPUs: one against the CPU, several over NCCL against one, repeated bitwise, stopped and resumed, and served by one what several wrote."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.verify import verify
from stoker.model.attend import PackedAttend
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.weights.source import open_weights
from stoker.trainer.beacon import SaveEvent, StepEvent, StopCommand
from tests.trainer.gloo_world import run_ranks
from tests.trainer.tiny_run import TINY, RecordingBeacon, Team, alone, team_of, tiny_config, train

pytestmark = pytest.mark.gpu

SMALL = replace(TINY, hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=64)
"""A model of which every fused kernel takes the shapes."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {"training__deterministic": "Off", "attention": "cudnn"},
    "same layout": {"training__deterministic": "SameLayout"},
    "any": {},
    "recompute": {"memory__activation_checkpointing": "full"},
    "stage 0": {"memory__zero_stage": 0},
    "stage 2": {"memory__zero_stage": 2, "training__deterministic": "SameLayout"},
    "one micro-batch": {"training__micro_batch_size": 2, "training__deterministic": "SameLayout"},
    "reference": {"kernels": "reference", "attention": "auto", "memory__precision": "fp32"},
}
BITWISE = ("any", "recompute", "stage 0")
"""AnyDataParallel: the same bits whatever the number of ranks."""


def losses(team: Team) -> list[tuple[float, float]]:
    assert isinstance(team.beacon, RecordingBeacon)
    return [(event.loss, event.grad_norm) for event in team.beacon.all(StepEvent)]


def train_case(team: Team, folder: Path | str, changes: dict[str, Any]) -> list[tuple[float, float]]:
    kernels = "fused" if team.device.type == "cuda" else "reference"
    attention = "stoker" if kernels == "fused" else "auto"  # not flash, whose import warns of itself
    defaults = {"memory__precision": "bf16", "kernels": kernels, "attention": attention}
    train(tiny_config(folder, **{**defaults, **changes}), team, SMALL)
    return losses(team)


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_a_gpu
@pytest.mark.parametrize("case", ["plain", "any", "recompute", "reference"])
def test_one_gpu_agrees_with_the_cpu(tmp_path: Path, case: str) -> None:
    on_gpu = train_case(alone("cuda"), tmp_path / "gpu", CASES[case])
    on_cpu = train_case(alone(), tmp_path / "cpu", {**CASES[case], "kernels": "reference", "attention": "auto"})
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-3 if case == "reference" else 2e-2)


@needs_a_gpu
@pytest.mark.parametrize("case", ["same layout", "any", "recompute", "stage 2"])
def test_a_run_repeats_bitwise_on_the_gpu(tmp_path: Path, case: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        first = train_case(alone("cuda"), tmp_path / "first", CASES[case])
        assert train_case(alone("cuda"), tmp_path / "second", CASES[case]) == first
    finally:
        torch.use_deterministic_algorithms(False)


@needs_a_gpu
def test_a_run_resumes_on_the_gpu_bitwise(tmp_path: Path) -> None:
    whole = train_case(alone("cuda"), tmp_path / "whole", {})
    stopped = alone("cuda")
    stopped.beacon.put(StopCommand(mode="suspend"))
    first = train_case(stopped, tmp_path / "parts", {})
    assert first + train_case(alone("cuda"), tmp_path / "parts", {}) == whole


@needs_a_gpu
def test_a_save_in_flight_holds_the_state_of_its_own_step(tmp_path: Path) -> None:
    """Training goes on while the state is copied: each checkpoint reads back, and a run that goes on from one repeats the rest bitwise."""
    team = alone("cuda")
    whole = train_case(team, tmp_path, {"checkpoint__interval_steps": 1})
    assert isinstance(team.beacon, RecordingBeacon)
    assert len([event for event in team.beacon.all(SaveEvent) if event.verified]) == 6
    for found in CheckpointRoot(tmp_path / "root").committed()[:3]:  # the newest ones, steps 6, 5 and 4
        shutil.rmtree(found.path)
    assert train_case(alone("cuda"), tmp_path, {}) == whole[3:]


def train_cases(rank: int, size: int, folder: str) -> dict[str, list[tuple[float, float]]]:
    """All cases over one set of communicators: making one takes longer than a case."""
    together = team_of(range(size), f"cuda:{rank}")
    assert together is not None
    found = {}
    for name, changes in {**CASES, "same layout again": CASES["same layout"]}.items():
        torch.use_deterministic_algorithms(name != "plain")
        found[name] = train_case(replace(together, beacon=RecordingBeacon()), f"{folder}/{name}", changes)
    return found


@pytest.mark.parametrize("size", [size for size in (2, 4) if size <= torch.cuda.device_count()] or [2])
@needs_two
def test_several_gpus_agree_with_one_and_bitwise_in_the_mode_for_it(tmp_path: Path, size: int) -> None:
    answers = run_ranks(train_cases, size, str(tmp_path), backend="nccl")
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["same layout again"] == answers[0]["same layout"]
    for name, changes in CASES.items():
        torch.use_deterministic_algorithms(name != "plain")
        one = train_case(alone("cuda"), tmp_path / f"{name} alone", changes)
        if name in BITWISE:
            assert answers[0][name] == one, name
        else:
            np.testing.assert_allclose(answers[0][name], one, rtol=1e-4 if name == "reference" else 5e-3, err_msg=name)
    torch.use_deterministic_algorithms(False)
    assert_served_by_one(tmp_path / "same layout" / "root")


def assert_served_by_one(root: Path) -> None:
    """What several ranks wrote loads into one decoder on one GPU, as an engine loads it."""
    newest = CheckpointRoot(root).committed()[0]
    assert verify(newest.path, newest.digest).ok
    source = open_weights(newest.path, newest.digest)
    decoder = Decoder(source.config, Ops("fused"), dtype=torch.bfloat16, device="cuda")
    source.load_into(decoder)
    tokens = torch.arange(24, device="cuda")
    cuts = torch.tensor([0, 24], dtype=torch.int32)
    with torch.no_grad():
        attend = PackedAttend(decoder.ops, "stoker", cuts, 24, "cuda")
        logits = decoder.logits(decoder(tokens, tokens, attend))
    assert logits.shape == (24, SMALL.vocab_size)
    assert bool(logits.isfinite().all())
