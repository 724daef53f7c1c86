"""The embedded cluster as a `Cluster`: the object store, and pods reached at their local addresses.

Made by the supervisor and called by the operator's loop. Owns no object: `objects` does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from stoker.operator.cluster.interface import Keep, Listing, PodUnreachable, WatchEvent
from stoker.operator.cluster.local.addresses import Addresses, Host
from stoker.operator.cluster.local.object_body import copy_plain
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.local.pod_address import container_port, host_of
from stoker.operator.cluster.local.rewrite import Rewriter
from stoker.operator.cluster.local.watch_history import Record
from stoker.operator.cluster.pod_http import PodHttp, http_port
from stoker.operator.domain.clock import Clock
from stoker.operator.domain.plan import ControlCall, Key, Object, Ref

BOOKMARK_S = 15.0


class LocalCluster:
    """A cluster whose calls take effect before they return. Returned objects are copies."""

    def __init__(self, objects: ObjectStore, addresses: Addresses, pods: PodHttp, clock: Clock) -> None:
        self.objects = objects
        self.addresses = addresses
        self.pods = pods
        self.clock = clock

    async def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        keep: Keep | None = None,
    ) -> Listing:
        keep = keep or copy_plain
        items = tuple(keep(item) for item in self.objects.of_kind(kind, namespace, labels))
        return Listing(items, str(self.objects.version))

    async def watch(
        self, kind: str, resource_version: str, *, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Yield changes for ever, and a bookmark after each silence of 15 s."""
        changed = asyncio.Event()
        waiting: deque[Record] = deque(self.objects.since(int(resource_version)))
        version = int(resource_version)
        heard_at = self.clock.monotonic()

        def take(record: Record) -> None:
            waiting.append(record)
            changed.set()

        self.objects.listeners.append(take)
        try:
            while True:
                while waiting:
                    record = waiting.popleft()
                    version = max(version, record.version)
                    if record.object["kind"] == kind and namespace in (None, record.object["metadata"]["namespace"]):
                        heard_at = self.clock.monotonic()
                        yield WatchEvent(record.type, copy_plain(record.object))
                changed.clear()
                left_s = (
                    heard_at + BOOKMARK_S - self.clock.monotonic()
                )  # changes of other kinds do not break the silence
                if left_s <= 0 or not await self._within(changed, left_s):
                    heard_at = self.clock.monotonic()
                    yield WatchEvent("BOOKMARK", {"kind": kind, "metadata": {"resourceVersion": str(version)}})
        finally:
            self.objects.listeners.remove(take)

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return _copied(self.objects.get(Key(kind, namespace, name)))

    async def create(self, body: Object) -> Object:
        return _copied(self.objects.create(body))

    async def apply(self, body: Object, *, manager: str) -> Object:
        return _copied(self.objects.apply(body, manager))

    async def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        return _copied(self.objects.patch(ref, body))

    async def update_status(self, ref: Ref, status: Object, *, resource_version: str | None = None) -> Object:
        return _copied(self.objects.update_status(ref, status, resource_version))

    async def scale(self, ref: Ref, replicas: int) -> None:
        self.objects.scale(ref, replicas)

    async def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
        left = self.objects.delete(ref, grace_s=grace_s)
        return None if left is None else _copied(left)

    async def call(self, call: ControlCall) -> Mapping[str, Any]:
        """Send a control call. Its body is rewritten like a mounted configuration: it may name pods."""
        return await self.pods.call(self._url(call.pod), replace(call, body=self._as_seen_here(call)))

    async def poll(self, pod: Ref) -> Mapping[str, Any]:
        return await self.pods.poll(self._url(pod), pod.uid)

    def _as_seen_here(self, call: ControlCall) -> Mapping[str, Any]:
        host = Host("pod", call.pod.namespace, call.pod.name)
        rewritten: Mapping[str, Any] = Rewriter(call.pod.namespace, host, {}, self.addresses).json(call.body)
        return rewritten

    def _url(self, ref: Ref) -> str:
        pod = self.objects.find(Key("Pod", ref.namespace, ref.name))
        if pod is None or pod["metadata"]["uid"] != ref.uid:
            raise PodUnreachable(f"pod {ref.namespace}/{ref.name} is gone")
        host = host_of(pod)
        port = self.addresses.port(host, container_port(pod, http_port(pod)))
        return f"http://{self.addresses.ip(host)}:{port}"

    async def _within(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for an event; whether it came in time."""
        if event.is_set():
            return True
        coming = asyncio.ensure_future(event.wait())
        timer = asyncio.ensure_future(self.clock.sleep(seconds))
        try:
            await asyncio.wait((coming, timer), return_when=asyncio.FIRST_COMPLETED)
            return event.is_set()
        finally:
            coming.cancel()
            timer.cancel()


def _copied(resource: Object) -> Object:
    copied: Object = copy_plain(resource)
    return copied
