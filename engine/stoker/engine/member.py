"""A further pod of a replica: its ranks as processes, and the pages by which cluster and operator see them.

It answers no request: the leader's pod does. It ends when its leader does, or when one of its ranks has ended; the
operator then replaces the whole replica. This process never imports torch.

Run by `__main__` where `STOKER_NODE_RANK` is above 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.applications import Starlette

from stoker.engine.config import EngineConfig
from stoker.engine.ranks.pod_place import PodPlace
from stoker.pod.causes import Cause
from stoker.pod.gpu_metrics import gpu_metrics
from stoker.pod.http import probe_routes
from stoker.pod.serve import Server, bind_tcp
from stoker.pod.termination_message import TerminationMessage

log = logging.getLogger("stoker.engine")

STOP_S = 1.0
"""Time that ranks get to end after their leader."""
MARGIN_S = 2.0
"""Part of the grace period that is kept for the end of this program."""
PHASES = ("FetchingModel", "Joining", "Loading", "Serving")
"""Phases of a rank, in their order."""

RankCommand = Callable[[int, Path, int], Sequence[str]]
"""(rank, configuration file, number of the pipe for phases) -> command line."""


def rank_command(rank: int, config_file: Path, told: int) -> Sequence[str]:
    level = logging.getLevelName(logging.getLogger().level)
    places = ["--config", str(config_file), "--told", str(told), "--parent", str(os.getpid())]
    return [sys.executable, "-m", "stoker.engine.worker_main", "--rank", str(rank), *places, "--log-level", level]


class Member:
    """One further pod, run inside an event loop."""

    def __init__(
        self,
        config: EngineConfig,
        place: PodPlace,
        pod_uid: str,
        folder: Path,
        command: RankCommand = rank_command,
    ) -> None:
        self.config, self.place, self.pod_uid, self.folder, self.command = config, place, pod_uid, folder, command
        self.began_s = time.monotonic()
        self.stop = asyncio.Event()
        """Set by SIGTERM: the replica is taken away, its leader drains."""
        self.phases = dict.fromkeys(place.ranks, "Starting")
        """Rank -> what it told last."""
        self.processes: dict[int, asyncio.subprocess.Process] = {}

    async def run(self) -> TerminationMessage:
        """Serve the pages until a rank has ended, which it does with the leader. The message names the cause.

        Raises:
            OSError: the port is taken.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)
        listen = self.config.listen
        server = Server(self._app(), bind_tcp(listen.host, listen.port), listen.limits)
        await server.start()
        try:
            return await self._compute()
        finally:
            await server.stop(1)

    def status(self) -> Mapping[str, Any]:
        """The `/status` page."""
        return {
            "program": "engine",
            "pod_uid": self.pod_uid,
            "revision": self.config.identity.revision,
            "node_rank": self.place.number,
            "phase": self._phase(),
            "message": f"ranks of this pod: {', '.join(f'{rank} {phase}' for rank, phase in self.phases.items())}",
            "ranks": [{"rank": rank, "pid": process.pid} for rank, process in self.processes.items()],
            "uptime_s": round(time.monotonic() - self.began_s, 3),
        }

    @property
    def ready(self) -> bool:
        return all(phase == "Serving" for phase in self.phases.values())

    def _phase(self) -> str:
        """The phase of the slowest rank, in an engine's words."""
        if self.ready:
            return "Draining" if self.stop.is_set() else "Serving"
        return "Loading"

    def _app(self) -> Starlette:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(gpu_metrics())
        routes = probe_routes(alive=lambda: True, ready=lambda: self.ready, status=self.status, registry=registry)
        return Starlette(routes=routes)

    async def _compute(self) -> TerminationMessage:
        config_file = self.folder / "config.json"
        config_file.write_text(self.config.model_dump_json())
        listeners = [await self._start(rank, config_file) for rank in self.place.ranks]
        ends = {asyncio.create_task(process.wait()): rank for rank, process in self.processes.items()}
        stopped = asyncio.create_task(self._stopped())
        try:
            done, _ = await asyncio.wait({*ends, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(ends, timeout=STOP_S)
            codes = {ends[end]: end.result() for end in ends if end in done}
        finally:
            stopped.cancel()
            await self._kill(ends)
            for listener in listeners:
                listener.cancel()
        return self._message(codes)

    async def _stopped(self) -> None:
        """Wait for SIGTERM, and then for the leader to let the ranks go, within the grace period."""
        await self.stop.wait()
        if self.ready:
            await asyncio.sleep(max(self.config.grace_period_s - MARGIN_S, 0))

    async def _start(self, rank: int, config_file: Path) -> asyncio.Task[None]:
        reading, writing = os.pipe()
        try:
            self.processes[rank] = await asyncio.create_subprocess_exec(
                *self.command(rank, config_file, writing),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(writing,),
                process_group=0,
            )
        finally:
            os.close(writing)
        return asyncio.create_task(self._listen(rank, reading))

    async def _listen(self, rank: int, reading: int) -> None:
        """Read the phases that a rank tells."""
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", buffering=0)
        )
        try:
            while line := await stream.readline():
                self.phases[rank] = line.decode().strip()
                log.info("rank %d: %s", rank, self.phases[rank])
        finally:
            transport.close()

    async def _kill(self, ends: Mapping[asyncio.Task[int], int]) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if ends:
            await asyncio.wait(ends)

    def _message(self, codes: Mapping[int, int]) -> TerminationMessage:
        """The cause of the end. `codes`: exit codes of the ranks that ended first."""
        if self.stop.is_set():
            return TerminationMessage(cause=Cause.INTERRUPTED, detail="stopped")
        rank, code = max(codes.items(), key=lambda item: item[1] != 0)
        if code == 0:
            text = f"rank {rank} lost the leader of the replica, whose log has the reason"
            return TerminationMessage(cause=Cause.PEER_LOST, detail=text)
        if code < 0:
            return TerminationMessage(cause=Cause.RANK_KILLED, detail=f"rank {rank} was killed by signal {-code}")
        text = f"rank {rank} ended with code {code}; its log has the error"
        return TerminationMessage(cause=Cause.RANK_FAILED, detail=text)


def run_member(config: EngineConfig, place: PodPlace, pod_uid: str) -> TerminationMessage:
    """Run a further pod to its end."""
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        return asyncio.run(_run(config, place, pod_uid, Path(folder)))


async def _run(config: EngineConfig, place: PodPlace, pod_uid: str, folder: Path) -> TerminationMessage:
    return await Member(config, place, pod_uid, folder).run()
