"""The same loop on one GPU: against the CPU, repeated bitwise, stopped and resumed.

Several GPUs: `test_several_ranks.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.checkpoint.store import CheckpointRoot
from stoker.trainer.protocol.messages import SaveEvent, StepEvent, StopCommand
from stoker.trainer.rank.build import RankContext
from testing.trainer.tiny_run import SMALL, RecordingChannel, alone, tiny_config, train

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "plain": {"training__deterministic": "Off", "attention": "cudnn"},
    "same layout": {"training__deterministic": "SameLayout"},
    "any": {},
    "recompute": {"memory__activation_checkpointing": "full"},
    "stage 2": {"memory__zero_stage": 2, "training__deterministic": "SameLayout"},
    "reference": {"kernels": "reference", "attention": "auto", "memory__precision": "fp32"},
}


def losses(context: RankContext) -> list[tuple[float, float]]:
    assert isinstance(context.channel, RecordingChannel)
    return [(event.loss, event.grad_norm) for event in context.channel.all(StepEvent)]


def train_case(context: RankContext, folder: Path | str, changes: dict[str, Any]) -> list[tuple[float, float]]:
    kernels = "fused" if context.device.type == "cuda" else "reference"
    attention = "stoker" if kernels == "fused" else "auto"  # not flash, whose import warns of itself
    defaults = {"memory__precision": "bf16", "kernels": kernels, "attention": attention}
    train(tiny_config(folder, **{**defaults, **changes}), context, SMALL)
    return losses(context)


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
    stopped.channel.put(StopCommand(mode="suspend"))
    first = train_case(stopped, tmp_path / "parts", {})
    assert first + train_case(alone("cuda"), tmp_path / "parts", {}) == whole


@needs_a_gpu
def test_a_save_in_flight_holds_the_state_of_its_own_step(tmp_path: Path) -> None:
    """Training continues while the state is copied.

    Each checkpoint reads back, and a run that resumes from one repeats the rest bitwise.
    """
    context = alone("cuda")
    whole = train_case(context, tmp_path, {"checkpoint__interval_steps": 1})
    assert isinstance(context.channel, RecordingChannel)
    assert len([event for event in context.channel.all(SaveEvent) if event.verified]) == 6
    for found in CheckpointRoot(tmp_path / "root").committed()[:3]:  # the newest ones, steps 6, 5 and 4
        shutil.rmtree(found.path)
    assert train_case(alone("cuda"), tmp_path, {}) == whole[3:]
