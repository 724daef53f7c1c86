"""The informer of one kind: list, then watch; list again when the watch cannot go on.

Owned by the loop. It writes into the store and reports each change; it makes no decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from stoker.operator.cluster.interface import Cluster, ClusterError, Gone, TooManyRequests, WatchEvent
from stoker.operator.domain.backoff import Jitter, delay_s
from stoker.operator.domain.clock import Clock
from stoker.operator.domain.plan import Key, Object
from stoker.operator.loop.store import key_of, version_of

log = logging.getLogger(__name__)

MAX_SILENCE_S = 120.0
"""A watch without event, bookmark or end for so long counts as dead."""
SHORTEST_WATCH_S = 0.5
"""A watch that the server ends sooner is repeated after a pause."""
EVENTS_AT_ONCE = 32
"""Events after which the event loop runs its other tasks (lease, probes, other kinds)."""
LONGEST_BACKOFF_S = 30.0


class Sink(Protocol):
    """What an informer writes into: the store, or a projection of one kind."""

    def pruned(self, resource: Object, /) -> Object: ...
    def put(self, resource: Object) -> bool: ...
    def remove(self, key: Key, uid: str, version: int, /, *, last: Object | None) -> bool: ...
    def forget_unlisted(self, kind: str, items: Iterable[Object], version: int, namespace: str | None, /) -> None: ...


class Informer:
    """Keeps one kind of a sink equal to the cluster; `synced` is set after the first list."""

    def __init__(
        self, cluster: Cluster, kind: str, store: Sink, clock: Clock, jitter: Jitter, *, namespace: str | None = None
    ) -> None:
        self.cluster = cluster
        self.kind = kind
        self.store = store
        self.clock = clock
        self.jitter = jitter
        self.namespace = namespace
        self.synced = asyncio.Event()
        self._heard_at = clock.monotonic()
        self._failed_at = self._heard_at

    def silent_s(self) -> float:
        """Seconds since the last list, event or bookmark."""
        return self.clock.monotonic() - self._heard_at

    def stuck_s(self) -> float:
        """Seconds without a sign of life, for the operator's liveness; a noticed failure is a sign of life too."""
        return self.clock.monotonic() - max(self._heard_at, self._failed_at)

    async def run(self) -> None:
        """Follow the cluster for ever, with a backoff after failures."""
        version: str | None = None
        failures = 0
        while True:
            heard = self._heard_at
            wait_s = 0.0
            try:
                if version is None:
                    version = await self._list()
                version = await self._watch(version)
            except Gone:
                version = None
                failures = 1 if self._heard_at > heard else failures + 1
            except ClusterError as error:
                log.warning("watching %s failed, listing again: %s", self.kind, error)
                version = None
                failures = 1 if self._heard_at > heard else failures + 1
                wait_s = (error.retry_after_s or 0.0) if isinstance(error, TooManyRequests) else 0.0
            if version is None:
                self._failed_at = self.clock.monotonic()
                delay = delay_s(failures, self.jitter, longest_s=LONGEST_BACKOFF_S)
                await self.clock.sleep(max(delay, min(wait_s, LONGEST_BACKOFF_S)))

    async def _list(self) -> str:
        listing = await self.cluster.list(self.kind, namespace=self.namespace, keep=self.store.pruned)
        version = int(listing.resource_version)
        self.store.forget_unlisted(self.kind, listing.items, version, self.namespace)
        for number, item in enumerate(listing.items):
            self.store.put(item)
            if number % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._note_life()
        self.synced.set()
        return listing.resource_version

    async def _watch(self, version: str) -> str:
        """Take events until the server ends the watch, and return the version to go on from.

        Raises:
            ClusterError: the watch failed, or was silent for too long.
        """
        begun = self.clock.monotonic()
        following = asyncio.ensure_future(self._follow(version))
        try:
            while not following.done():
                left_s = max(begun, self._heard_at) + MAX_SILENCE_S - self.clock.monotonic()
                if left_s <= 0:
                    raise ClusterError(f"the watch was silent for {MAX_SILENCE_S:g} s")
                silence = asyncio.ensure_future(self.clock.sleep(left_s))
                try:
                    await asyncio.wait((following, silence), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    silence.cancel()
            version = following.result()
            self._note_life()
            if self.clock.monotonic() - begun < SHORTEST_WATCH_S:
                await self.clock.sleep(SHORTEST_WATCH_S)
            return version
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, version: str) -> str:
        """Take every event, and let other tasks run now and then."""
        taken = 0
        async for event in self.cluster.watch(self.kind, version, namespace=self.namespace):
            self._take(event)
            self._note_life()
            version = event.object["metadata"]["resourceVersion"]
            taken += 1
            if taken % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return version

    def _take(self, event: WatchEvent) -> None:
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            metadata = event.object["metadata"]
            self.store.remove(key_of(event.object), metadata["uid"], version_of(event.object), last=event.object)
            return
        self.store.put(event.object)

    def _note_life(self) -> None:
        self._heard_at = self.clock.monotonic()
