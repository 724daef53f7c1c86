"""The router as a program: starts from its file, guards its control route, restarts, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.operator.cluster.interface import PodUnreachable
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import SystemClock
from stoker.pod.control_key import new_private_key, public_key, sign
from stoker.pod.termination_message import parse_termination_message
from stoker.router.app import Router
from stoker.router.config import RouterConfig
from stoker.router.main import LINGER_S, linger_s, main
from testing.free_port import free_port
from testing.router.fake_engine import Exchange, FakeEngine, stream
from testing.router.harness import events, run, snapshot, until


def write_config(folder: Path, **settings: Any) -> Path:
    port = free_port()
    config = {
        "deployment": "d",
        "listen": {"host": "127.0.0.1", "port": port, **settings.pop("listen", {})},
        "backends_file": str(folder / "backends.json"),
        "termination_log": str(folder / "termination-log"),
        "probe_interval_s": 0.1,
        "connect_timeout_s": 60,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@asynccontextmanager
async def program(
    config: Path, **environment: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stoker.router", "--config", str(config),
        env={**os.environ, "STOKER_POD_UID": "router-0", **environment}, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    port = json.loads(config.read_text())["listen"]["port"]  # noqa: ASYNC240 - a tiny file
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        try:
            async with asyncio.timeout(240):
                while not await answers(client, "/readyz"):
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
            yield process, client
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def answers(client: httpx.AsyncClient, path: str) -> bool:
    try:
        return (await client.get(path)).status_code == 200
    except httpx.TransportError:
        return False


async def until_stopping(client: httpx.AsyncClient) -> httpx.Response:
    async with asyncio.timeout(240):
        while (answer := await client.get("/readyz")).status_code != 503:
            await asyncio.sleep(0.01)
    return answer


async def wait_for_backends(client: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(240):
        while (await client.get("/status")).json()["ready_backends"] != count:
            await asyncio.sleep(0.02)


def test_it_starts_from_the_file_takes_signed_snapshots_and_drains_on_sigterm(tmp_path: Path) -> None:
    private = new_private_key()
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "current.pem").write_bytes(public_key(private))
    config = write_config(tmp_path, listen={"control_keys": str(tmp_path / "keys")})

    async def put(client: httpx.AsyncClient, body: dict[str, Any], *, signed: bool = True) -> httpx.Response:
        content = json.dumps(body).encode()
        token = sign(private, pod_uid="router-0", method="PUT", path="/backends", body=content, now=time.time(),
                     token_id=str(time.monotonic_ns()))  # fmt: skip
        return await client.put(
            "/backends", content=content, headers={"Authorization": f"Bearer {token}"} if signed else {}
        )

    async def check_status(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        """Check that addresses and pods of engines are shown to the operator alone."""
        public = (await client.get("/status")).json()
        assert {"pod_uid", "phase", "ready_backends", "snapshot_version"} <= public.keys()
        assert "backends" not in public
        pods = PodHttp(private, SystemClock(), lambda: str(time.monotonic_ns()))
        whole = await pods.poll(str(client.base_url).rstrip("/"), "router-0")
        assert [backend["url"] for backend in whole["backends"]] == [engine.url]
        with pytest.raises(PodUnreachable, match="401"):
            await pods.poll(str(client.base_url).rstrip("/"), "router-1")
        await pods.close()

    async def scenario() -> None:
        release = asyncio.Event()

        async def held(exchange: Exchange) -> None:
            await release.wait()
            await stream(20)(exchange)

        a, b = await FakeEngine("a").start(), await FakeEngine("b", held).start()
        (tmp_path / "backends.json").write_text(json.dumps(snapshot(3, a.entry())))
        async with program(config) as (process, client):
            await wait_for_backends(client, 1)
            assert (await client.get("/v1/models")).json()["pod"] == "a"
            assert (await put(client, snapshot(4, b.entry()), signed=False)).status_code == 401
            assert (await put(client, snapshot(2))).json() == {"accepted": False, "version": 3}
            await check_status(client, a)
            assert (await put(client, snapshot(4, b.entry()))).json() == {"accepted": True, "version": 4}
            await wait_for_backends(client, 1)
            running = asyncio.ensure_future(client.post("/v1/completions", content=b"{}"))
            await until(lambda: b.running == 1)
            process.send_signal(signal.SIGTERM)
            probed = await until_stopping(client)  # no longer ready, but it still answers
            assert probed.headers["connection"] == "close"
            release.set()
            assert len(events((await running).text)) == 21
            assert await process.wait() == 78
        word = parse_termination_message((tmp_path / "termination-log").read_text())
        assert word is not None
        assert word.cause == "Interrupted"
        for engine in (a, b):
            engine.kill()

    run(scenario)


def test_when_a_router_dies_engines_end_what_it_carried_and_another_one_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a", stream(10_000, 0.02)).start()
        configs = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "backends.json").write_text(json.dumps(snapshot(1, engine.entry())))
            configs.append(write_config(tmp_path / name))
        async with program(configs[0]) as (process, client), program(configs[1]) as (_, other):
            for one in (client, other):
                await wait_for_backends(one, 1)
            carried = asyncio.ensure_future(client.post("/v1/completions", content=b"{}"))
            await until(lambda: engine.running == 1)
            process.kill()
            with pytest.raises(httpx.TransportError):
                await carried
            await until(lambda: engine.disconnects == 1 and not engine.running)
            engine.behaviour = stream(3)
            assert len(events((await other.post("/v1/completions", content=b"{}")).text)) == 4
        engine.kill()

    run(scenario)


def test_in_a_cluster_it_serves_on_while_nodes_learn_that_it_goes() -> None:
    assert linger_s({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == LINGER_S > 0
    assert linger_s({}) == 0

    async def scenario() -> None:
        router = Router(RouterConfig(deployment="d", backends_file="unused"), pod_uid="router-0")
        begun = time.monotonic()
        await router.drain(0.0, 60, least_s=0.2)
        assert time.monotonic() - begun >= 0.2
        await router.drain(0.0, 0.0, least_s=60)  # never beyond the grace period
        await router.stop()

    run(scenario)


def test_the_program_of_a_cluster_lingers(tmp_path: Path) -> None:
    config = write_config(tmp_path)

    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        (tmp_path / "backends.json").write_text(json.dumps(snapshot(1, engine.entry())))
        async with program(config, KUBERNETES_SERVICE_HOST="10.0.0.1") as (process, client):
            await wait_for_backends(client, 1)
            told = time.monotonic()
            process.send_signal(signal.SIGTERM)
            await until_stopping(client)
            assert (await client.post("/v1/completions", content=b"{}")).status_code == 200
            assert await process.wait() == 78
            assert time.monotonic() - told >= LINGER_S
        engine.kill()

    run(scenario)


def test_a_killed_router_starts_again_from_the_newest_file(tmp_path: Path) -> None:
    socket_path = tmp_path / "c.sock"
    config = write_config(tmp_path, listen={"control_socket": str(socket_path)})

    async def scenario() -> None:
        a, b = await FakeEngine("a").start(), await FakeEngine("b").start()
        (tmp_path / "backends.json").write_text(json.dumps(snapshot(1, a.entry())))
        async with program(config) as (process, client):
            assert (await client.put("/backends", json=snapshot(2))).status_code == 404  # without keys: not on TCP
            newer = snapshot(2, b.entry())
            (tmp_path / "backends.json").write_text(json.dumps(newer))  # the operator writes the file before each PUT
            transport = httpx.AsyncHTTPTransport(uds=str(socket_path))
            async with httpx.AsyncClient(transport=transport, base_url="http://control", timeout=120) as control:
                assert (await control.put("/backends", json=newer)).json() == {"accepted": True, "version": 2}
            process.kill()
            await process.wait()
        async with program(config) as (_, client):
            await wait_for_backends(client, 1)
            transport = httpx.AsyncHTTPTransport(uds=str(socket_path))
            async with httpx.AsyncClient(transport=transport, base_url="http://control", timeout=120) as control:
                status = (await control.get("/status")).json()
            assert (status["snapshot_version"], status["backends"][0]["pod_uid"]) == (2, "b")
            assert (await client.get("/v1/models")).json()["pod"] == "b"
        for engine in (a, b):
            engine.kill()

    run(scenario)


@pytest.mark.parametrize(
    ("settings", "backends", "detail"),
    [
        pytest.param({"policy": "fastest"}, snapshot(1), None, id="policy"),
        pytest.param({}, {"version": "x"}, "version", id="snapshot"),
        pytest.param({"colour": 1}, snapshot(1), None, id="unknown key"),
    ],
)
def test_what_cannot_be_used_ends_the_program_with_its_code(
    tmp_path: Path, settings: dict[str, Any], backends: dict[str, Any], detail: str | None
) -> None:
    config = write_config(tmp_path, **settings)
    (tmp_path / "backends.json").write_text(json.dumps(backends))
    assert main(["--config", str(config)]) == 64
    if detail is not None:
        word = parse_termination_message((tmp_path / "termination-log").read_text())
        assert word is not None
        assert detail in word.detail
