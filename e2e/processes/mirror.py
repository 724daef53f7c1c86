"""Objects of a namespace on a real API server, in the shape in which the embedded cluster's kubelet reads and writes
them.

Reads are answered from a copy that watches keep. Writes change the copy at once and are sent in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from e2e.api.api_client import ApiClient, ApiRefused, Object
from stoker.operator.cluster.local.object_body import matches
from stoker.operator.cluster.local.watch_history import Record
from stoker.operator.domain.plan import Key, Ref
from stoker.operator.loop.store import key_of

KINDS = ("ConfigMap", "Secret", "PersistentVolumeClaim", "Service", "Pod")
"""Kinds that a kubelet reads; pods last, so that what they mount is there before."""
Write = Callable[[], Awaitable[object]]


class MirroredObjects:
    """The objects as an async context manager; the copy follows the API server while it is open."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.listeners: list[Callable[[Record], None]] = []
        self._objects: dict[Key, Object] = {}
        self._writes: asyncio.Queue[Write] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> MirroredObjects:
        for kind in KINDS:
            listed = await self.api.ask("GET", f"api/v1/namespaces/{self.namespace}/{kind.lower()}s")
            for item in listed["items"]:
                self._take("ADDED", {"kind": kind, "apiVersion": "v1", **item})
            self._tasks.append(asyncio.create_task(self._follow(kind, listed["metadata"]["resourceVersion"])))
        self._tasks.append(asyncio.create_task(self._send()))
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await self._writes.join()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def find(self, key: Key) -> Object | None:
        return self._objects.get(key)

    def of_kind(self, kind: str, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        found = (item for key, item in self._objects.items() if key.kind == kind)
        return [item for item in found if matches(item, labels)]

    def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        """Bind a pod to its node, the one change that a kubelet's cluster makes besides the status."""
        target = {"apiVersion": "v1", "kind": "Node", "name": body["spec"]["nodeName"]}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": ref.name}, "target": target}
        path = f"api/v1/namespaces/{ref.namespace}/pods/{ref.name}/binding"
        return self._change(ref, dict(body), lambda: self.api.ask("POST", path, binding))

    def update_status(self, ref: Ref, status: Object, resource_version: str | None = None) -> Object:
        body = {"metadata": {"uid": ref.uid}, "status": status}
        return self._change(
            ref,
            {"status": status},
            lambda: self.api.patch(ref.kind, ref.namespace, ref.name, body, "status"),
        )

    def delete(self, ref: Ref, *, grace_s: int | None = None) -> None:
        options = {"gracePeriodSeconds": grace_s, "preconditions": {"uid": ref.uid}}
        self._writes.put_nowait(lambda: self.api.delete(ref.kind, ref.namespace, ref.name, **options))

    def _change(self, ref: Ref, sections: Object, write: Write) -> Object:
        old = self._objects[Key(*ref[:3])]
        new = {**old, **{name: {**old.get(name, {}), **content} for name, content in sections.items()}}
        self._objects[Key(*ref[:3])] = new
        self._writes.put_nowait(write)
        return new

    async def _send(self) -> None:
        """Send the writes; what a gone object refuses is nothing."""
        while True:
            write = await self._writes.get()
            try:
                await write()
            except ApiRefused as refused:
                if refused.code not in (404, 409):
                    raise
            finally:
                self._writes.task_done()

    async def _follow(self, kind: str, version: str) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async for change, found in self.api.follow(kind, self.namespace, version):
                    version = found["metadata"]["resourceVersion"]
                    self._take(change, {"kind": kind, "apiVersion": "v1", **found})
            await asyncio.sleep(0.1)

    def _take(self, change: str, found: Object) -> None:
        key = key_of(found)
        if change == "DELETED":
            self._objects.pop(key, None)
        else:
            self._objects[key] = found
        record = Record(0, change, found)  # type: ignore[arg-type]
        for listener in list(self.listeners):
            listener(record)
