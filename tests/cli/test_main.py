"""The command: every verb explains itself, starts quickly, and passes on what its program says."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

VERBS = ["local", "train", "serve", "chat", "model", "checkpoint", "plan", "bench", "submit"]


def stoker(*words: str, code: int = 0) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "stoker.cli.main", *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


def test_help_names_every_verb() -> None:
    out = stoker("--help")
    assert [verb for verb in VERBS if f"  {verb} " not in out] == []
    assert "Example: stoker local apply -f examples/quickstart/" in out


@pytest.mark.parametrize(
    "words", [["local"], ["local", "apply"], ["local", "logs"], ["train"], ["model"], ["checkpoint"]]
)
def test_help_of_a_verb_has_an_example(words: list[str]) -> None:
    out = stoker(*words, "--help")
    assert "Example" in out
    assert "stoker " + words[0] in out


@pytest.mark.parametrize("verb", ["plan", "bench", "submit"])
def test_what_is_not_built_is_refused(verb: str) -> None:
    assert stoker(verb, "-f", "job.yaml", code=64) == f"not supported yet: stoker {verb} -f job.yaml\n"


def test_an_unknown_verb_is_a_usage_error() -> None:
    assert "No such command 'fly'" in stoker("fly", code=2)


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert version("stoker") in stoker("--version")


def test_it_starts_in_less_than_a_third_of_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(3):
        stoker("local", "get", "tj", "--state", "/nonexistent", code=1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    assert used / 3 < 0.3, f"{used / 3:.2f} s of processor time"


def test_no_verb_imports_more_than_it_needs() -> None:
    code = "import json, sys; from stoker.cli.main import stoker, VERBS; [stoker.get_command(None, v) for v in VERBS]; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout))
    assert loaded & {"torch", "numpy", "pydantic", "yaml", "httpx", "rich", "starlette", "jsonschema"} == set()


def test_a_program_brings_its_own_exit_code_and_help(tmp_path: Path) -> None:
    direct = subprocess.run(
        [sys.executable, "-m", "stoker.checkpoint", "verify", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert direct.returncode != 0
    assert stoker("checkpoint", "verify", str(tmp_path), code=direct.returncode) == direct.stdout + direct.stderr
    assert "Read every byte of FOLDER" in stoker("checkpoint", "verify", "--help")
