"""The queue of keys that wait for a pass: each once, never in two workers, with delays and backoff.

Owned by the loop: informers and poller add keys, workers take them.
"""

from __future__ import annotations

import asyncio
import heapq

from stoker.operator.domain.backoff import Jitter, delay_s
from stoker.operator.domain.clock import Clock
from stoker.operator.domain.plan import Key


class WorkQueue:
    """Used from one event loop, with one task that runs `keep_time`.

    A key that is added while a worker has it comes back once that worker is done.
    """

    def __init__(self, clock: Clock, jitter: Jitter) -> None:
        self.clock = clock
        self.jitter = jitter
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._wanted: set[Key] = set()
        self._busy: set[Key] = set()
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._resting: list[tuple[float, Key]] = []
        """Busy keys with the time at which they are free again."""
        self._failures: dict[Key, int] = {}
        self._wakes_at = float("inf")
        """Time at which `keep_time` looks again, unless something is due sooner."""
        self._sooner = asyncio.Event()

    def add(self, key: Key) -> None:
        """Queue `key`."""
        if key in self._wanted:
            return
        self._wanted.add(key)
        if key not in self._busy:
            self._ready.put_nowait(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue `key` after a delay; an earlier due time stays."""
        if seconds <= 0:
            self.add(key)
            return
        due = self.clock.monotonic() + seconds
        if self._due.get(key, float("inf")) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, key))
        self._wake_keeper(due)

    def retry(self, key: Key, at_least_s: float = 0.0) -> float:
        """Queue `key` again after its backoff, and return the delay in seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        seconds = max(delay_s(self._failures[key], self.jitter), at_least_s)
        self.add_after(key, seconds)
        return seconds

    def forget(self, key: Key) -> None:
        """Reset the backoff of `key` after a pass that went well."""
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """Take the next key; no other worker gets it until `done`."""
        key = await self._ready.get()
        self._wanted.discard(key)
        self._busy.add(key)
        return key

    async def keep_time(self) -> None:
        """Queue delayed and rested keys when they are due, for ever. Each ready key wakes one worker."""
        while True:
            self._take_due()
            self._sooner.clear()
            self._wakes_at = min((heap[0][0] for heap in (self._heap, self._resting) if heap), default=float("inf"))
            await self._wait()

    def done(self, key: Key, rest_s: float = 0.0) -> None:
        """Return `key` after a pass; no worker gets it again before `rest_s` have passed."""
        if rest_s > 0:
            free = self.clock.monotonic() + rest_s
            heapq.heappush(self._resting, (free, key))
            self._wake_keeper(free)
            return
        self._busy.discard(key)
        if key in self._wanted:
            self._ready.put_nowait(key)

    @property
    def idle(self) -> bool:
        """Whether no key is ready and no worker has one; delayed keys may wait."""
        self._take_due()
        return self._ready.empty() and not self._busy

    @property
    def delayed(self) -> int:
        """Number of keys that wait for their due time."""
        return len(self._due)

    def __len__(self) -> int:
        """Number of ready keys."""
        return self._ready.qsize()

    def _take_due(self) -> None:
        now = self.clock.monotonic()
        while self._resting and self._resting[0][0] <= now:
            self.done(heapq.heappop(self._resting)[1])
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:  # not replaced by an earlier time
                del self._due[key]
                self.add(key)

    def _wake_keeper(self, due: float) -> None:
        if due < self._wakes_at:
            self._sooner.set()

    async def _wait(self) -> None:
        waits: list[asyncio.Future[object]] = [asyncio.ensure_future(self._sooner.wait())]
        if self._wakes_at < float("inf"):
            seconds = max(0.0, self._wakes_at - self.clock.monotonic())
            waits.append(asyncio.ensure_future(self.clock.sleep(seconds)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
