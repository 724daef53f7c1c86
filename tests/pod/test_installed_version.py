"""The version that programs show and compare."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from stoker.pod.installed_version import installed_version


def test_the_version_is_that_of_the_distribution() -> None:
    assert installed_version() == version("stoker")


def test_sources_without_an_installation_say_so() -> None:
    program = "from stoker.pod.installed_version import installed_version; print(installed_version())"
    root = Path(__file__).parents[2] / "model"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(root)!r}); {program}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "source"
