"""The core processes of one engine: started and ended together.

Made by `program`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class CoreStart(NamedTuple):
    """How to start one core."""

    command: Sequence[str]
    environment: Mapping[str, str]


class CoreProcesses:
    """Processes that live as long as all of them do."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []
        self._waits: list[asyncio.Task[int]] = []

    async def start(self, starts: Sequence[CoreStart]) -> None:
        for command, environment in starts:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which drains and ends its cores
                env=dict(environment),
            )
            self.processes.append(process)
            self._waits.append(asyncio.create_task(process.wait()))

    async def first_end(self) -> int:
        """Wait until one of the processes has ended; return its exit code."""
        done, _ = await asyncio.wait(self._waits, return_when=asyncio.FIRST_COMPLETED)
        return min((wait.result() for wait in done), key=lambda code: code == 0)

    async def end(self, patience_s: float) -> None:
        """Wait for the end of all processes, then kill those that run."""
        if not self._waits:
            return
        await asyncio.wait(self._waits, timeout=patience_s)
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await asyncio.wait(self._waits)


def visible_gpus(environment: Mapping[str, str], core: int, tensor: int) -> dict[str, str]:
    """The environment in which a core sees its own GPUs alone: `tensor` of them, behind those of the cores before it.

    Raises:
        ValueError: `CUDA_VISIBLE_DEVICES` lists too few.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    mine = range(core * tensor, (core + 1) * tensor)
    if listed is None:
        return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}
    devices = listed.split(",")
    if mine.stop > len(devices):
        raise ValueError(f"parallelism: {mine.stop} GPUs are needed, CUDA_VISIBLE_DEVICES lists {len(devices)}")
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(devices[number] for number in mine)}
