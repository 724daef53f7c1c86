"""Checks of Triton kernels in child processes that interpret them on CPU tensors.

Triton decides at import whether to interpret.

A check is a function at the top of its file that raises where a kernel is wrong; its arguments can be pickled.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


CHILDREN = 2
"""Child processes at a time; each computes with one thread."""


def run(calls: Iterable[tuple[Callable[..., None], tuple[Any, ...]]], timeout_s: float = 840) -> None:
    """Run every call `(check, arguments)` in a pool of child processes.

    Raises AssertionError with the traces of those that failed.
    """
    named = [(inspect.getfile(check), check.__name__, arguments) for check, arguments in calls]
    shares = [named[first::CHILDREN] for first in range(min(CHILDREN, len(named)))]
    with ThreadPoolExecutor(CHILDREN) as pool:
        children = list(pool.map(lambda share: run_child(share, timeout_s), shares))
    failed = [child for child in children if child.returncode]
    assert not failed, "".join(child.stdout.decode()[-8000:] + child.stderr.decode()[-8000:] for child in failed)


def run_child(named: list[tuple[str, str, tuple[Any, ...]]], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__))],
        input=pickle.dumps(named),
        capture_output=True,
        env=environment,
        timeout=timeout_s,
        cwd=ROOT,
        check=False,
    )


def load(path: str) -> ModuleType:
    """Import the module of a file below the root by its dotted name, by which processes that it spawns find it, too."""
    return importlib.import_module(".".join(Path(path).relative_to(ROOT).with_suffix("").parts))


def main() -> int:
    """Run the checks of one child; return 1 if one failed."""
    named = pickle.loads(sys.stdin.buffer.read())
    modules = {path: load(path) for path in {path for path, _, _ in named}}
    failed = 0
    for path, name, arguments in named:
        try:
            getattr(modules[path], name)(*arguments)
        except Exception:  # noqa: BLE001  the parent reports whatever it was
            failed += 1
            print(f"{name}{arguments}", traceback.format_exc(), sep="\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
