"""The init process of one pod: no process of a pod outlives the pod, and no pod outlives the supervisor.

Run as a file by `python -I -S`, with nothing but the standard library, so that it starts in milliseconds. Standard
input is a pipe from the supervisor: `T` sends SIGTERM to the pod's main process, `K` kills everything, its end means
that the supervisor is gone. Standard output takes one JSON line at the start (`{"pid"}` or `{"start_error"}`) and one
at the end (`{"code", "signal"}`). Standard error is the pod's log.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LONGEST_KILL_S = 20.0


def main(command: list[str]) -> int:
    """Run `command` to its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    wake = _wake_on_child()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the pod become ours
    main_pid, error = _start(command)
    if error:
        _report({"start_error": error})
        return 0
    _report({"pid": main_pid})
    status = _wait(main_pid, wake)
    _kill_all(main_pid)
    code = os.waitstatus_to_exitcode(status)
    _report({"code": code if code >= 0 else 128 - code, "signal": -code if code < 0 else None})
    return 0


def _start(command: list[str]) -> tuple[int, str]:
    """Start the main process in its own session; its pid, or why it could not be started."""
    told, tell = os.pipe()
    shim = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become(command, shim)
        except OSError as failure:
            os.write(tell, f"{command[0]}: {failure.strerror}".encode())
        os._exit(128)
    os.close(tell)
    with os.fdopen(told, "rb") as stream:
        error = stream.read().decode()  # closed by a successful exec
    if error:
        os.waitpid(pid, 0)
    return pid, error


def _become(command: list[str], shim: int) -> None:
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also when this shim itself is killed
    if os.getppid() != shim:
        os._exit(128)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.execvp(command[0], command)


def _wait(main_pid: int, wake: int) -> int:
    """Wait for the main process and return its wait status; carry out the supervisor's orders meanwhile."""
    listen = [0, wake]
    while True:
        ready, _, _ = select.select(listen, [], [])
        if wake in ready:
            os.read(wake, 4096)
        if 0 in ready:
            orders = os.read(0, 64)
            if not orders:
                listen.remove(0)
            if b"T" in orders:
                _signal(main_pid, signal.SIGTERM)
            if b"K" in orders or not orders:
                _kill_all(main_pid, reap=False)
        status = _reap(main_pid)
        if status is not None:
            return status


def _reap(main_pid: int) -> int | None:
    """Collect processes that have ended; the main process's status if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == main_pid:
            found = status


def _kill_all(main_pid: int, *, reap: bool = True) -> None:
    """Send SIGKILL to every descendant, until there is none (with `reap`) or once."""
    end = time.monotonic() + LONGEST_KILL_S
    while True:
        for pid in _descendants(main_pid):
            _signal(pid, signal.SIGKILL)
        if not reap:
            return
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > end:
            return
        time.sleep(0.005)


def _descendants(main_pid: int) -> list[int]:
    """List every descendant; without /proc only the main process's group."""
    proc = Path("/proc")
    if not (proc / "self/stat").exists():
        try:
            os.killpg(main_pid, signal.SIGKILL)
        except OSError:
            return []
        return [main_pid]
    parents: dict[int, list[int]] = {}
    for entry in os.listdir(proc):  # noqa: PTH208 - bare names, and quick
        if entry.isdigit():
            parents.setdefault(_parent(entry), []).append(int(entry))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def _parent(pid: str) -> int:
    try:
        stat = Path("/proc", pid, "stat").read_bytes()
    except OSError:
        return -1
    return int(stat.rpartition(b")")[2].split()[1])


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _wake_on_child() -> int:
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _report(message: dict[str, object]) -> None:
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        return  # the supervisor is gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
