"""Where flash-attn-4 keeps the kernels that it compiles."""

from __future__ import annotations

from pathlib import Path

from stoker.model.kernels.fused.attention.flash import keep_kernels

FOLDER, SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def test_kernels_are_kept_beside_tritons(tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    keep_kernels(environment)
    assert environment[FOLDER] == str(tmp_path / "flash-attn")
    assert environment[SWITCH] == "1"
    assert (tmp_path / "flash-attn").is_dir()


def test_the_environment_decides(tmp_path: Path) -> None:
    environment = {FOLDER: str(tmp_path / "own"), SWITCH: "0"}
    keep_kernels(environment)
    assert environment == {FOLDER: str(tmp_path / "own"), SWITCH: "0"}


def test_nothing_is_kept_where_the_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "file" / "triton")}
    keep_kernels(environment)
    assert SWITCH not in environment
