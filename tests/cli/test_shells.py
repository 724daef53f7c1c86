"""Completion inside real shells: the script of each is loaded, and a line is completed by the shell's own machinery."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.cli.completion import SHELLS

PROGRAM = Path(sys.executable).with_name("stoker")
BASH = """
source "$SCRIPT"
COMP_WORDS=({line}) COMP_CWORD={last}
_stoker_completion stoker
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = """
source "$SCRIPT"
complete -C '{line}'
"""
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1= ; autoload -Uz compinit; compinit -u -d "$DUMP"; source "$SCRIPT"; stty -echo; echo LOADED'
zpty -r shell text '*LOADED*LOADED*'
zpty -w -n shell '{line}'$'\\t'
zpty -w shell ' END'
zpty -r shell text '*END*'
print -r -- $text
"""
"""zsh completes only where it edits a line, so the line is typed into a terminal of its own."""
SCRIPTS = {"bash": BASH, "fish": FISH, "zsh": ZSH}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (Debian package {name})")
    return name


def completed(shell: str, words: list[str], folder: Path) -> str:
    """Type `stoker WORDS` without a space at its end, complete it, and return what the shell shows."""
    script = folder / "completion"
    source = subprocess.run([str(PROGRAM), "completion", shell], capture_output=True, check=True)
    script.write_bytes(source.stdout)
    line = " ".join(("stoker", *words))
    environment = {
        **os.environ,
        "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SCRIPT": str(script),
        "DUMP": str(folder / "dump"),
        "TERM": "dumb",
    }
    text = SCRIPTS[shell].format(line=line, last=len(words))
    plain = {"bash": ["--norc"], "fish": ["--no-config"], "zsh": ["-f"]}[shell]
    ended = subprocess.run([shell, *plain, "-c", text], env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_shell_completes_verbs_options_and_kinds(shell: str, tmp_path: Path) -> None:
    """Names of live objects take the same way, but within a time that a busy machine exceeds: `test_verbs`."""
    assert "submit" in completed(shell, ["sub"], tmp_path)
    assert "--kubeconfig" in completed(shell, ["describe", "--kubec"], tmp_path)
    assert "configmaps" in completed(shell, ["get", "conf"], tmp_path)
