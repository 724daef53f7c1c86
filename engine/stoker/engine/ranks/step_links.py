"""The links between data-parallel ranks that compute the same steps: over them they agree on each step, tell signs of
life and learn which rank is lost.

Each rank is a core; rank 0 has a link to every other one and passes on what it hears. A thread reads. It wakes a core
that rests when another one asks for a step. While all rest, nothing is sent but the signs of life.

Made by `data_meeting`; owned by `data_executor`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from stoker.engine.errors import ExecutorLost
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.step_rounds import Proposal, RanksParted, StepRound, StepRounds
from stoker.engine.ranks.watch import LISTEN_S, RankLimits

log = logging.getLogger("stoker.engine")

BEAT_S = 1.0
"""Interval of signs of life."""
SETTLE_S = 2.0
"""Longest wait of a rank whose exchange failed for the name of the rank that is lost."""
LEFT_S = 5.0
"""Time in which all ranks end, once one has ended in good order."""
ASKS, BEATS, LEAVES, LOST = "asks", "beats", "leaves", "lost"


class StepLinks:
    """One rank's links."""

    def __init__(
        self,
        rank: int,
        size: int,
        links: Mapping[int, Link],
        *,
        limits: RankLimits = RankLimits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`links`: to all other ranks at rank 0, to rank 0 at the others."""
        self.rank, self.links, self.limits, self.clock = rank, dict(links), limits, clock
        self.rounds = StepRounds(rank, size)
        self.lost: str | None = None
        """The rank that is lost, and why."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called once, by the thread that reads."""
        self._left: dict[int, float] = {}
        """Ranks that have ended in good order, and when."""
        self._silence_s = dict.fromkeys(self.links, 0.0)
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for peer, link in self.links.items():
            self._selector.register(link, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._watch, name="data ranks", daemon=True)
        self._thread.start()

    # The core's threads.

    @property
    def wake_fd(self) -> int:
        """Readable when another rank asks for a step."""
        return self._woken.fileno()

    @property
    def wanted(self) -> bool:
        """Whether another rank waits for this one."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        with self._changed:
            return self.rounds.wanted

    def agree(self, tokens: int) -> StepRound:
        """Ask for the next step and wait until all ranks have. Raises ExecutorLost."""
        with self._changed:
            proposal = self.rounds.propose(tokens)
        self._send(_packed(ASKS, *proposal))
        since_s = self.clock()
        with self._changed:
            while (begun := self.rounds.take()) is None:
                self._check_missing(self.clock() - since_s)
                self._changed.wait(LISTEN_S)
        return begun

    def check(self) -> None:
        """Raise ExecutorLost if a rank is lost, or has ended and this one goes on."""
        if self.lost is not None:
            raise ExecutorLost(self.lost)
        if gone := [rank for rank, since_s in self._left.copy().items() if self.clock() - since_s > LEFT_S]:
            raise ExecutorLost(f"{_names(gone)} has ended")

    def blame(self, error: Exception) -> ExecutorLost:
        """This rank's error, or the loss of another rank that made it: waits a moment for the name."""
        until_s = self.clock() + SETTLE_S
        with self._changed:
            while self.lost is None and not self._left and self.clock() < until_s:
                self._changed.wait(LISTEN_S)
        return ExecutorLost(self.lost or f"data rank {self.rank}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Leave. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._send(_packed(LEAVES, self.rank))
        self._thread.join()
        for link in self.links.values():
            link.close()
        self._selector.close()
        self._wakes.close()
        self._woken.close()

    def _check_missing(self, waited_s: float) -> None:
        """Raise ExecutorLost where the next step cannot begin. The first one waits for ranks that still load."""
        self.check()
        missing, number = self.rounds.missing, self.rounds.number
        if gone := self._left.keys() & missing:
            raise ExecutorLost(f"{_names(gone)} has ended before step {number}")
        if number and waited_s > self.limits.step_s:
            raise ExecutorLost(f"{_names(missing)} has not begun step {number} for {waited_s:.0f} s")

    def _send(self, frame: bytes, but: int | None = None) -> None:
        """Send to every link but one. A rank that has gone is found by the thread."""
        for peer, link in self.links.items():
            if peer != but:
                with contextlib.suppress(LinkClosed):
                    link.send(frame)

    # The thread that reads.

    def _watch(self) -> None:
        beaten_s = listened_s = self.clock()
        while not self._closing.is_set() and self.lost is None:
            for key, _ in self._selector.select(LISTEN_S):
                self._read(key.data)
            now_s = self.clock()
            self._listen(min(now_s - listened_s, 2 * LISTEN_S))
            listened_s = now_s
            if now_s - beaten_s >= BEAT_S:
                beaten_s = now_s
                self._send(_packed(BEATS, self.rank))

    def _read(self, peer: int) -> None:
        try:
            for frame in self.links[peer].arrived():
                self._silence_s[peer] = 0.0
                self._take(peer, frame)
        except LinkClosed:
            self._selector.unregister(self.links[peer])
            self._silence_s.pop(peer)
            if peer not in self._left:
                self._lose(f"data rank {peer} has ended")
        except (RanksParted, ValueError, TypeError) as error:
            self._lose(f"data rank {peer}: {error}" if not isinstance(error, RanksParted) else str(error))

    def _take(self, peer: int, frame: bytes) -> None:
        kind, *values = msgpack.unpackb(frame)
        if kind != BEATS and self.rank == 0:
            self._send(frame, but=peer)
        match kind:
            case "asks":
                with self._changed:
                    self.rounds.hear(Proposal(*values))
                    self._changed.notify_all()
                with contextlib.suppress(BlockingIOError):
                    self._wakes.send(b"1")
            case "leaves":
                with self._changed:
                    (left,) = values
                    self._left.setdefault(left, self.clock())
                    self._changed.notify_all()
            case "lost":
                self._lose(*values)

    def _listen(self, passed_s: float) -> None:
        """Count the silence of those that this rank hears; only time in which this thread ran."""
        for peer in self._silence_s:
            self._silence_s[peer] += passed_s
        silent = [peer for peer, silence_s in self._silence_s.items() if silence_s > self.limits.silent_s]
        if silent:
            self._lose(f"{_names(silent)} is silent for {self._silence_s[silent[0]]:.0f} s")

    def _lose(self, verdict: str) -> None:
        if self.lost is not None:
            return
        log.error("a data-parallel rank is lost: %s", verdict)
        with self._changed:
            self.lost = verdict
            self._changed.notify_all()
        if self.rank == 0:
            self._send(_packed(LOST, verdict))
        self.on_lost()


def _packed(kind: str, *values: Any) -> bytes:
    packed: bytes = msgpack.packb([kind, *values])
    return packed


def _names(ranks: Any) -> str:
    return ", ".join(f"data rank {rank}" for rank in sorted(ranks))
