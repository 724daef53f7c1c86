"""Services: each port of a ClusterIP Service is a TCP forwarder to Ready pods. Pods of headless Services are reached
at their own addresses.

Owned by the supervisor; follows the objects of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping
from typing import Any

from stoker.operator.cluster.interface import NotFound
from stoker.operator.cluster.local.addresses import Addresses, Host
from stoker.operator.cluster.local.object_body import matches
from stoker.operator.cluster.local.object_storage import StateFolderError
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.local.pod_address import container_port, host_of
from stoker.operator.cluster.local.stored_write import RETRY_S
from stoker.operator.cluster.local.watch_history import Record
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.operator.loop.store import key_of

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 1024


class Services:
    """Opens a listener per Service port, closes it with the Service."""

    def __init__(self, objects: ObjectStore, addresses: Addresses) -> None:
        self.objects = objects
        self.addresses = addresses
        self._servers: dict[tuple[Key, int], asyncio.Server] = {}
        self._streams: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._turn = itertools.count()

    async def run(self) -> None:
        """Forward until cancelled; then close every listener and stream."""
        self.objects.listeners.append(self._on_change)
        self._changed.set()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    await self._adjust()
                except StateFolderError:
                    asyncio.get_running_loop().call_later(RETRY_S, self._changed.set)
        finally:
            self.objects.listeners.remove(self._on_change)
            self._close(list(self._servers))
            for stream in self._streams:
                stream.cancel()

    def _on_change(self, record: Record) -> None:
        if record.object["kind"] == "Service":
            self._changed.set()

    async def _adjust(self) -> None:
        wanted: dict[tuple[Key, int], int | str] = {}
        for service in self.objects.of_kind("Service"):
            if service.get("spec", {}).get("clusterIP") == "None" or not service.get("spec", {}).get("selector"):
                continue
            self._give_address(service)
            for port in service["spec"].get("ports") or ():
                wanted[key_of(service), int(port["port"])] = port.get("targetPort", port["port"])
        self._close([place for place in self._servers if place not in wanted])
        for place in wanted:
            if place not in self._servers:
                await self._open(*place)

    def _give_address(self, service: Object) -> None:
        ip = self.addresses.ip(_host(key_of(service)))
        if service["spec"].get("clusterIP") != ip:
            with contextlib.suppress(NotFound):
                ref = Ref(*key_of(service), service["metadata"]["uid"])
                self.objects.patch(ref, {"spec": {"clusterIP": ip}})

    async def _open(self, key: Key, port: int) -> None:
        host = _host(key)
        address, local_port = self.addresses.ip(host), self.addresses.port(host, port)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                await self._forward(key, port, reader, writer)
            finally:
                self._streams.discard(task)

        try:
            self._servers[key, port] = await asyncio.start_server(accept, address, local_port)
        except OSError as error:
            log.error("service %s/%s: port %d cannot be opened: %s", key.namespace, key.name, port, error)

    def _close(self, places: list[tuple[Key, int]]) -> None:
        for place in places:
            self._servers.pop(place).close()

    async def _forward(self, key: Key, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection to the next Ready pod; close it at once if there is none."""
        try:
            upstream = await self._connect(key, port)
            if upstream is None:
                return
            up_reader, up_writer = upstream
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pump(reader, up_writer))
                    both.create_task(_pump(up_reader, writer))
            finally:
                up_writer.close()
        except* OSError:
            pass
        finally:
            writer.close()

    async def _connect(self, key: Key, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        service = self.objects.find(key)
        pods = ready_pods(self.objects, service) if service is not None else []
        turn = next(self._turn)
        for index in range(len(pods)):
            pod = pods[(turn + index) % len(pods)]
            try:
                return await asyncio.open_connection(*self._target(pod, service or {}, port))
            except (OSError, ValueError) as error:
                log.debug("service %s: pod %s: %s", key.name, pod["metadata"]["name"], error)
        return None

    def _target(self, pod: Object, service: Mapping[str, Any], port: int) -> tuple[str, int]:
        ports = {int(known["port"]): known.get("targetPort", known["port"]) for known in service["spec"]["ports"]}
        host = host_of(pod)
        return self.addresses.ip(host), self.addresses.port(host, container_port(pod, ports[port]))


def ready_pods(objects: ObjectStore, service: Object) -> list[Object]:
    """List the pods behind a Service: Ready and not being deleted."""
    pods = objects.of_kind("Pod", service["metadata"]["namespace"])
    selected = [pod for pod in pods if matches(pod, service["spec"]["selector"])]
    return [pod for pod in selected if _is_ready(pod) and not pod["metadata"].get("deletionTimestamp")]


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _host(key: Key) -> Host:
    return Host("service", key.namespace, key.name)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection, and its end."""
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
