"""The release before this one, taken out of the repository's own history."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.images.recipe import CONTROL, RUNTIME, Recipe

ROOT = Path(__file__).parents[2]
PREVIOUS = "fa5110bf61687bc429c33a018ca83a9febfba718"
"""The commit whose charts, definitions and programs an upgrade starts from: before pools for prefill and decode, model
sources and the chart's model cache. A new release puts its predecessor's commit here."""
PARTS = ("charts", "model", "trainer", "engine", "operator", "pyproject.toml", "README.md", "LICENSE")
TAG = "e2e-previous"
"""Of the images with the previous release's programs."""


def is_known() -> bool:
    """Whether this checkout has the history that an upgrade needs."""
    return _git("cat-file", "-e", f"{PREVIOUS}^{{commit}}").returncode == 0


def skip_without_history() -> None:
    """Skip the test that asks, and say why."""
    if not is_known():
        pytest.skip(f"this checkout has no commit {PREVIOUS}: an upgrade needs the repository's history")


def checkout(folder: Path) -> Path:
    """Write the previous release's charts and sources into `folder` and return it.

    A checkout without history cannot show an upgrade: the test is skipped and says so.
    """
    skip_without_history()
    folder.mkdir(parents=True)
    archive = _git("archive", PREVIOUS, *PARTS)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def recipes(folder: Path) -> tuple[Recipe, ...]:
    """Return the previous release's images, built of a checkout in `folder`; none without history.

    Their programs are the previous release's. The layers below them, with the locked dependencies, are this one's: a
    release adds some and takes none away, and a second PyTorch in the store would cost gigabytes.
    """
    if not is_known():
        return ()
    place = checkout(folder)
    for shared in ("lock", "images"):
        shutil.copytree(ROOT / shared, place / shared)
    return tuple(
        replace(recipe, name=f"{recipe.name.rpartition(':')[0]}:{TAG}", context=place) for recipe in (CONTROL, RUNTIME)
    )


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
