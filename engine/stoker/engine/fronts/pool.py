"""All fronts of an engine: started, given connections, started again when they die, ended together.

To the engine it is what one front and its servers are. Requests do not pass here: each front sends them to the core
itself. What does pass is whatever concerns the whole server: connections, `/status`, `/metrics`, `/drain`, the shares
of the load, and questions for a request that another front has.

Made by `program` for `api.fronts` above 1; lives in its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.engine.core.core_group import Cores
from stoker.engine.core.front_phase import front_phase
from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.messages import CoreState, Phase
from stoker.engine.fronts.acceptor import Acceptor
from stoker.engine.fronts.front_process import FrontCommand, FrontProcess
from stoker.engine.fronts.link import AskFailed, LinkLost
from stoker.engine.fronts.report import FrontReport, added
from stoker.engine.fronts.restarts import RestartBudget
from stoker.engine.http.load_reports import REPORT_S
from stoker.pod.causes import Cause

log = logging.getLogger("stoker.engine")
TICK_S = 1.0
COLLECT_EVERY_S = 5.0
"""How often reports are collected unasked: what a front has counted since is lost when it dies."""
SILENT_S = 120.0
"""A front that has not answered for so long is killed, and started again."""
END_S = 5.0
"""Time that a front gets to end, beyond that for its answers, before it is killed."""
START_POLL_S = 0.01


@dataclass(frozen=True)
class Pages:
    """Answers of the whole engine."""

    status: Callable[[], Mapping[str, Any]]
    metrics: Callable[[], bytes]
    drain: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class FrontPool:
    """Processes of fronts behind one port."""

    def __init__(
        self,
        count: int,
        core: Cores,
        listening: Sequence[socket.socket],
        command: FrontCommand,
        pages: Pages,
        clock: Callable[[], float] = time.monotonic,
        budget: RestartBudget | None = None,
    ) -> None:
        """`listening`: bound sockets, the port first; the fronts' servers have the same order."""
        self.core, self.pages, self.clock = core, pages, clock
        self._listening, self._command = tuple(listening), command
        self.fronts: list[FrontProcess | None] = [None] * count
        """The running ones by their numbers."""
        self.restarts = 0
        self.broken: str | None = None
        self.broken_cause = Cause.INTERNAL
        self.on_broken: Callable[[str], None] = lambda _: None
        self.on_answers: Callable[[], None] = lambda: None
        """Called when a front tells whether it serves."""
        self._draining = False
        self._ending = False
        self._runs = 0
        self._past = FrontReport()
        """Counts of fronts that have ended."""
        self._budget = budget if budget is not None else RestartBudget()
        self._acceptor = Acceptor(self._listening, lambda: self.running)
        self._tasks: list[asyncio.Task[None]] = []

    # What one front is to the engine.

    @property
    def running(self) -> list[FrontProcess]:
        return [front for front in self.fronts if front is not None]

    @property
    def ready(self) -> bool:
        """Whether a front accepts new requests; it is the first to get connections."""
        return any(front.ready for front in self.running)

    @property
    def problem(self) -> str:
        """Why no requests are taken; empty while they are."""
        return self.broken or self.core.problem or self.unmet or ("" if self.ready else "no front is ready")

    @property
    def unmet(self) -> str:
        """Why `transfer.require` is not met; empty while it is."""
        return self.core.stats.unmet if self.core.stats is not None else ""

    @property
    def phase(self) -> Phase:
        """The core's phase, as far as a front follows it."""
        return front_phase(self.core.state.phase, draining=self.draining, answers=self.ready or bool(self.unmet))

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        self._tell("draining", value)

    @property
    def report(self) -> FrontReport:
        """The sums over all fronts that there were, as far as they are collected."""
        return added((self._past, *(front.report for front in self.running)))

    @property
    def counters(self) -> LoadCounters:
        return self.report.counters

    def follow(self, state: CoreState) -> None:
        """Each front follows the core itself."""

    def lose(self, reason: str) -> None:
        """Let running requests end with the reason why the core has gone."""
        self._tell("lose", reason)

    async def refresh(self) -> None:
        """Collect the newest reports."""
        await asyncio.gather(*(front.collect() for front in self.running if front.usable))

    # Life.

    @property
    def port(self) -> int:
        return int(self._listening[0].getsockname()[1])

    async def start(self) -> None:
        """Start the fronts, and accept connections once all have joined, or when one cannot be started."""
        self._tasks = [
            asyncio.create_task(self._keep(number), name=f"front {number}") for number in range(len(self.fronts))
        ]
        self._tasks += [asyncio.create_task(self._watch()), asyncio.create_task(self._tell_shares())]
        while self.broken is None and not all(front is not None and front.joined for front in self.fronts):  # noqa: ASYNC110
            await asyncio.sleep(START_POLL_S)  # until they have imported, once
        self._acceptor.start()

    async def stop(self, timeout_s: float) -> None:
        """Accept no connection, let running answers end for `timeout_s`, then end the fronts."""
        self._ending = True
        self._acceptor.close()
        self._tell("end", timeout_s)
        keeping = self._tasks[: len(self.fronts)]
        if keeping:
            await asyncio.wait(keeping, timeout=timeout_s + END_S)
        await self.close()

    async def close(self) -> None:
        """Kill what runs still."""
        self._ending = True
        for front in self.running:
            front.kill()
        if keeping := self._tasks[: len(self.fronts)]:
            await asyncio.wait(keeping, timeout=END_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self._listening:
            one.close()

    async def _keep(self, number: int) -> None:
        """Run a front, and another one when it has ended."""
        while not self._ending:
            front = self.fronts[number] = self._made(number)
            await front.start(self._command, os.environ)
            code = await front.wait()
            self._end_of(front, number)
            if self._ending:
                return
            delay_s = self._budget.take(self.clock())
            if delay_s is None:
                self._break(Cause.INTERNAL, f"front {number} {ended_by(code)}, and fronts have ended too often")
                return
            log.error("front %d %s: its requests are aborted, and it is started again", number, ended_by(code))
            self.restarts += 1
            await asyncio.sleep(delay_s)

    def _made(self, number: int) -> FrontProcess:
        self._runs += 1
        identity = f"front{number}.{self._runs}".encode()

        async def find(name: str) -> Any:
            return await self._find(name, number)

        return FrontProcess(
            number,
            identity,
            {
                "status": self._status,
                "metrics": self._metrics,
                "drain": self._drain,
                "find": find,
                "broken": self._broken,
            },
            lambda: self.on_answers(),
        )

    def _end_of(self, front: FrontProcess, number: int) -> None:
        """Abort what the front had at the cores, and keep what it had counted."""
        self._past = added((self._past, front.report))
        self.fronts[number] = None
        if not self._ending:
            self.core.forget(front.identity)

    def _break(self, cause: Cause, reason: str) -> None:
        if self.broken is None:
            self.broken, self.broken_cause = reason, cause
            self.on_broken(reason)

    # Regular duties.

    async def _watch(self) -> None:
        """Collect reports; kill fronts that do not answer. Only time in which this process ran counts."""
        before_s, collected_s = self.clock(), self.clock()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self.clock()
            for front in self.running:
                front.silence_s += min(now_s - before_s, 2 * TICK_S)
                if front.silence_s > SILENT_S:
                    log.error("front %d has not answered for %.0f s", front.number, front.silence_s)
                    front.kill()
            before_s = now_s
            if now_s - collected_s >= COLLECT_EVERY_S:
                await self.refresh()
                collected_s = self.clock()

    async def _tell_shares(self) -> None:
        """Tell each front the load of the others, on change."""
        last: object = None
        while True:
            fronts = [front for front in self.running if front.usable]
            shares = [(front.identity, front.share) for front in fronts]
            if shares != last:
                last = shares
                for front in fronts:
                    front.link.tell("shares", [list(share) for identity, share in shares if identity != front.identity])
            await asyncio.sleep(REPORT_S)

    def _tell(self, subject: str, value: Any) -> None:
        for front in self.running:
            front.link.tell(subject, value)

    # Questions of fronts.

    async def _status(self, _: Any) -> Mapping[str, Any]:
        await self.refresh()
        return dict(self.pages.status())

    async def _metrics(self, _: Any) -> bytes:
        await self.refresh()
        return self.pages.metrics()

    async def _drain(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(await self.pages.drain(body))

    async def _broken(self, reason: str) -> None:
        """The model's tokenizer cannot be opened: another process would fail as well."""
        self._break(Cause.MODEL_ERROR, reason)

    async def _find(self, name: str, asker: int) -> Any:
        """A request at the other fronts. None: none of them has it."""
        others = [front for front in self.running if front.number != asker and front.usable]
        found = await asyncio.gather(*(_ask_for(front, name) for front in others))
        return next((body for body in found if body is not None), None)


async def _ask_for(front: FrontProcess, name: str) -> Any:
    with contextlib.suppress(LinkLost, AskFailed):
        return await front.link.ask("find", name)
    return None


def ended_by(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
