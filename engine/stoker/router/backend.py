"""One backend of the router: its health, its pending requests and its idle connections.

Owned by `Backends`, which probes it and retires it; `Proxy` counts requests on it and borrows connections. Lives in one
event loop. Does not choose between backends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stoker.pod.histogram import Histogram
from stoker.router.connection import BackendError, Connection, Outgoing, Silent
from stoker.router.counted_place import CountedPlace
from stoker.router.data_rank import DataRank
from stoker.router.engine_counts import EngineCounts
from stoker.router.kept_stream import KeptStream
from stoker.router.load import SILENT_S, Load, reports
from stoker.router.node import Node
from stoker.router.snapshot import BackendEntry

MAX_IDLE_CONNECTIONS = 64
MAX_IDLE_S = 30.0
"""Shorter than the engine keeps an idle connection open, so that the router closes it first."""
DRAINING_PHASES = ("Draining", "Drained")
"""An engine in these phases is not ready either, but answers what it has."""
ANY_HOST = frozenset(("0.0.0.0", "[::]", "::", "*"))
"""An engine that listens on all addresses is reached at the one of its URL."""
MAX_SILENT_PROBES = 3
"""Probes without an answer before a backend counts as unhealthy. One that is refused counts at once."""


@dataclass(frozen=True)
class Timeouts:
    """Time limits of the exchanges with a backend, in seconds."""

    connect_s: float
    silence_s: float
    probe_s: float


def _ignore(_: Backend, __: Load) -> None:
    pass


class Backend(CountedPlace):
    """One engine replica of the current snapshot, or of an earlier one while it finishes its requests."""

    def __init__(self, entry: BackendEntry, times: Timeouts, clock: Callable[[], float]) -> None:
        super().__init__(entry.role, clock)
        self.entry = entry
        self.identity = entry.pod_uid, ""
        """Pod uid and epoch: after a restart an engine's cache is empty."""
        self.times = times
        self.ranks: Sequence[DataRank[Backend]] = ()
        """Its data ranks, by its newest report; empty where it has one, or has not reported them."""
        self._reported_s = 0.0
        self.ready = False
        """Whether it may get a new request."""
        self._healthy = False
        self.stalled = False
        """Whether the last probe found it not ready although it is not draining. Its unanswered requests may move."""
        self.problem = "not probed yet"
        self.retired = False
        self._unanswered: set[Connection] = set()
        self._streams: dict[Connection, KeptStream] = {}
        self._idle: list[Connection] = []
        self._probe: Connection | None = None
        self._silent_probes = 0
        self.probe_now = asyncio.Event()

    @property
    def healthy(self) -> bool:
        """Whether the last probe was good, and no request has failed since."""
        return self._healthy

    @healthy.setter
    def healthy(self, healthy: bool) -> None:
        self._healthy = healthy
        self._update_ready()

    def _update_ready(self) -> None:
        self.ready = self._healthy and not self.entry.draining and not self.retired

    def listed(self, entry: BackendEntry) -> None:
        """Take its entry of a newer snapshot."""
        self.entry = entry
        self._update_role()
        self._update_ready()

    @property
    def backend(self) -> Backend:
        """The pod that gets the requests: itself."""
        return self

    @property
    def rank(self) -> int | None:
        """The data rank that the router names: none, the engine chooses one."""
        return None

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Its data ranks where they are known, else itself."""
        return self.ranks or (self,)

    @property
    def node(self) -> Node:
        """Where it runs."""
        return Node(self.entry.host, self.entry.zone)

    @property
    def revision(self) -> str:
        """The revision that it serves."""
        return self.entry.revision

    @property
    def peer_endpoint(self) -> str | None:
        """HOST:PORT at which other engines reach it, its first copy of several; None while it exchanges no blocks."""
        return self.reached(self.load)

    def reached(self, load: Load | None) -> str | None:
        """The endpoint in a report of this engine, or of a rank, with its own address in place of any host."""
        if load is None or load.peer is None:
            return None
        host, _, port = load.peer.endpoint.rpartition(":")
        return f"{self.entry.address[0]}:{port}" if host in ANY_HOST else load.peer.endpoint

    @property
    def silent(self) -> bool:
        """Whether an engine that reported its load has not done so for long."""
        return self.report is not None and self.clock() - self._reported_s > SILENT_S

    def reported(self, load: Load) -> EngineCounts:
        """Take a report; one that is older than the newest has no effect.

        Returns what it adds to the newest before it. The first report adds nothing.
        """
        newest = self.report
        if newest is not None and newest.epoch == load.epoch and newest.seq >= load.seq:
            return EngineCounts(Histogram())
        self._reported_s = self.clock()
        self.identity = self.entry.pod_uid, load.epoch
        self.take(load)
        self._update_role()
        self._take_ranks(load)
        if newest is None:
            return EngineCounts(Histogram())
        if newest.epoch != load.epoch:
            return EngineCounts(Histogram(load.queue_s), load.splits, load.failed_splits)
        queued = Histogram(load.queue_s).since(Histogram(newest.queue_s))
        splits, failed = load.splits - newest.splits, load.failed_splits - newest.failed_splits
        return EngineCounts(queued, max(splits, 0), max(failed, 0))

    def _update_role(self) -> None:
        reported = self.report.role if self.report is not None and self.entry.role == "colocated" else None
        role = reported or self.entry.role
        if role != self.role:
            self.prefer(role)
            for rank in self.ranks:
                rank.prefer(role)

    def _take_ranks(self, load: Load) -> None:
        """Pass the parts of a report on to the data ranks."""
        parts = load.of_ranks
        if len(parts) != len(self.ranks):
            self.ranks = tuple(DataRank(self, number) for number in range(len(parts)))
        for rank, part in zip(self.ranks, parts, strict=True):
            rank.take(part)

    async def follow_load(
        self, counted: Callable[[BackendEntry, EngineCounts], None], took: Callable[[Backend, Load], None] = _ignore
    ) -> None:
        """Take the engine's reports until the stream ends; pass each on, and what it adds to the counts of revisions.

        Raises:
            NotReported: the engine has no such stream.
            BackendError: it cannot be reached, or the stream ended.
        """
        connection = await self.connect(fresh=True)
        try:
            async for load in reports(connection, max(SILENT_S, self.times.probe_s)):
                added = self.reported(load)
                took(self, load)
                if added:
                    counted(self.entry, added)
        finally:
            connection.close()

    @contextmanager
    def helping(self, tokens: int) -> Iterator[str | None]:
        """Count a prompt that it computes for another engine, until the first byte. Yield HOST:PORT at which the other
        one reaches it; None while it exchanges no blocks."""
        with self.computing(tokens):
            yield self.peer_endpoint

    @contextmanager
    def unanswered(self, connection: Connection) -> Iterator[None]:
        """Note that the request on `connection` waits for the first byte of its answer."""
        self._unanswered.add(connection)
        try:
            yield
        finally:
            self._unanswered.discard(connection)

    def abandon_unanswered(self) -> int:
        """Cut the connections of requests without a first byte, which the proxy then sends elsewhere; count them."""
        number = len(self._unanswered)
        for connection in self._unanswered:
            connection.close()
        return number

    @contextmanager
    def carrying(self, connection: Connection, kept: KeptStream) -> Iterator[None]:
        """Note that another backend could go on with the stream on `connection`."""
        self._streams[connection] = kept
        try:
            yield
        finally:
            del self._streams[connection]

    def abandon_silent(self, silence_s: float) -> int:
        """Cut the resumable streams on which nothing came for `silence_s`; count them."""
        since_s = self.clock() - silence_s
        silent = [connection for connection, kept in self._streams.items() if kept.last_byte_s < since_s]
        for connection in silent:
            connection.close()
        return len(silent)

    async def connect(self, *, fresh: bool = False) -> Connection:
        """Return a connection whose other end has been checked to be this pod.

        Raises:
            Unreachable, WrongPod, Silent: it cannot be used now.
        """
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.reusable and self.clock() - connection.idle_since <= MAX_IDLE_S:
                connection.fresh = False
                return connection
            connection.close()
        connection = await Connection.open(self.entry.address, self.times.connect_s)
        try:
            await connection.check_identity(self.entry.pod_uid, self.times.probe_s)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            return connection
        connection.close()
        raise BackendError(f"{self.entry.url} closes every connection after one answer")

    def give_back(self, connection: Connection) -> None:
        """Keep a connection after an exchange if it can carry another one."""
        connection.finish()
        if connection.reusable and not self.retired and len(self._idle) < MAX_IDLE_CONNECTIONS:
            connection.idle_since = self.clock()
            self._idle.append(connection)
        else:
            connection.close()

    def suspect(self, problem: str) -> None:
        """Mark it unhealthy after a failed request, until a probe succeeds."""
        self.healthy = False
        self.problem = problem
        self.probe_now.set()

    async def probe(self) -> None:
        """Ask `/readyz` once, on a connection of its own, and note the answer."""
        draining = False
        try:
            healthy, draining, problem = await self._ask()
            self._silent_probes = 0
        except Silent as silence:
            self._silent_probes += 1
            healthy, problem = self.healthy and self._silent_probes < MAX_SILENT_PROBES, str(silence)
        except BackendError as error:
            healthy, problem = False, str(error)
        self.healthy, self.problem = healthy, problem
        self.stalled = not healthy and not draining and not self.entry.draining

    async def _ask(self) -> tuple[bool, bool, str]:
        """Ask for its readiness; return (ready, draining, problem)."""
        connection, self._probe = self._probe, None
        if connection is not None and not connection.reusable:
            connection.close()
            connection = None
        if connection is None:
            connection = await self.connect(fresh=True)
        try:
            head, _ = await connection.small_exchange(Outgoing("GET", b"/readyz", ()), self.times.probe_s)
            ready = head.status == 200
            phase = "" if ready or not connection.reusable else await connection.phase(self.times.probe_s)
        except BaseException:
            connection.close()
            raise
        self._probe = connection
        draining = phase in DRAINING_PHASES
        return ready, draining, "" if ready else f"/readyz answers {head.status}{phase and f', phase {phase}'}"

    def retire(self) -> None:
        """Remove it after it left the snapshot: running requests finish, idle connections close."""
        self.retired = True
        self._update_ready()
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        if self._probe is not None:
            self._probe.close()


Candidate = Backend | DataRank[Backend]
"""What the router chooses among."""
