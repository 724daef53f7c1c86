"""Kernels compiled ahead of time are those that engines launch, whatever the sizes of the server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stoker.engine.kernels_main import main
from stoker.model.kernels.ahead.manifest import KernelsManifest
from testing.engine.launched_kernels import SERVERS, in_a_process

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton's driver needs a C compiler")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process has found out about the kernels of a tiny model."""
    return in_a_process(tmp_path_factory.mktemp("kernels"))


def test_every_launch_of_a_start_and_of_servers_of_other_sizes_is_shipped(facts: Any) -> None:
    assert facts["missing"] == {name: [] for name in ("the start", *SERVERS)}
    assert facts["start"] >= 30
    assert facts["of smaller blocks"] > 0  # other kernels would be found


@pytest.mark.parametrize(
    "kernel",
    ["attention_kernel", "attention_decode_kernel", "rotation_kernel", "pass_inputs_kernel", "finish_rows_kernel",
     "draw_kernel", "select_kernel", "penalise_kernel", "log_softmax_kernel", "sum_kernel", "cell_kernel"],
)  # fmt: skip
def test_kernels_of_every_part_of_a_step_are_shipped(facts: Any, kernel: str) -> None:
    assert kernel in facts["shipped"]


@needs_compiler
def test_a_shipped_kernel_is_found_by_a_later_process_that_writes_nothing(facts: Any) -> None:
    assert facts["built"] == ["forward_kernel"]
    shipped, kept, compiled = facts["found"]
    assert "forward_kernel.json" in shipped
    assert (kept, compiled, facts["written"]) == ([], [], False)


@needs_compiler
def test_a_kernel_that_is_not_shipped_is_compiled_and_named(facts: Any) -> None:
    assert "forward_kernel.json" in facts["other"][2]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


def test_the_kernels_of_an_installation_are_described(tmp_path: Path) -> None:
    KernelsManifest("3.6.0", (80, 90), ("llama-3.1-8b", "qwen3-8b"), 46).write(tmp_path)
    done = invoke("show", "--folder", str(tmp_path))
    assert "46 kernels" in done.output
    assert "for sm_80, sm_90: llama-3.1-8b, qwen3-8b" in done.output
    facts = json.loads(invoke("show", "--folder", str(tmp_path), "--json").output)
    assert facts["folder"] == str(tmp_path)
    assert facts["architectures"] == [80, 90]


def test_a_folder_without_kernels_cannot_be_described(tmp_path: Path) -> None:
    done = invoke("show", "--folder", str(tmp_path))
    assert done.exit_code == 1
    assert f"{tmp_path / 'kernels.json'}: cannot be read" in done.output


def test_an_unknown_model_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    done = invoke("build", "--folder", str(tmp_path), "--model", "gpt-9")
    assert done.exit_code == 2
    assert "'gpt-9' is neither a folder with config.json nor one of llama-3.2-1b," in done.output


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    done = invoke("build", "--folder", str(tmp_path), "--architecture", "70")
    assert done.exit_code == 2
    assert "'90'" in done.output


def test_kernels_of_another_triton_are_not_mixed_in(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    KernelsManifest("2.0.0", (90,), ("llama-3.1-8b",), 46).write(tmp_path)
    done = invoke("build", "--folder", str(tmp_path), "--model", "llama-3.1-8b")
    assert done.exit_code == 1
    assert "has kernels of Triton 2.0.0, and" in done.output
    assert "remove it or name another" in done.output
