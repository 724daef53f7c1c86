"""Programs that build and keep images: run to their end, with an error that names the purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any


class BuildError(RuntimeError):
    """Raised if a build or an import fails; the message ends with the last lines of the output."""


def run(command: Sequence[str], *, what: str, check: bool = True, **standard_input: Any) -> str:
    """Run a program and return its standard output without the last newline.

    Args:
        command: the program and its arguments.
        what: is being made; begins the message of an error.
        check: whether a failure is an error.
        standard_input: `stdin` (a file) or `data` (bytes).

    Raises:
        BuildError: it failed and `check` is set.
    """
    return run_bytes(command, what=what, check=check, **standard_input).decode().strip()


def run_bytes(
    command: Sequence[str], *, what: str, check: bool = True, stdin: IO[bytes] | None = None, data: bytes = b""
) -> bytes:
    """Run a program as `run` does and return the output's bytes."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(
        command, stdin=stdin or subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as done:
        output, errors = done.communicate(None if stdin else data)
    if check and done.returncode:
        last = "\n".join((output + errors).decode(errors="replace").strip().splitlines()[-15:])
        raise BuildError(f"{what}: {command[0]} ended with {done.returncode}:\n{last}")
    return output


def say(line: str) -> None:
    """Print progress: a first build takes minutes."""
    print(f"images: {line}", file=sys.stderr, flush=True)
