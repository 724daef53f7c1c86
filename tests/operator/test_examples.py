"""The examples: each head lists the fields that this version refuses, examples/README.md those that run today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.operator.admission.admission import Admission
from stoker.operator.domain.unsupported import unsupported

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PATHS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.yaml"))
FOLDERS = sorted({Path(path).parent.name for path in PATHS})
STALLS = "# Today it stalls with the condition Stalled, reason NotSupported:"
"""Line of a head above the messages."""


@pytest.fixture(scope="module")
def admission() -> Admission:
    return Admission.from_folder(ROOT / "crds")


def manifests(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / path).read_text(encoding="utf-8")))


def refused(admission: Admission, path: str) -> list[str]:
    """Return the refusals of every object in the file, in the operator's words."""
    ours = [admission.admit(found) for found in manifests(path) if found["kind"] in admission.kinds]
    return [line for found in ours for line in unsupported(found["kind"], found["spec"])]


def told(path: str) -> list[str]:
    """Return the messages in the file's head."""
    head = re.match(r"(?:#.*\n)*", (EXAMPLES / path).read_text(encoding="utf-8"))
    assert head is not None
    _, begin, messages = head.group().partition(f"{STALLS}\n")
    return [line.removeprefix("#   ") for line in messages.splitlines()] if begin else []


@pytest.mark.parametrize("path", PATHS)
def test_the_head_of_an_example_has_what_is_refused(admission: Admission, path: str) -> None:
    assert told(path) == refused(admission, path)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_readme_says_which_examples_run(admission: Admission, folder: str) -> None:
    stalls = any(refused(admission, path) for path in PATHS if path.startswith(f"{folder}/"))
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| \[`{folder}`\]\({folder}\) \|.*\| (.*) \|$", text, flags=re.MULTILINE)
    assert row == ("stalls" if stalls else "runs")
