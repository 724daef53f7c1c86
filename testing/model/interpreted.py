"""Checks of Triton kernels in child processes that interpret them on CPU tensors.

Triton decides at import whether to interpret.

A check is a function at the top of its file that raises where a kernel is wrong; its arguments can be pickled.
"""

from __future__ import annotations

import importlib
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]


WORKERS = 2
"""Processes that check at a time, forked by the child after its imports; each computes with one thread."""

Call = tuple[Callable[..., None], tuple[Any, ...]]
Named = tuple[str, str, tuple[Any, ...]]
"""File and name of a check, and its arguments."""


def run(calls: Iterable[Call], timeout_s: float = 840) -> None:
    """Run every call `(check, arguments)` in a child process and its workers.

    Raises AssertionError with the traces of those that failed.
    """
    named = [(inspect.getfile(check), check.__name__, arguments) for check, arguments in calls]
    returncode, output = run_child(named, timeout_s)
    assert returncode == 0, output.decode()[-16000:]


def run_child(named: list[Named], timeout_s: float) -> tuple[int, bytes]:
    """Return the child's status and what it and its workers wrote; none of them outlives a call that takes too long."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-W", "ignore", str(Path(__file__))]
    with subprocess.Popen(
        command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, env=environment, cwd=ROOT, start_new_session=True
    ) as child:
        try:
            output, _ = child.communicate(pickle.dumps(named), timeout_s)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return child.returncode, output


def load(path: str) -> ModuleType:
    """Import the module of a file below the root by its dotted name, by which processes that it spawns find it, too."""
    return importlib.import_module(".".join(Path(path).relative_to(ROOT).with_suffix("").parts))


def main() -> int:
    """Run the checks in the child's workers; return 1 if one failed."""
    named: list[Named] = pickle.loads(sys.stdin.buffer.read())
    for path in {path for path, _, _ in named}:
        load(path)
    replace_language_once()
    describe_types_once()
    leave_out_unread_checks()
    shares = [named[first::WORKERS] for first in range(min(WORKERS, len(named)))]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("fork")) as workers:
        traces = [trace for share in workers.map(check_all, shares) for trace in share]
    print(*traces, sep="\n")
    return int(len(traces) > 0)


def check_all(named: list[Named]) -> list[str]:
    """Return the traces of the checks that failed."""
    traces = []
    for path, name, arguments in named:
        try:
            getattr(load(path), name)(*arguments)
        except Exception:  # noqa: BLE001  the parent reports whatever it was
            traces.append(f"{name}{arguments}\n{traceback.format_exc()}")
    return traces


def replace_language_once() -> None:
    """Keep the interpreted operations in Triton's language after they were put there.

    Triton puts them there anew, and looks through all names of its language, before each launch and each call of a
    device function: a fifth to a third of all time.
    """
    from triton import language
    from triton.runtime import interpreter

    plain, replaced = interpreter._patch_lang, set[int]()

    def replace_missing(function: Any) -> Any:
        used = {id(value) for value in function.__globals__.values() if value is language or value is language.core}
        if not used <= replaced:
            plain(function)
            replaced.update(used)
        return interpreter._LangPatchScope()  # of no changes to take back

    interpreter._patch_lang = replace_missing


def describe_types_once() -> None:
    """Keep what the interpreter asks of a type: its form in NumPy, and the shape and size of its tensors.

    It derives them anew for each value that a kernel computes: a fifth of all time. Equal types have equal names.
    """
    from triton.language import core
    from triton.runtime import interpreter

    plain, forms = interpreter._get_np_dtype, dict[str, Any]()
    parts = dict[str, tuple[Any, Any]]()

    def form_of(kind: Any) -> Any:
        if (form := forms.get(kind.name)) is None:
            form = forms[kind.name] = plain(kind)
        return form

    def make_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  Triton names it so
        if (known := parts.get(type.name)) is None:
            shape = type.shape if type.is_block() else ()
            numbers = core.tuple([core.constexpr(size) for size in shape])
            known = parts[type.name] = core.constexpr(math.prod(shape)), numbers
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known

    interpreter._get_np_dtype = form_of
    core.tensor.__init__ = make_tensor


def leave_out_unread_checks() -> None:
    """Compute no test for overflow: the interpreter derives one from each sum and product of integers, and as it has
    no debug mode, nothing reads it. A third of all time.
    """
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


if __name__ == "__main__":
    sys.exit(main())
