"""Triton's cache with shipped kernels in front of the user's own."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.model.kernels.ahead.manifest import KernelsManifest

triton = pytest.importorskip("triton")

KEY, NAME = "ABC", "add_kernel.json"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """The user's cache; Triton's settings are given back."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "own")
        yield tmp_path / "own"


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A folder with one kernel, whose list names another machine's folders."""
    folder = tmp_path / "shipped"
    files = {"add_kernel.json": "{}", "add_kernel.cubin": "code"}
    (folder / KEY).mkdir(parents=True)
    for name, content in files.items():
        (folder / KEY / name).write_text(content)
    listed = {"child_paths": {name: f"/builder/{KEY}/{name}" for name in files}}
    (folder / KEY / f"__grp__{NAME}").write_text(json.dumps(listed))
    KernelsManifest(triton.__version__, (90,), ("tiny",), 1).write(folder)
    return folder


def use(folder: Path, architecture: int = 90) -> Any:
    from stoker.model.kernels.ahead.layered_cache import use_shipped_kernels

    return use_shipped_kernels({"STOKER_KERNELS": str(folder)}, architecture)


def manager(key: str, **options: bool) -> Any:
    return triton.knobs.cache.manager_class(key, **options)


def test_a_shipped_kernel_is_found_without_writing_anywhere(own: Path, shipped: Path) -> None:
    lookups = use(shipped)
    found = manager(KEY).get_group(NAME)
    assert found == {name: str(shipped / KEY / name) for name in ("add_kernel.json", "add_kernel.cubin")}
    assert (lookups.shipped, lookups.kept, lookups.compiled) == ([NAME], [], [])
    assert not own.exists()


def test_what_is_not_shipped_is_compiled_then_kept_by_the_user(
    own: Path, shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lookups = use(shipped)
    with caplog.at_level(logging.INFO, "stoker.model"):
        assert not manager("OTHER").get_group(NAME)
    assert caplog.messages == [f"{NAME} is not among the shipped kernels, so it is compiled"]
    one = manager("OTHER")
    one.put_group(NAME, {NAME: one.put("{}", NAME)})
    assert manager("OTHER").get_group(NAME) == {NAME: str(own / "OTHER" / NAME)}
    assert (lookups.shipped, lookups.kept, lookups.compiled) == ([], [NAME], [NAME])
    assert lookups.describe() == f"0 shipped, 1 of the cache, 1 compiled ({NAME})"


def test_a_shipped_kernel_that_lost_a_file_counts_as_missing(own: Path, shipped: Path) -> None:
    (shipped / KEY / "add_kernel.cubin").unlink()
    lookups = use(shipped)
    assert not manager(KEY).get_group(NAME)
    assert lookups.compiled == [NAME]


def test_the_library_of_the_driver_is_found_by_its_name_under_any_key(own: Path, shipped: Path) -> None:
    (shipped / "cuda_utils.so").write_text("library")
    use(shipped)
    assert manager("ANY").get_file("cuda_utils.so") == str(shipped / "cuda_utils.so")
    assert manager("ANY").get_file("__triton_launcher.so") is None


@pytest.mark.usefixtures("own")
def test_kernels_that_cannot_be_used_are_left_alone_and_named(shipped: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = triton.knobs.cache.manager_class
    assert use(shipped, 80) is None
    KernelsManifest("2.0.0", (90,), (), 1).write(shipped)
    assert use(shipped) is None
    assert [message.partition(" are not used: ")[2].partition(",")[0] for message in caplog.messages] == [
        "they were compiled for sm_90",
        "they were compiled by Triton 2.0.0",
    ]
    assert triton.knobs.cache.manager_class is before


@pytest.mark.usefixtures("own")
def test_a_folder_that_the_environment_names_must_have_kernels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        use(tmp_path / "absent")


def test_a_library_that_was_made_again_here_goes_before_the_shipped_one(own: Path, shipped: Path) -> None:
    (shipped / KEY / "__triton_launcher.so").write_text("cannot be loaded")
    lookups = use(shipped)
    assert manager(KEY).get_file("__triton_launcher.so") == str(shipped / KEY / "__triton_launcher.so")
    manager(KEY).put(b"library", "__triton_launcher.so")
    assert manager(KEY).get_file("__triton_launcher.so") == str(own / KEY / "__triton_launcher.so")
    assert (lookups.shipped, lookups.kept) == (["__triton_launcher.so"], ["__triton_launcher.so"])


def test_the_stand_in_of_the_driver_defines_what_starts_a_kernel() -> None:
    from stoker.model.kernels.ahead.driver_library import driver_functions

    assert {"cuInit", "cuModuleLoadData", "cuLaunchKernelEx", "cuDeviceGetAttribute"} <= driver_functions()
