"""Checks of Triton kernels in processes that interpret them on CPU tensors.

Triton decides at import whether to interpret.

A check is a function at the top of its file that raises where a kernel is wrong; its arguments can be pickled.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import math
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any, NoReturn

from stoker.pod.collection import imports

ROOT = Path(__file__).parents[2]


WORKERS = 2
"""Processes that check at a time, forked after the imports; each computes with one thread."""
PRELOADED = ("torch", "triton", "stoker.model.decoder", "stoker.model.kernels.fused.kernels")
"""What the server imports once for all processes that it forks."""

COLLECTED_AFTER = 20_000
"""Objects between two collections; an interpreted kernel makes and frees far more than the usual 700 at a time."""

Call = tuple[Callable[..., None], tuple[Any, ...]]
Named = tuple[str, str, tuple[Any, ...]]
"""File and name of a check, and its arguments."""


class Interpreted:
    """Runs checks in processes that interpret kernels, forked from one that has imported torch and Triton."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, calls: Iterable[Call], timeout_s: float = 840) -> None:
        """Run every call `(check, arguments)` in a process of its own and its workers.

        Raises AssertionError with the traces of those that failed.
        """
        named = [(inspect.getfile(check), check.__name__, arguments) for check, arguments in calls]
        with NamedTemporaryFile() as output:
            returncode = self._check(named, output.name, timeout_s)
            assert returncode == 0, output.read().decode()[-16000:]

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.kill()
            self._server.wait()
            assert self._server.stdout is not None
            self._server.stdout.close()
            self._server = None

    def _check(self, named: list[Named], output: str, timeout_s: float) -> int:
        """Return the status of the process that checks; it does not outlive a call that takes too long."""
        server = self._server = self._server or start_server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(pickle.dumps((named, output)))
        group = int(server.stdout.readline())
        try:
            if not select.select([server.stdout], [], [], timeout_s)[0]:
                raise TimeoutError(f"no end within {timeout_s:g} s: {Path(output).read_text()[-4000:]}")
            return int(server.stdout.readline())
        except BaseException:
            os.killpg(group, signal.SIGKILL)
            self.close()
            raise


def start_server() -> subprocess.Popen[bytes]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-W", "ignore", str(Path(__file__))]
    # No buffers: `select` would not see a status that was read together with the group before it.
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=environment, cwd=ROOT, bufsize=0)


def load(path: str) -> ModuleType:
    """Import the module of a file below the root by its dotted name, by which processes that it spawns find it, too."""
    return importlib.import_module(".".join(Path(path).relative_to(ROOT).with_suffix("").parts))


def main() -> None:
    """Fork a process for each request on standard input; answer with its group and, at its end, its status."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with imports():
        for module in PRELOADED:
            importlib.import_module(module)
    gc.set_threshold(COLLECTED_AFTER, 20, 20)
    replace_language_once()
    describe_types_once()
    leave_out_unread_checks()
    while True:
        try:
            named, output = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        child = os.fork() or answer_and_check(named, output, answers)
        _, status = os.waitpid(child, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))


def answer_and_check(named: list[Named], output: str, answers: int) -> NoReturn:
    """Lead a group of processes that write to `output`, and end with the status of the checks."""
    os.setsid()
    os.write(answers, b"%d\n" % os.getpid())
    os.close(answers)
    with Path(output).open("wb") as file, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = 1
    try:
        status = check_in_workers(named)
    except BaseException:  # noqa: BLE001  a forked process must not return into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def check_in_workers(named: list[Named]) -> int:
    """Run the checks in workers; return 1 if one failed."""
    for path in {path for path, _, _ in named}:
        load(path)
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
    main()
