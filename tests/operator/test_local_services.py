"""Services of the embedded cluster: connections reach only Ready pods, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stoker.operator.cluster.local.addresses import Addresses, Host
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.local.reservations import Reservations
from stoker.operator.domain.plan import Key, Object
from stoker.operator.service.local.services import Services
from testing.operator.cluster_contract import eventually, ref_of
from tests.operator.test_cluster import new_store

HOST = Host("service", "default", "web")


def service(**spec: Any) -> Object:
    ports = [{"name": "http", "port": 8000, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"selector": {"app": "web"}, "ports": ports, **spec},
    }


def ready_pod(objects: ObjectStore, name: str, *, ready: bool = True) -> Object:
    container = {"name": "main", "command": ["x"], "ports": [{"name": "http", "containerPort": 9000}]}
    made = objects.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": {"app": "web"}},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
    )
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return objects.update_status(ref_of(made), {"phase": "Running", "conditions": conditions})


@asynccontextmanager
async def echo(addresses: Addresses, name: str) -> AsyncIterator[None]:
    """Run a pod's server: it answers with its own name, then echoes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(name.encode() + b":")
        writer.write(await reader.read())
        writer.close()

    host = Host("pod", "default", name)
    server = await asyncio.start_server(answer, addresses.ip(host), addresses.port(host, 9000))
    try:
        yield
    finally:
        server.close()


async def ask(addresses: Addresses, text: str) -> str:
    """Return the Service's answer; empty when it closes the connection."""
    try:
        reader, writer = await asyncio.open_connection(addresses.ip(HOST), addresses.port(HOST, 8000))
    except ConnectionResetError:
        return ""
    try:
        writer.write(text.encode())
        writer.write_eof()
        return (await asyncio.wait_for(reader.read(), 30)).decode()
    except ConnectionResetError:
        return ""
    finally:
        writer.close()


def run(mode: str, story: Callable[[ObjectStore, Addresses], Awaitable[None]]) -> None:
    async def whole() -> None:
        with Reservations() as names:
            objects, addresses = new_store(), Addresses(mode, names.take)  # type: ignore[arg-type]
            task = asyncio.ensure_future(Services(objects, addresses).run())
            try:
                await story(objects, addresses)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(whole())


async def opened(addresses: Addresses) -> None:
    async def answers() -> bool:
        try:
            await ask(addresses, "")
        except ConnectionRefusedError:
            return False
        return True

    await eventually(answers)


@pytest.mark.parametrize("mode", ["loopback", "ports"])
def test_connections_go_to_ready_pods_in_turn(mode: str) -> None:
    async def story(objects: ObjectStore, addresses: Addresses) -> None:
        objects.create(service())
        for name in ("a", "b"):
            ready_pod(objects, name)
        ready_pod(objects, "c", ready=False)
        async with echo(addresses, "a"), echo(addresses, "b"), echo(addresses, "c"):
            await opened(addresses)
            answers = {await ask(addresses, "hello" * 50_000) for _ in range(4)}
        assert answers == {"a:" + "hello" * 50_000, "b:" + "hello" * 50_000}
        assert objects.get(Key("Service", "default", "web"))["spec"]["clusterIP"] == addresses.ip(HOST)

    run(mode, story)


def test_without_a_ready_pod_a_connection_is_closed() -> None:
    async def story(objects: ObjectStore, addresses: Addresses) -> None:
        objects.create(service())
        await opened(addresses)
        assert await ask(addresses, "hello") == ""

    run("loopback", story)


def test_a_pod_that_does_not_answer_is_passed_over() -> None:
    async def story(objects: ObjectStore, addresses: Addresses) -> None:
        objects.create(service())
        for name in ("a", "b"):
            ready_pod(objects, name)
        async with echo(addresses, "b"):
            await opened(addresses)
            assert [await ask(addresses, "x") for _ in range(3)] == ["b:x"] * 3

    run("loopback", story)


def test_a_deleted_service_closes_its_port() -> None:
    async def story(objects: ObjectStore, addresses: Addresses) -> None:
        made = objects.create(service())
        await opened(addresses)
        objects.delete(ref_of(made))

        async def refused() -> bool:
            try:
                await ask(addresses, "")
            except ConnectionRefusedError:
                return True
            return False

        await eventually(refused)

    run("loopback", story)


def test_a_headless_service_has_no_address_of_its_own() -> None:
    async def story(objects: ObjectStore, addresses: Addresses) -> None:
        objects.create(service(clusterIP="None"))
        await asyncio.sleep(0.05)
        assert objects.get(Key("Service", "default", "web"))["spec"]["clusterIP"] == "None"

    run("loopback", story)
