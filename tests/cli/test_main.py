"""The command: every verb explains itself, starts quickly, and passes on its program's exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from stoker.checkpoint import command as checkpoint_command
from stoker.cli import programs
from stoker.model import __main__ as model_program
from testing.cli.in_process import run_in_process

VERBS = ["local", "train", "serve", "chat", "model", "checkpoint", "kernels", "plan", "plot", "bench"]
HEAVY = {"torch", "numpy", "pydantic", "yaml", "httpx", "rich", "starlette", "jsonschema"}
VERBS += ["submit", "get", "describe", "logs", "delete", "save", "suspend", "resume", "top", "completion"]


PROGRAMS = {"serve", "chat", "model", "checkpoint", "kernels", "bench"}
"""Verbs that replace their process by a program."""


def stoker(*words: str, code: int = 0) -> str:
    """Output of the command, standard error with it; in a process of its own where a verb may replace it."""
    ended, output = in_a_process(*words) if {*words[:1]} & PROGRAMS else run_in_process(*words)
    assert ended == code, output
    return output


def in_a_process(*words: str) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, "-m", "stoker.cli.main", *words], capture_output=True, text=True, check=False, timeout=300
    )
    return run.returncode, run.stdout + run.stderr


def test_help_names_every_verb() -> None:
    out = stoker("--help")
    assert [verb for verb in VERBS if f"  {verb} " not in out] == []
    assert "Example: stoker local apply -f examples/quickstart/" in out


@pytest.mark.parametrize(
    "words", [["local"], ["local", "apply"], ["local", "logs"], ["train"], ["model"], ["checkpoint"], ["bench"]]
)
def test_help_of_a_verb_has_an_example(words: list[str]) -> None:
    out = stoker(*words, "--help")
    assert "Example" in out
    assert "stoker " + words[0] in out


def test_a_process_says_what_the_command_says_in_this_one() -> None:
    for words in (["get", "--help"], ["get", "spaceships"]):
        assert in_a_process(*words) == run_in_process(*words)


def test_an_unknown_verb_is_a_usage_error() -> None:
    assert "No such command 'fly'" in stoker("fly", code=64)
    assert "No such command 'descibe'; did you mean describe?" in stoker("descibe", code=64)


@pytest.mark.parametrize(
    "words",
    [
        ["local", "get", "--no-such"],
        ["local", "apply"],
        ["local", "describe"],
        ["get", "tj/a", "-A"],
        ["delete", "tj"],
        ["delete", "tj", "a", "--all"],
        ["submit", "-f", "x", "--dry-run", "--wait"],
        ["submit"],
        ["get", "spaceships"],
        ["get", "tj", "--kubeconfig", "/nowhere"],
        ["resume"],
        ["completion", "cmd"],
        ["train"],
        ["serve"],
        ["chat", "--no-such"],
        ["model", "info", "/nowhere/at/all"],
        ["model", "fly"],
        ["checkpoint", "verify"],
        ["checkpoint", "fly"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_has_one_exit_code(words: list[str]) -> None:
    assert "rror" in stoker(*words, code=64)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e999", "soon"])
@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["local", "apply", "-f", "x", "--timeout"], "a finite number of seconds, 0 or more, is needed"),
        (["local", "delete", "tj", "a", "--timeout"], "a finite number of seconds, 0 or more, is needed"),
        (["local", "down", "--grace"], "a finite number of seconds, 0 or more, is needed"),
        (["submit", "-f", "x", "--wait", "--timeout"], "a finite number of seconds, 0 or more, is needed"),
        (["save", "a", "--wait", "--timeout"], "a finite number of seconds, 0 or more, is needed"),
        (["delete", "tj", "a", "--timeout"], "a finite number of seconds, 0 or more, is needed"),
        (["chat", "http://x", "--timeout-s"], "a number of seconds above 0 and below 1,000,000 is needed"),
        (["bench", "serve", "http://x", "--timeout-s"], "a number above 0 is needed"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_time_is_finite_seconds(words: list[str], needed: str, seconds: str) -> None:
    assert f"{words[-1]}" in (out := stoker(*words, seconds, code=64))
    assert needed in out
    assert f"got {seconds}" in out.replace("'", "")


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["local", "apply", "-f", "x", "--detach"], "leave out --detach, or give --wait as well"),
        (["local", "delete", "tj", "a", "--no-wait"], "leave out --no-wait and --dry-run"),
        (["delete", "tj", "a", "--dry-run"], "leave out --no-wait and --dry-run"),
        (["submit", "-f", "x", "--follow"], "--timeout belongs to --wait"),
        (["save", "a"], "--timeout belongs to --wait"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_longest_wait_without_a_wait_is_refused(words: list[str], needed: str) -> None:
    assert needed in stoker(*words, "--timeout", "5", code=64)


@pytest.mark.parametrize(
    "words",
    [
        [],
        *([verb] for verb in VERBS),
        *(["local", verb] for verb in ("apply", "get", "describe", "logs", "delete", "down", "status")),
        *(["checkpoint", verb] for verb in ("list", "verify", "show", "diff", "export")),
        *(["model", verb] for verb in ("convert", "info")),
        ["bench", "serve"],
    ],
    ids=" ".join,
)
def test_every_verb_has_a_short_and_a_long_help(words: list[str]) -> None:
    short, long = stoker(*words, "-h"), stoker(*words, "--help")
    assert short == long
    assert "sage: " in long


def test_the_list_of_no_folder_is_an_error(tmp_path: Path) -> None:
    assert stoker("checkpoint", "list", str(tmp_path / "gone"), code=67) == f"error: {tmp_path}/gone does not exist\n"
    (tmp_path / "file").write_text("")
    assert "file is not a folder" in stoker("checkpoint", "list", str(tmp_path / "file"), code=67)
    assert stoker("checkpoint", "list", str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("verbs", "program"),
    [(programs.checkpoint, checkpoint_command.program), (programs.model, model_program.main)],
    ids=["checkpoint", "model"],
)
def test_every_command_of_a_program_is_a_verb(verbs: click.Group, program: click.Group) -> None:
    assert {*verbs.commands} == {*program.commands} - {"task"}, "task is for pods"


@pytest.mark.parametrize("module", ["stoker.cli.chat", "stoker.cli.load.main"])
def test_a_client_of_a_server_needs_no_torch(module: str) -> None:
    code = f"import json, sys; import {module}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout))
    assert [name for name in loaded if name.split(".")[0] in ("torch", "numpy")] == []
    assert [name for name in loaded if name.startswith(("stoker.engine", "stoker.model", "stoker.operator"))] == []


def test_the_plugin_of_kubectl_is_the_same_command_under_its_own_name() -> None:
    code = "from stoker.cli.main import kubectl_main; kubectl_main()"
    run = subprocess.run([sys.executable, "-c", code, "get", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: kubectl stoker get" in run.stdout
    assert run.stdout.replace("kubectl stoker", "stoker") == stoker("get", "--help")


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert version("stoker") in stoker("--version")


def test_a_list_loads_few_modules() -> None:
    """A start takes a third of a second for 260 modules, nearly all of it imports; the heavy libraries take seconds."""
    code = (
        "import atexit, json, sys; atexit.register(lambda: print(json.dumps(sorted(sys.modules))));"
        "from stoker.cli.main import stoker; stoker(['local', 'get', 'tj', '--state', '/nonexistent'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    loaded = json.loads(run.stdout)
    assert "no supervisor runs" in run.stderr
    assert "stoker.cli.local" in loaded
    assert len(loaded) < 320, loaded
    assert {*loaded} & HEAVY == set()


def test_no_verb_imports_more_than_it_needs() -> None:
    code = (
        "import json, sys; from stoker.cli.main import stoker, VERBS;"
        "[stoker.get_command(None, v) for v in VERBS]; print(json.dumps(sorted(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout))
    assert loaded & HEAVY == set()


def test_a_program_brings_its_own_exit_code_and_help(tmp_path: Path) -> None:
    direct = subprocess.run(
        [sys.executable, "-m", "stoker.checkpoint", "verify", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert direct.returncode != 0
    assert stoker("checkpoint", "verify", str(tmp_path), code=direct.returncode) == direct.stdout + direct.stderr
    assert "Verify the checkpoint FOLDER." in stoker("checkpoint", "verify", "--help")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["stoker.cli.main", "completion", "bash"], "stoker"),
        (["stoker.cli.main", "checkpoint", "list", "--help"], "stoker checkpoint"),
        (["stoker.cli.main", "chat", "--help"], "stoker chat"),
        (["stoker.gateway", "--help"], "python -m stoker.gateway"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_program_whose_output_is_on_a_full_disk_says_so_in_one_line(words: list[str], name: str) -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-m", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300
        )
    assert (run.returncode, run.stderr) == (68, f"{name}: standard output: No space left on device\n")


LONG = "x" * 300
"""A name that no file system takes: it cannot be looked up, as a file in a folder that may not be read."""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plot", LONG], 64),
        (["plan", "-f", LONG], 64),
        (["train", "-f", LONG], 64),
        (["local", "apply", "-f", LONG], 64),
        (["get", "tj", "--kubeconfig", LONG], 64),
        (["checkpoint", "list", LONG], 68),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_path_that_cannot_be_looked_up_is_told_in_one_line(words: list[str], code: int) -> None:
    output = stoker(*words, code=code)
    assert output.count("\n") == 1
    assert "File name too long" in output
    assert "--storage" not in output
