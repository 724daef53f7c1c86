"""The release before this one, taken out of the repository's own history."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREVIOUS = "fa5110bf61687bc429c33a018ca83a9febfba718"
"""The commit whose charts, definitions and programs an upgrade starts from: before pools for prefill and decode, model
sources and the chart's model cache. A new release puts its predecessor's commit here."""
PARTS = ("charts", "model", "trainer", "engine", "operator")


def checkout(folder: Path) -> Path:
    """Write the previous release's charts and sources into `folder` and return it.

    A checkout without history cannot show an upgrade: the test is skipped and says so.
    """
    if _git("cat-file", "-e", f"{PREVIOUS}^{{commit}}").returncode:
        pytest.skip(f"this checkout has no commit {PREVIOUS}: an upgrade needs the repository's history")
    folder.mkdir(parents=True)
    archive = _git("archive", PREVIOUS, *PARTS)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
