"""Contents of the two images, read from their Dockerfiles, which the end-to-end run builds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTENTS = {
    "control": {"model/stoker/pod", "model/stoker/checkpoint", "engine/stoker/router", "operator/stoker"},
    "runtime": {"model/stoker", "trainer/stoker", "engine/stoker/engine"},
}


@pytest.mark.parametrize("image", CONTENTS)
def test_an_image_sees_and_takes_its_own_source_roots_only(image: str) -> None:
    text = (ROOT / "images" / f"{image}.Dockerfile").read_text()
    copied = set(re.findall(r"^COPY ((?:model|trainer|engine|operator)/\S+) ", text, re.MULTILINE))
    ignore = (ROOT / "images" / f"{image}.Dockerfile.dockerignore").read_text().splitlines()
    seen = {line[1:] for line in ignore if line.startswith("!") and "/stoker" in line}
    assert copied == seen == CONTENTS[image]
    assert ignore[1] == "*"


@pytest.mark.parametrize("image", CONTENTS)
def test_an_image_is_installed_by_hash_and_runs_as_an_unprivileged_user(image: str) -> None:
    text = (ROOT / "images" / f"{image}.Dockerfile").read_text()
    assert text.count("pip install") == text.count("--require-hashes") == 1
    assert text.count(f"install-locked.sh /opt/stoker/lock/{image}.txt '.'") == 1, "everything of the lock file"
    assert "ARG PYTHON_BASE=" in text
    assert re.search(r"^USER 65532:65532$", text, re.MULTILINE)
    assert "/etc/ssl" not in text
    assert "pip.conf" not in text


def test_parts_of_a_lock_file_are_installed_by_hash_and_without_what_they_ask_for() -> None:
    text = (ROOT / "images" / "install-locked.sh").read_text()
    assert text.count("pip install") == text.count("--require-hashes") == 2
    assert text.count("--no-deps") == 1
