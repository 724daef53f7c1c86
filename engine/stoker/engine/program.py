"""The engine as a program: it starts a core process, serves HTTP with a front, and ends both: drained, failed or
killed.

A single front runs in this process, the core's parent; several are processes of their own (`fronts`), and this one
hands them their connections. It never imports torch, so `/status` answers while the core loads.

Run by `__main__` and by `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from stoker.engine.config import EngineConfig
from stoker.engine.core.core_client import PATIENCE
from stoker.engine.core.core_group import Cores
from stoker.engine.core.core_processes import CoreProcesses
from stoker.engine.core.core_watch import WatchLimits
from stoker.engine.core.messages import CoreState
from stoker.engine.core_start import CoreCommand, core_addresses, core_command, core_starts, scratch
from stoker.engine.fronts.front_command import front_command
from stoker.engine.fronts.front_metrics import FrontsCollector
from stoker.engine.fronts.parts import app_of, front_of, joined, links_of, served_names
from stoker.engine.fronts.pool import FrontPool, Pages
from stoker.engine.http.api_keys import load_api_keys
from stoker.engine.http.core_metrics import register_core
from stoker.engine.http.front import Front
from stoker.engine.http.metrics import FrontMetrics
from stoker.engine.http.peer_report import peer_of, transfer_status
from stoker.engine.http.served_model import ServedModel
from stoker.engine.http.text import TextCodec
from stoker.model.tokenizer import Tokenizer
from stoker.pod.causes import Cause, cause_of_exit_code
from stoker.pod.control_key import ControlVerifier
from stoker.pod.gpu_metrics import gpu_metrics
from stoker.pod.http import ControlRoute, control_routes, probe_routes
from stoker.pod.listen import ListenConfig
from stoker.pod.serve import Server, bind_tcp, bind_unix
from stoker.pod.termination_message import TerminationMessage
from stoker.pod.tracing import NoTracer, Tracer

log = logging.getLogger("stoker.engine")

STOP_S = 5.0
"""Time that a core gets to end before it is killed."""
STOP_LOADING_S = 0.5
REASON_S = 0.5
"""Longest wait for the message of a core that failed."""
MARGIN_S = 2.0
"""Part of the grace period that is kept for closing the servers."""


@dataclass(frozen=True)
class Environment:
    """The surroundings of the program: its pod, its core's command, its tokenizer, its observers."""

    pod_uid: str = ""
    command: CoreCommand = core_command
    open_codec: Callable[[Path], TextCodec] = Tokenizer.open
    on_state: Callable[[CoreState], None] = lambda _: None
    on_listen: Callable[[int], None] = lambda _: None
    """Called with the port, once connections are accepted."""
    on_serving: Callable[[], None] = lambda: None
    """Called once the core serves."""
    watch: WatchLimits = PATIENCE
    """How long a silent core is waited for."""
    tracer: Tracer = NoTracer()  # noqa: RUF009 - it has no state


class Engine:
    """One engine replica, run inside an event loop."""

    def __init__(
        self, config: EngineConfig, environment: Environment, folder: Path, started: CoreProcesses | None = None
    ) -> None:
        """`started`: the cores, with `folder`, where they run already; this engine ends them."""
        self._started = started
        self.config = config
        self.environment = environment
        self.folder = folder
        self.began_s = time.monotonic()
        self.stop = asyncio.Event()
        """Set to end the program in good order."""
        self.hurry = False
        """Set by a second signal: running requests are not waited for."""
        self.names = served_names(config)
        load_api_keys(config.api.api_key_file)  # a wrong file is found before anything starts
        self.registry = registry = CollectorRegistry()
        self.core: Cores = joined(core_addresses(folder, config), environment.watch)
        self.links = links_of(self.core)
        self._core_pid: int | None = None
        ProcessCollector(registry=registry)  # this process: process_resident_memory_bytes and others
        ProcessCollector(namespace="stoker_core", pid=self._pid_of_core, registry=registry)
        registry.register(gpu_metrics())
        register_core(registry, self.names[0], lambda: self.core.stats, lambda: self.core.state.model)
        self.answering: Front | FrontPool
        """The front inside this process, or the processes of several."""
        if config.api.fronts == 1:
            metrics = FrontMetrics(registry, self.names[0])
            self.answering = front_of(config, self.core, metrics, environment.open_codec, environment.tracer)
        else:
            self.answering = self._pool()
            registry.register(FrontsCollector(self.answering))
        self.served.on_broken = lambda _: self.stop.set()
        self.served.on_answers = self._tell_again
        self.core.on_state = self._follow
        self._told: CoreState | None = None
        self.drain_route = ControlRoute("POST", "/drain", self._drain)

    @property
    def front(self) -> Front:
        """The front inside this process."""
        assert isinstance(self.answering, Front), "an engine with several fronts has them in processes of their own"
        return self.answering

    @property
    def served(self) -> ServedModel | FrontPool:
        """What knows whether requests are taken."""
        return self.answering.served if isinstance(self.answering, Front) else self.answering

    async def run(self) -> TerminationMessage:
        """Serve until a signal, or until the core ends. The termination message names the cause.

        Raises:
            OSError: the port is taken.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            servers = [self.answering] if isinstance(self.answering, FrontPool) else self._servers()
        except OSError:
            await self.core.close()
            raise
        return await self.serve(servers)

    async def serve(self, servers: Sequence[Server | FrontPool] = ()) -> TerminationMessage:
        """Run the core behind these servers until `stop` is set or it ends."""
        processes = await self._start_cores()
        ended = asyncio.create_task(processes.first_end())
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await self.core.start()
            for server in servers:
                await server.start()
            if servers:
                self.environment.on_listen(servers[0].port)
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return await self._close(servers, ended)
        finally:
            await self._end_cores(processes)
            await ended
            stopped.cancel()
            if isinstance(self.answering, FrontPool):
                await self.answering.close()
            await self.core.close()

    async def _close(self, servers: Sequence[Server | FrontPool], ended: asyncio.Task[int]) -> TerminationMessage:
        """Let running answers end, or end them with the cause, and close the servers."""
        deadline = time.monotonic() + self.config.grace_period_s - MARGIN_S
        if not ended.done():
            await self._drain_all(ended, deadline)
        if ended.done() and ended.result() > 0:
            await self._wait_for_reason()
        message = self._termination(ended.result() if ended.done() else None)
        if ended.done():
            self.core.lose(message.detail)
            if isinstance(self.answering, FrontPool):
                self.answering.lose(message.detail)
        for server in servers:
            await server.stop(1 if ended.done() or self.hurry else max(deadline - time.monotonic(), 1))
        return message

    def status(self) -> Mapping[str, Any]:
        """The `/status` page."""
        state, stats = self.core.state, self.core.stats
        model = state.model
        return {
            "program": "engine",
            "pod_uid": self.environment.pod_uid,
            "revision": self.config.identity.revision,
            "phase": self.served.phase,
            "message": self.served.problem,
            "models": list(self.names),
            "model_digest": model.digest if model is not None else None,
            "running": stats.running if stats is not None else 0,
            "waiting": stats.waiting if stats is not None else 0,
            "free_blocks": stats.free_blocks + stats.cached_blocks if stats is not None else 0,
            "total_blocks": stats.total_blocks if stats is not None else 0,
            "host_tier": asdict(stats.host) if stats is not None and stats.host is not None else None,
            "disk_tier": asdict(stats.disk) if stats is not None and stats.disk is not None else None,
            "store": asdict(stats.store) if stats is not None and stats.store is not None else None,
            "experts": asdict(stats.experts) if stats is not None and stats.experts is not None else None,
            "ranks": [one._asdict() for one in stats.ranks] if stats is not None else [],
            "role": self.config.role,
            "peer": peer_of(stats.transfer) if stats is not None else None,
            "transfer": transfer_status(stats.transfer) if stats is not None else None,
            "startup_s": dict(state.startup),
            "uptime_s": round(time.monotonic() - self.began_s, 3),
            "load": self._load(),
        }

    def _load(self) -> Mapping[str, Any] | None:
        limits = self.config.scheduler
        return self.answering.counters.report(
            self.core.stats,
            self.core.state.model,
            max_requests=min(limits.max_requests, limits.max_batch_tokens),
            max_batch_tokens=limits.max_batch_tokens,
        )

    def _follow(self, state: CoreState) -> None:
        self.served.follow(state)
        log.info("core: %s %s", state.phase, state.message)
        self._tell(state)

    def _tell_again(self) -> None:
        if self._told is not None:
            self._tell(self.core.state)

    def _tell(self, state: CoreState) -> None:
        """Tell the observers of a change. A core that serves is not enough: requests are refused until a front does."""
        if state.phase == "Serving" and self.served.phase == "Warming":
            state = replace(state, phase="Warming", message=self.served.problem)
        if state == self._told:
            return
        if state.phase == "Serving":
            self.environment.on_serving()
        self._told = state
        self.environment.on_state(state)

    def _on_signal(self) -> None:
        self.hurry = self.stop.is_set()
        self.stop.set()

    # Servers.

    def _servers(self) -> list[Server]:
        """The servers of the front inside this process."""
        front, listen, pod_uid = self.front, self.config.listen, self.environment.pod_uid
        probes = probe_routes(
            alive=lambda: not self.core.dead,
            ready=lambda: front.ready,
            status=self.status,
            registry=self.registry,
        )
        keys = listen.control_keys
        verifier = ControlVerifier(keys, pod_uid, time.time) if keys is not None else None
        guarded = control_routes([self.drain_route], verifier) if verifier is not None else []
        routes = [[*probes, *guarded], [*probes, *control_routes([self.drain_route], None)]]
        return [
            Server(app_of(self.config, front, own, pod_uid), bound, listen.limits)
            for own, bound in zip(routes, bound_sockets(listen), strict=False)
        ]

    def _pool(self) -> FrontPool:
        """Several fronts behind the port. Raises OSError where it is taken."""
        config_file = self.folder / "fronts.json"
        config_file.write_text(self.config.model_dump_json())
        pages = Pages(self.status, lambda: generate_latest(self.registry), self._drain)
        command = partial(front_command, config_file, uuid.uuid4().hex)
        return FrontPool(self.config.api.fronts, self.core, bound_sockets(self.config.listen), command, pages)

    # The core process.

    async def _start_cores(self) -> CoreProcesses:
        """The processes of the cores: those that run already, or started now."""
        processes = self._started
        if processes is None:
            processes = CoreProcesses()
            await processes.start(core_starts(self.config, self.folder, self.environment.command))
        self._core_pid = processes.processes[0].pid
        return processes

    def _pid_of_core(self) -> int | str:
        """The first core's folder in `/proc`; one that does not exist before the start."""
        return self._core_pid if self._core_pid is not None else "none"

    async def _wait_for_reason(self) -> None:
        """Wait a moment for the core's last message, which may still be on its way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REASON_S):
                while self.core.state.phase != "Failed":  # noqa: ASYNC110 - half a second, once
                    await asyncio.sleep(0.01)

    async def _end_cores(self, processes: CoreProcesses) -> None:
        """Ask the cores to end, then kill them."""
        self.core.stop()
        loading = self.core.state.phase == "Loading"  # it reads no message while it imports, and has no requests
        await processes.end(STOP_LOADING_S if loading else STOP_S)

    # The end.

    async def _drain(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle `POST /drain {"id", "deadline_s"}`: take no new requests, let running ones end. May be repeated."""
        deadline_s = body.get("deadline_s")
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 <= deadline_s <= 86400:
            raise ValueError(f"deadline_s: seconds from 0 to 86400 are needed (got {deadline_s!r})")
        self._begin_drain(float(deadline_s))
        return {"id": body.get("id"), "phase": "Draining"}

    def _begin_drain(self, deadline_s: float) -> None:
        self.served.draining = True
        self.core.drain(deadline_s)

    async def _drain_all(self, ended: asyncio.Task[int], deadline: float) -> None:
        """Let running requests end until the deadline. A core that does not serve yet has none."""
        if self.core.state.phase not in ("Serving", "Draining"):
            self.served.draining = True
            return
        log.info("draining %d requests", self.core.running)
        self._begin_drain(max(deadline - time.monotonic(), 0))
        while time.monotonic() < deadline and not ended.done() and not self.hurry:
            if self._drained and not self.core.running:
                return
            await asyncio.sleep(0.02)

    @property
    def _drained(self) -> bool:
        return self.core.state.phase == "Drained"

    def _termination(self, code: int | None) -> TerminationMessage:
        """The cause of the program's end. `code` is the core's exit code, None while it runs."""
        if self.served.broken is not None:
            return TerminationMessage(cause=self.served.broken_cause, detail=self.served.broken)
        if code is None:
            return TerminationMessage(cause=Cause.INTERRUPTED, detail="stopped after its requests")
        return end_of_core(code, self.core.state, draining=self.served.draining)


def end_of_core(code: int, state: CoreState, *, draining: bool) -> TerminationMessage:
    """Return the cause of the end of the core's process with an exit code, where `state` is the last that it told."""
    if code < 0:
        return TerminationMessage(cause=Cause.RANK_KILLED, detail=f"the core process was killed by signal {-code}")
    cause = cause_of_exit_code(code) or Cause.INTERNAL
    if cause is Cause.COMPLETED and draining:
        return TerminationMessage(cause=Cause.INTERRUPTED, detail="drained before it served")
    if cause is Cause.COMPLETED:
        return TerminationMessage(cause=Cause.INTERNAL, detail="the core process ended without being asked to")
    if state.phase == "Failed":
        return TerminationMessage(cause=cause, detail=state.message.removeprefix(f"{cause}: "))
    at = f" ({state.message})" if state.message else ""  # what it did last is no reason
    detail = f"the core process ended with code {code} in phase {state.phase}{at}; the engine's log has the reason"
    return TerminationMessage(cause=cause, detail=detail)


def bound_sockets(listen: ListenConfig) -> list[socket.socket]:
    """The port, then the control socket where there is one.

    Raises:
        OSError: an address is taken.
    """
    bound = [bind_tcp(listen.host, listen.port)]
    if listen.control_socket is not None:
        Path(listen.control_socket).parent.mkdir(parents=True, exist_ok=True)
        bound.append(bind_unix(listen.control_socket))
    return bound


def run_engine(config: EngineConfig, environment: Environment) -> TerminationMessage:
    """Run an engine to its end in a scratch folder of its own."""
    with scratch(config.work_dir) as folder:
        return asyncio.run(_run(config, environment, folder))


async def _run(config: EngineConfig, environment: Environment, folder: Path) -> TerminationMessage:
    return await Engine(config, environment, folder).run()
