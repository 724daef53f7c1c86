"""Keeps one kind of the store equal to the cluster: list, then watch; list again when the watch cannot go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from stoker.operator.backoff import Jitter, delay_s
from stoker.operator.clock import Clock
from stoker.operator.cluster.seam import Cluster, ClusterError, Gone, TooManyRequests, WatchEvent
from stoker.operator.kept import kept
from stoker.operator.store import Store, key_of, version_of

log = logging.getLogger(__name__)

MAX_SILENCE_S = 75.0
"""A watch that brings neither event nor bookmark for so long is taken for dead."""
LONGEST_BACKOFF_S = 30.0


class Informer:
    """One kind. The store's listeners hear of changes; `synced` is set after the first list."""

    def __init__(
        self, cluster: Cluster, kind: str, store: Store, clock: Clock, jitter: Jitter, *, namespace: str | None = None
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
        """Seconds without a sign of life, a failure that was noticed and will be tried again included: the operator's liveness."""
        return self.clock.monotonic() - max(self._heard_at, self._failed_at)

    async def run(self) -> None:
        """Follow the cluster for ever; failures are waited out."""
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
        listing = await self.cluster.list(self.kind, namespace=self.namespace, keep=kept)
        version = int(listing.resource_version)
        self.store.replace(self.kind, listing.items, version, self.namespace)
        self._hear()
        self.synced.set()
        return listing.resource_version

    async def _watch(self, version: str) -> str:
        """Take events until the server ends the watch; the version to go on from."""
        events = self.cluster.watch(self.kind, version, namespace=self.namespace)
        while True:
            event = await self._next(events)
            if event is None:
                return version
            self._take(event)
            self._hear()
            version = event.object["metadata"]["resourceVersion"]

    async def _next(self, events: AsyncIterator[WatchEvent]) -> WatchEvent | None:
        """The next event, or None when the watch ended.

        Raises:
            ClusterError: the watch failed, or was silent for too long.
        """
        following = asyncio.ensure_future(anext(events, None))
        silence = asyncio.ensure_future(self.clock.sleep(MAX_SILENCE_S))
        try:
            await asyncio.wait((following, silence), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                raise ClusterError(f"the watch was silent for {MAX_SILENCE_S:g} s")
            return following.result()
        finally:
            silence.cancel()
            if not following.done():
                following.cancel()

    def _take(self, event: WatchEvent) -> None:
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            metadata = event.object["metadata"]
            self.store.remove(key_of(event.object), metadata["uid"], version_of(event.object), last=event.object)
            return
        self.store.put(event.object)

    def _hear(self) -> None:
        self._heard_at = self.clock.monotonic()
