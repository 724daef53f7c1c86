"""`stoker serve` as a process of its own on the CPU, until it answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServedEngine:
    """A server that is ready."""

    url: str
    process: subprocess.Popen[str]
    model: Path


@contextmanager
def served_engine(model: Path, *flags: str) -> Iterator[ServedEngine]:
    """Serve the model with one thread and 60 blocks. What the process prints after its address is left to read."""
    own = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--threads", "1", "--num-blocks", "60"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.engine.serve_main", str(model), *own, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield ServedEngine(_address(process), process, model)
    finally:
        process.kill()
        process.communicate()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines: list[str] = []
    while "Talk to it" not in (line := process.stderr.readline()):
        assert line, "".join(lines)
        lines.append(line)
    found = re.search(r"http://[\d.:]+", line)
    assert found is not None
    return found.group()
