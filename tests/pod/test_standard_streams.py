"""Programs whose standard output or error cannot be written end with one line and a code."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import stoker.pod.command_line

FULL = "/dev/full"
ROOT = Path(stoker.pod.command_line.__file__).parents[3]
INNER = {
    "stoker.engine.core.main", "stoker.engine.worker_main", "stoker.engine.fronts.front_program",
    "stoker.model.render_child", "stoker.operator.cluster.local.shim", "stoker.trainer.agent.die_with_parent",
    "stoker.trainer.rank.__main__",
}  # fmt: skip
"""Programs that only other programs start; their output is a pipe, or goes into a log of the supervisor."""
FOR_CONTRIBUTORS = {f"stoker.operator.api.{name}" for name in ("crd", "not_yet", "reference")}


@pytest.fixture
def full() -> Iterator[int]:
    descriptor = os.open(FULL, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def run(body: str, *options: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    """Run a program with this `main`."""
    lines = [
        "import sys", "from stoker.pod.command_line import run_program", "def main():",
        *(f" {line}" for line in body.splitlines()), "run_program(main, 'tool')",
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    command = [sys.executable, *options, "-c", "\n".join(lines)]
    return subprocess.run(command, text=True, check=False, timeout=300, **pipes)


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "body",
    [
        "print('a line')",
        "print('x' * 100_000)",
        "print('a line', flush=True)",
        "sys.stdout.buffer.write(b'bytes')",
        "try: print('a line', flush=True)\nexcept OSError: sys.exit(3)",
        "print('a line')\nsys.exit(3)",
    ],
)
def test_a_full_disk_behind_the_output_is_told_in_one_line(body: str, options: Sequence[str], full: int) -> None:
    found = run(body, *options, stdout=full)
    assert (found.returncode, found.stderr) == (68, "tool: standard output: No space left on device\n")


@pytest.mark.parametrize("body", ["print('a line')", "print('x' * 100_000)", "print('a line', flush=True)"])
def test_a_reader_that_has_left_ends_a_program_quietly(body: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    found = run(body, stdout=writing)
    os.close(writing)
    assert (found.returncode, found.stderr) == (1, "")


def test_a_full_disk_behind_the_errors_leaves_their_code(full: int) -> None:
    body = "print('ä line')\nsys.stderr.write('an error\\n')\nreturn 64"
    found = run(body, stderr=full)
    assert (found.returncode, found.stdout) == (64, "ä line\n")


def test_a_program_without_standard_streams_has_its_code() -> None:
    """As below a parent that has closed them."""
    closing = "import os, sys; os.close(1); os.close(2); os.execv(sys.executable, sys.argv[1:])"
    program = "from stoker.pod.command_line import run_program; run_program(lambda: 5, 'tool')"
    command = [sys.executable, "-c", closing, sys.executable, "-c", program]
    assert subprocess.run(command, check=False, timeout=300).returncode == 5


def test_every_program_that_people_start_reports_lost_output() -> None:
    found = {name: main for name, main in programs() if name not in INNER | FOR_CONTRIBUTORS}
    assert len(found) > 12
    assert [name for name, main in found.items() if not {"run_program", "run_click", "main"} & called(main)] == []
    indirect = {name for name, main in found.items() if not {"run_program", "run_click"} & called(main)}
    assert indirect == {"stoker.cli.main", "stoker.checkpoint.__main__"}, "their `main` ends in run_click"


def programs() -> Iterator[tuple[str, ast.If]]:
    """Every module that is a program, and what it does then."""
    for top in ("model", "trainer", "engine", "operator"):
        for file in (ROOT / top).rglob("*.py"):
            text = file.read_text()
            for node in ast.parse(text).body if "__main__" in text else ():
                if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                    yield ".".join(file.relative_to(ROOT / top).with_suffix("").parts), node


def called(node: ast.AST) -> set[str]:
    return {call.func.id for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
