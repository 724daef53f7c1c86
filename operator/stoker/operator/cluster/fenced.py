"""A `Cluster` that rejects writes of a replica that does not hold the Lease.

It asks the elector right before each write and each control call, and raises `NotLeading`. Reads pass through. Made by
`service/program.py` around the Kubernetes cluster.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from stoker.operator.cluster.interface import Cluster, ClusterError, Keep, Listing, WatchEvent
from stoker.operator.domain.plan import ControlCall, Object, Ref


class NotLeading(ClusterError):
    """This replica does not hold the Lease."""


class FencedCluster:
    """A cluster that calls `may_write` right before each write and each control call."""

    def __init__(self, cluster: Cluster, may_write: Callable[[], bool]) -> None:
        self.cluster = cluster
        self.may_write = may_write

    async def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        keep: Keep | None = None,
    ) -> Listing:
        return await self.cluster.list(kind, namespace=namespace, labels=labels, keep=keep)

    def watch(self, kind: str, resource_version: str, *, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        return self.cluster.watch(kind, resource_version, namespace=namespace)

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return await self.cluster.get(kind, namespace, name)

    async def create(self, body: Object) -> Object:
        self._guard()
        return await self.cluster.create(body)

    async def apply(self, body: Object, *, manager: str) -> Object:
        self._guard()
        return await self.cluster.apply(body, manager=manager)

    async def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        self._guard()
        return await self.cluster.patch(ref, body)

    async def update_status(self, ref: Ref, status: Object, *, resource_version: str | None = None) -> Object:
        self._guard()
        return await self.cluster.update_status(ref, status, resource_version=resource_version)

    async def scale(self, ref: Ref, replicas: int) -> None:
        self._guard()
        await self.cluster.scale(ref, replicas)

    async def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
        self._guard()
        return await self.cluster.delete(ref, grace_s=grace_s)

    async def call(self, call: ControlCall) -> Mapping[str, Any]:
        self._guard()
        return await self.cluster.call(call)

    async def poll(self, pod: Ref) -> Mapping[str, Any]:
        return await self.cluster.poll(pod)

    def _guard(self) -> None:
        if not self.may_write():
            raise NotLeading("another replica leads")
