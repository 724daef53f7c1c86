"""Verbs that are programs of their own, where a part of the distribution is absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.cli.programs import missing_part, program_environment


def test_a_whole_installation_misses_nothing() -> None:
    assert missing_part("stoker.engine.serve_main") == ""
    assert missing_part("stoker.checkpoint") == ""


@pytest.mark.parametrize(
    ("module", "absent", "cure"),
    [
        ("stoker.engine.serve_main", "stoker.engine", "stoker[engine]"),
        ("stoker.trainer", "torch", "stoker[trainer]"),
        ("stoker.checkpoint", "stoker.checkpoint", "whole distribution"),
    ],
)
def test_what_is_absent_is_named_with_its_cure(module: str, absent: str, cure: str) -> None:
    message = missing_part(module, lambda name: None if name == absent else object())
    assert f"has no {absent}" in message
    assert cure in message


def test_a_file_of_the_working_folder_stands_for_no_module_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the module of the working folder')")
    command = [sys.executable, "-P", "-m", "stoker.cli.main", "checkpoint", "list", str(tmp_path)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_a_program_gets_the_variables_of_its_starter_which_keeps_its_own() -> None:
    given = {"HOME": "/home/me"}
    assert program_environment(given) == {"HOME": "/home/me", "PYTHONSAFEPATH": "1"}
    assert given == {"HOME": "/home/me"}
    assert program_environment({"PYTHONSAFEPATH": ""}) == {"PYTHONSAFEPATH": ""}, "who sets it decides"
