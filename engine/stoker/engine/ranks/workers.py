"""The further ranks: processes of this pod, links to those of other pods, and the thread that watches them. A lost rank
ends them all.

Made by `core.build` before the plan, which needs the memory of every rank; then owned by the executor.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.executor import RankState
from stoker.engine.ranks.block_calls import (
    BlockReport,
    BlocksOpened,
    CallEnded,
    LinkLost,
    LinkOpened,
    PeersLost,
    TierOpened,
)
from stoker.engine.ranks.digests import TokenDigests
from stoker.engine.ranks.failures import StepFailure, StepFailures
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.pod_links import PodLinks
from stoker.engine.ranks.pod_place import PodPlace
from stoker.engine.ranks.rendezvous import LOOPBACK
from stoker.engine.ranks.watch import LISTEN_S, RankLimits, RankWatch
from stoker.engine.ranks.wire import (
    Beat,
    Failed,
    Hello,
    Join,
    RankMessage,
    Ready,
    StepFailed,
    WorkerMessage,
    pack,
    unpack,
)

log = logging.getLogger("stoker.engine")

STOP_S = 5.0
"""Time that ranks get to end after their links have closed."""
POLL_S = 0.05
"""How often a waiting thread looks whether a rank is lost."""

WorkerCommand = Callable[[int, str, int], Sequence[str]]
"""(rank, device, number of the open socket to rank 0) -> command line."""


def worker_command(rank: int, device: str, link: int) -> Sequence[str]:
    level = logging.getLevelName(logging.getLogger().level)
    module = [sys.executable, "-m", "stoker.engine.worker_main"]
    return [*module, "--rank", str(rank), "--device", device, "--link", str(link), "--log-level", level]


class Workers:
    """The further ranks of a group of `size`: numbers 1 to `size - 1`."""

    def __init__(
        self,
        size: int,
        device: str,
        *,
        command: WorkerCommand = worker_command,
        limits: RankLimits = RankLimits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
        place: PodPlace | None = None,
    ) -> None:
        """Start the processes; they load nothing yet.

        Args:
            place: of this pod, the leader, in a replica of several: ranks of the other pods come by themselves.
        """
        self.size, self.device, self.clock = size, device, clock
        self.watch = RankWatch(size, limits)
        self.digests = TokenDigests()
        self.failures = StepFailures(size)
        self.lost: str | None = None
        """The rank that is lost, and why."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called once by the watching thread, when all further ranks have been killed."""
        self.block_reports: queue.SimpleQueue[tuple[int, BlockReport | BaseException]] = queue.SimpleQueue()
        """What ranks tell of blocks that they move, for the core's thread."""
        self.links: dict[int, Link] = {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._free_bytes: dict[int, int | None] = {}
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._pods = PodLinks(place) if place is not None else None
        for rank in place.others if place is not None else ():
            self.watch.ranks[rank].joined = False
        for rank in range(1, size if place is None else place.ranks_per_pod):
            self._start(rank, command)
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def _start(self, rank: int, command: WorkerCommand) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.processes[rank] = subprocess.Popen(
                command(rank, self.device, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for this process, which ends its ranks
            )
        self.links[rank] = Link(ours)
        self.watch.ranks[rank].pid = self.processes[rank].pid
        self._selector.register(ours, selectors.EVENT_READ, rank)

    # Called by the engine's thread.

    @property
    def host(self) -> str:
        """This pod's address towards the others; the loopback interface without them."""
        remote = next((rank for rank in self.links if rank not in self.processes), None)
        return LOOPBACK if remote is None else str(self.links[remote].end.getsockname()[0])

    @property
    def port(self) -> int | None:
        """Port at which ranks of other pods join; None for a replica of one pod."""
        return None if self._pods is None else self._pods.port

    @property
    def missing_pods(self) -> tuple[int, ...]:
        """Numbers of the pods of which not all ranks have joined."""
        return () if self._pods is None else self._pods.missing_pods

    def smallest_free_bytes(self, waiting: Callable[[tuple[int, ...]], None] = lambda _: None) -> int | None:
        """Wait until every further rank is up; return the least free memory of their devices, where they know it.

        `waiting` is called with the numbers of the pods that have not joined yet.
        """

        def up() -> bool:
            waiting(self.missing_pods)
            return len(self._free_bytes) == self.size - 1

        self.wait(up)
        return min((free for free in self._free_bytes.values() if free is not None), default=None)

    def wait_ready(self) -> None:
        """Wait until every further rank has loaded. Raises ExecutorLost."""
        self.wait(lambda: all(self.watch.ranks[rank].ready for rank in self.links))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for what another thread does. Raises ExecutorLost where a rank is lost before."""
        while not condition():
            self.check()
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raise ExecutorLost if a rank is lost."""
        if self.lost is not None:
            raise ExecutorLost(self.lost)

    def send(self, message: RankMessage) -> None:
        """Send to every further rank. One that has gone is found by the watch."""
        frame = pack(message)
        for link in self.links.values():
            try:
                link.send(frame)
            except LinkClosed:
                return

    def send_to(self, rank: int, message: RankMessage) -> None:
        """Send to one further rank, in order with what `send` sends. One that has gone is found by the watch."""
        with contextlib.suppress(LinkClosed):
            self.links[rank].send(pack(message))

    def blame(self, error: Exception) -> ExecutorLost:
        """Rank 0's error, or the loss of another rank that made it: waits a moment for the verdict."""
        self.watch.failed(0, f"{type(error).__name__}: {error}", self.clock())
        self._closed_or_lost()
        return ExecutorLost(self.lost or f"rank 0: {error}")

    def _closed_or_lost(self) -> None:
        while self.lost is None and self._thread.is_alive():
            time.sleep(POLL_S)

    def states(self) -> tuple[RankState, ...]:
        """The further ranks as of now."""
        return tuple(
            RankState(rank, record.pid, record.done, round(record.silence_s, 2))
            for rank, record in self.watch.ranks.items()
            if rank
        )

    def close(self) -> None:
        """End the processes. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        if self._pods is not None:
            self._pods.close()
            self._take_joined()
        for link in self.links.values():
            link.close()  # a worker ends when its link does
        until_s = self.clock() + STOP_S
        for process in self.processes.values():
            try:
                process.wait(max(until_s - self.clock(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._selector.close()

    # The watching thread.

    def _watch(self) -> None:
        while not self._closing.is_set() and self.lost is None:
            self._take_joined()
            for key, _ in self._selector.select(LISTEN_S):
                self._read(key.data)
            now_s = self.clock()
            for rank, process in self.processes.items():
                self.watch.ranks[rank].exit_code = process.poll()
            self.watch.listen(now_s)
            self.watch.differing = self.digests.differing(self.size)
            self.watch.parted = self.failures.parted(now_s)
            verdict = self.watch.verdict(now_s)
            if verdict is not None:
                self._lose(verdict)

    def _read(self, rank: int) -> None:
        try:
            for frame in self.links[rank].arrived():
                self._take(rank, unpack(frame))
        except LinkClosed as error:
            self._selector.unregister(self.links[rank])
            if rank not in self.processes:
                log.info("rank %d: %s", rank, error)
                self.watch.ranks[rank].closed = True

    def _take_joined(self) -> None:
        """Take the ranks of other pods that have come."""
        while self._pods is not None and not self._pods.joined.empty():
            join, link = self._pods.joined.get()
            self._take(join.rank, join)
            self.links[join.rank] = link
            self._selector.register(link, selectors.EVENT_READ, join.rank)

    def _take(self, rank: int, message: WorkerMessage) -> None:
        record = self.watch.heard(rank)
        match message:
            case Join(pid=pid, pod=pod):
                record.joined, record.pid, record.pod = True, pid, pod
            case Hello(free_bytes=free_bytes):
                self._free_bytes[rank] = free_bytes
            case Ready():
                record.ready = True
            case Beat(begun=begun, done=done, digest=digest):
                record.begun, record.done = begun, done
                self.digests.report(rank, done, digest)
            case StepFailed(steps=steps, calls=calls, error=error):
                self.failures.report(rank, steps, StepFailure(calls, error, self.clock()))
            case Failed(error=error):
                self.watch.failed(rank, error, self.clock())
            case BlocksOpened() | LinkOpened() | CallEnded() | LinkLost() | PeersLost() | TierOpened():
                self.block_reports.put((rank, message))

    def _lose(self, verdict: str) -> None:
        """End all further ranks, so that rank 0 waits for none of them."""
        log.error("a rank is lost: %s", verdict)
        for process in self.processes.values():
            process.kill()
        for link in self.links.values():
            link.cut()  # ranks of other pods end when their link does
        self.lost = verdict
        self.on_lost()
