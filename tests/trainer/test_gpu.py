"""The same loop on GPUs: one against the CPU, two over NCCL against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.trainer.beacon import StepEvent, StopCommand
from tests.trainer.gloo_world import run_ranks
from tests.trainer.tiny_run import RecordingBeacon, Team, alone, team_of, tiny_config, train

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "plain": {"training__deterministic": "Off"},
    "any": {},
    "bf16": {"memory__precision": "bf16"},
    "stage 0": {"memory__zero_stage": 0},
}


def losses(team: Team) -> list[float]:
    assert isinstance(team.beacon, RecordingBeacon)
    return [event.loss for event in team.beacon.all(StepEvent)]


def train_case(team: Team, folder: Path | str, changes: dict[str, Any]) -> list[float]:
    train(tiny_config(folder, **changes), team)
    return losses(team)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["plain", "any"])
def test_one_gpu_agrees_with_the_cpu(tmp_path: Path, case: str) -> None:
    on_gpu = train_case(alone("cuda"), tmp_path / "gpu", CASES[case])
    np.testing.assert_allclose(on_gpu, train_case(alone(), tmp_path / "cpu", CASES[case]), rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_resumes_on_the_gpu_bitwise(tmp_path: Path) -> None:
    whole = train_case(alone("cuda"), tmp_path / "whole", {})
    stopped = alone("cuda")
    stopped.beacon.put(StopCommand(mode="suspend"))
    first = train_case(stopped, tmp_path / "parts", {})
    assert first + train_case(alone("cuda"), tmp_path / "parts", {}) == whole


def train_cases(rank: int, size: int, folder: str) -> dict[str, list[float]]:
    found = {}
    for name, changes in CASES.items():
        team = team_of(range(size), f"cuda:{rank}")
        assert team is not None
        found[name] = train_case(team, f"{folder}/{name}", changes)
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_agree_with_one_and_bitwise_in_the_mode_for_it(tmp_path: Path) -> None:
    answers = run_ranks(train_cases, 2, str(tmp_path), backend="nccl")
    assert answers[0] == answers[1]
    for name, changes in CASES.items():
        one = train_case(alone("cuda"), tmp_path / f"{name} alone", changes)
        if name == "plain":
            np.testing.assert_allclose(answers[0][name], one, rtol=1e-5)
        else:
            assert answers[0][name] == one, name
