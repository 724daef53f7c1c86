"""Kernels compiled ahead of time are those that training runs launch, in every layout."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from stoker.model.kernels.ahead.layered_cache import KernelLookups
from stoker.trainer.kernels_main import main
from stoker.trainer.rank.compile_clock import CompileClock

pytest.importorskip("triton")
SUMS_OF_FEW_ROWS = {"product_kernel"}
"""Compiled for the chance that a router gives a rank few rows; the runs here give all rows to one rank."""


@pytest.fixture(scope="module")
def facts() -> Any:
    """What one process has found out about the kernels of tiny models."""
    from testing.trainer.launched_kernels import in_a_process

    return in_a_process()


def test_a_whole_run_in_any_layout_launches_the_kernels_of_its_list_and_no_others(facts: Any) -> None:
    for name, found in facts["layouts"].items():
        more = {kernel.rpartition(".")[2] for kernel, _ in found["more"]}
        assert (name, found["missing"], more - SUMS_OF_FEW_ROWS) == (name, [], set())
        assert not more or name == "experts on ranks"
    assert len(facts["layouts"]) == 13


def test_data_parallel_runs_of_any_size_find_the_kernels_of_the_models_name(facts: Any) -> None:
    assert {name: found for name, found in facts["missing"].items() if found} == {}
    assert len(facts["missing"]) == 9
    assert facts["of tensor"] > 0  # another layout has others, and they would be found


@pytest.mark.parametrize(
    "kernel",
    ["attention_kernel", "attention_key_grad_kernel", "rotation_kernel", "backward_kernel", "softmax_kernel",
     "adam_kernel", "_sum_lines", "_sum_rows", "cast_kernel", "weight_gradient_kernel"],
)  # fmt: skip
def test_kernels_of_every_part_of_a_step_are_listed(facts: Any, kernel: str) -> None:
    assert kernel in facts["kernels"]


CONFIG: dict[str, Any] = {
    "job": {"name": "tiny", "uid": "u", "writer": "0a1b2c3d"},
    "termination_log": "unused",
    "work_dir": "unused",
    "model": {"architecture": "llama"},
    "training": {"total_steps": 1},
    "data": {"sources": [{"name": "none", "path": "none"}]},
    "checkpoint": {"root": "unused"},
}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "allowed: a trainer's configuration, a folder with config.json, or one of llama-3.2-1b"),
        (CONFIG | {"steps": 3}, "unknown key steps"),
        (CONFIG, "model: "),
        (CONFIG | {"gang": {"ranks_per_node": 3}, "parallelism": {"tensor": 2}}, "does not divide the 3 ranks"),
    ],
)
def test_a_run_that_is_none_is_refused_with_its_field(tmp_path: Path, content: Any, problem: str) -> None:
    file = tmp_path / "trainer.json"
    if content is not None:
        file.write_text(json.dumps(content))
    done = CliRunner().invoke(
        main, ["compile-one", "--run", str(file), "--architecture", "90", "--folder", str(tmp_path / "kernels")]
    )
    assert done.exit_code == 2
    assert problem in " ".join(done.output.replace("│", " ").split())


def test_the_first_step_names_the_kernels_that_it_compiled(caplog: pytest.LogCaptureFixture) -> None:
    lookups = KernelLookups(shipped=["a.json", "b.json"])
    clock = CompileClock(torch.device("cpu"), lookups)
    with caplog.at_level(logging.WARNING, "stoker.trainer"):
        assert clock.end_first_step() == 0
        assert caplog.messages == []
        lookups.compiled.append("c.json")
        clock.end_first_step()
    assert caplog.messages == ["kernels of the first step: 2 shipped, 0 of the cache, 1 compiled (c.json)"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu_finds_every_kernel(tmp_path: Path) -> None:
    """Compile for this GPU, then train in a process whose own cache is empty."""
    major, minor = torch.cuda.get_device_capability()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"STOKER_KERNELS": str(tmp_path / "kernels"), "TRITON_CACHE_DIR": str(tmp_path / "own")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "testing.trainer.shipped_run", str(tmp_path), str(10 * major + minor)],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compiled"] == []
    assert found["kept"] == []
    assert len(found["shipped"]) >= 15
