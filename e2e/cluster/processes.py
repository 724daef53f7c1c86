"""Programs that a cluster runs on this machine: start with a log, lookup by a later process, stop.

A pid alone is ambiguous after a while, so the note also holds the start time of the process. A number that now belongs
to another process is never signalled.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.waiting import wait_until

BINDER = "setpriv"
"""A launcher that asks the kernel to kill it together with the thread that started it, then becomes the command."""


def started_at(pid: int) -> int | None:
    """Return a living process's start in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" and not _has_threads(pid) else int(fields[19])


def _has_threads(pid: int) -> bool:
    """Return whether threads outlive the process's first one; until the last is gone, its sockets are open."""
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except FileNotFoundError:
        return False


def _is_bound(pid: int) -> bool:
    """Return whether a process is past its binder, or has ended.

    While one program replaces another, a process has no arguments, and its name (`comm`) is still the old one.
    """
    return _command(pid) not in ("", BINDER) or started_at(pid) is None


def _command(pid: int) -> str:
    """Return the first argument of a process; empty when it is gone, or another program is about to begin."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Program:
    """One process, with the folder of its log (`<name>.log`) and its note (`<name>.pid`)."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._note = folder / f"{name}.pid"

    def start(self, command: Sequence[str], *, detached: bool, environment: Mapping[str, str] | None = None) -> None:
        """Start the command in a session of its own.

        Args:
            detached: it outlives this process (`make cluster`); otherwise the kernel kills it together with the thread
                that started it, so that a test that
                is killed leaves nothing.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        bound = [] if detached else [BINDER, "--pdeathsig", "KILL", "--"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*bound, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        if bound:
            wait_until(lambda: _is_bound(process.pid), timeout_s=240)  # from then on it dies with this thread
        # reaped by the caller of `alive`; the handle itself is not kept, so that a later process stops it the same way
        process.returncode = 0
        self._note.write_text(json.dumps({"pid": process.pid, "started_at": started_at(process.pid)}))

    @property
    def pid(self) -> int | None:
        """The pid, if the process lives."""
        try:
            note = json.loads(self._note.read_text())
        except FileNotFoundError:
            return None
        _reap(note["pid"])
        return note["pid"] if started_at(note["pid"]) == note["started_at"] else None

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.pid is not None

    def stop(self, *, grace_s: float = 5.0) -> None:
        """Send TERM, then KILL after `grace_s` (0: at once); return when the process is gone.

        A process that does not run is no error.
        """
        if (pid := self.pid) is not None:
            if grace_s > 0:
                _signal(pid, signal.SIGTERM)
                wait_until(lambda: not self.alive, timeout_s=grace_s)
            _signal(pid, signal.SIGKILL)
            if not wait_until(lambda: not self.alive, timeout_s=120):
                raise ClusterError(f"{self.name} (pid {pid}) does not end")
            _reap(pid)
        self._note.unlink(missing_ok=True)

    def tail(self, lines: int = 5) -> str:
        """Return the end of its log on one line, for an error message."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return " | ".join(text.strip().splitlines()[-lines:]) or "its log is empty"


def wait_for_program(program: Program, ready: object, *, what: str, timeout_s: float) -> None:
    """Wait until `ready()` is true.

    Raises:
        ClusterError: if the program ends or the time is over, with the end of its log.
    """
    assert callable(ready)
    deadline = time.monotonic() + timeout_s
    while not ready():
        if not program.alive:
            raise ClusterError(f"{program.name} ended before {what}: {program.tail()}")
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} not after {timeout_s:.0f} s, see {program.log}: {program.tail()}")
        time.sleep(0.05)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap(pid: int) -> None:
    """Collect the exit status of a child of this process; other processes are left to their parents."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # another process's child, or taken already
