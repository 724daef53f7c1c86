"""The manifest of kernels that were compiled ahead of time, and which folder a process uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.model.kernels.ahead.manifest import MANIFEST, KernelsManifest, find_folder, obstacle, read_manifest

KERNELS = KernelsManifest(triton="3.6.0", architectures=(80, 90), models=("llama-3.1-8b",), num_kernels=46)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    KERNELS.write(tmp_path)
    assert read_manifest(tmp_path) == KERNELS


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "format must be 1, got None"),
        (json.dumps({"format": 2}), "format must be 1, got 2"),
        (json.dumps({"format": 1, "triton": 3}), "triton must be a str, got 3"),
        (json.dumps({"format": 1, "triton": "3.6.0"}), "architectures must be a list, got None"),
    ],
)
def test_a_wrong_manifest_is_refused_with_its_file(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=problem) as error:
        read_manifest(tmp_path)
    assert str(tmp_path / MANIFEST) in str(error.value)


def test_the_environment_names_the_folder_or_none(tmp_path: Path) -> None:
    assert find_folder({}, tmp_path) is None
    KERNELS.write(tmp_path)
    assert find_folder({}, tmp_path) == tmp_path
    assert find_folder({"STOKER_KERNELS": "off"}, tmp_path) is None
    assert find_folder({"STOKER_KERNELS": "/elsewhere"}, tmp_path) == Path("/elsewhere")


def test_kernels_of_another_triton_or_gpu_cannot_be_used() -> None:
    assert obstacle(KERNELS, "3.6.0", 90) is None
    assert obstacle(KERNELS, "3.9.0", 90) == "they were compiled by Triton 3.6.0, and 3.9.0 is installed"
    assert obstacle(KERNELS, "3.6.0", 100) == "they were compiled for sm_80, sm_90, and this GPU is sm_100"
