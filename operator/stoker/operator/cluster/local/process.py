"""A pod's command as local processes. Tests pass another `ProcessRunner`.

Started and signalled by `pod_life` through the node's runner.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SHIM = Path(__file__).with_name("shim.py")


class StartError(Exception):
    """The command could not be started: no such program, not executable, no such folder."""


@dataclass(frozen=True)
class ProcessExit:
    """Exit code and signal of the main process."""

    code: int
    """128 + signal for a signal, as a container runtime reports it."""
    signal: int | None = None


@dataclass(frozen=True)
class Command:
    """A command that is already rewritten for this machine."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    """Working folder."""
    log: Path
    """File to which standard output and standard error are appended."""


class Process(Protocol):
    """A pod's processes."""

    @property
    def pid(self) -> int: ...

    def terminate(self) -> None:
        """Send SIGTERM to the main process."""

    def kill(self) -> None:
        """Send SIGKILL to every process."""

    async def wait(self) -> ProcessExit:
        """Wait until the main process has ended and no process of the pod is left."""


class ProcessRunner(Protocol):
    async def start(self, command: Command) -> Process:
        """Start the command. Raises StartError, or OSError when its log cannot be written."""


class ShimRunner:
    """Real processes, each pod behind its shim: they end with the pod, and with this process."""

    async def start(self, command: Command) -> Process:
        log = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            shim = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(SHIM), *command.argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=command.folder,
                env=dict(command.environment),
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"{command.folder}: {error}") from error
        finally:
            os.close(log)
        process = _ShimProcess(shim)
        await process.started()
        return process


class _ShimProcess:
    def __init__(self, shim: asyncio.subprocess.Process) -> None:
        self.shim = shim
        self.pid = 0

    async def started(self) -> None:
        first = await self._line()
        if "pid" not in first:
            await self.shim.wait()
            raise StartError(str(first.get("start_error", "the shim ended before the start")))
        self.pid = int(str(first["pid"]))

    def terminate(self) -> None:
        self._order(b"T")

    def kill(self) -> None:
        self._order(b"K")

    async def wait(self) -> ProcessExit:
        last = await self._line()
        await self.shim.wait()
        if self.shim.stdin is not None:
            self.shim.stdin.close()
        if "code" not in last:  # the shim itself was killed, and the main process with it
            return ProcessExit(code=137, signal=9)
        signal = last.get("signal")
        return ProcessExit(code=int(str(last["code"])), signal=int(str(signal)) if signal is not None else None)

    async def _line(self) -> Mapping[str, object]:
        assert self.shim.stdout is not None
        line = await self.shim.stdout.readline()
        message: Mapping[str, object] = json.loads(line) if line.strip() else {}
        return message

    def _order(self, order: bytes) -> None:
        assert self.shim.stdin is not None
        if not self.shim.stdin.is_closing():
            self.shim.stdin.write(order)
