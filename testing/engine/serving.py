"""An OpenAI server on a real port over a fake core, in the test's event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, ProcessCollector

from stoker.engine.core.core_client import CoreClient
from stoker.engine.http.front import Front
from stoker.engine.http.metrics import FrontMetrics, register_core
from stoker.engine.http.server import OpenAiServer
from stoker.pod.http import probe_routes
from stoker.pod.serve import Server, bind_tcp
from testing.engine.fake_core import ByteCodec, FakeCore


class Serving:
    """The parts of a running server."""

    def __init__(self, core: FakeCore, front: Front, app: OpenAiServer, url: str, http: httpx.AsyncClient) -> None:
        self.core, self.front, self.app, self.url, self.http = core, front, app, url, http

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """Yield the events of a stream; `[DONE]` stays a string."""
        answer = await self.http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        return events(answer.text)


@asynccontextmanager
async def serving(tmp_path: Path, codec: Any = ByteCodec, **options: Any) -> AsyncIterator[Serving]:
    address = f"ipc://{tmp_path}/core"
    core, client = FakeCore(address), CoreClient(address)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    register_core(registry, "tiny", lambda: client.stats, lambda: client.state.model)
    metrics = FrontMetrics(registry, "tiny")
    front = Front(client, ("tiny", "other-name"), metrics, codec)
    own = probe_routes(alive=lambda: True, ready=lambda: front.ready, status=dict, registry=registry)
    settings = {"api_keys": (), "max_body_bytes": 1 << 20, "pod_uid": "pod-1", "version": "0.1", **options}
    app = OpenAiServer(front, own, load_reports=front.load_reports, **settings)
    server = Server(app, bind_tcp("127.0.0.1", 0))
    await client.start()
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        await until(lambda: front.ready)
        try:
            yield Serving(core, front, app, url, http)
        finally:
            await server.stop(1)
            await client.close()
            await core.close()


async def until(question: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a state; a test that needs longer has failed."""
    async with asyncio.timeout(timeout_s):
        while not question():
            await asyncio.sleep(0.005)


def run(scenario: Callable[[], Awaitable[None]], limit_s: float = 40) -> None:
    """Run a scenario in a fresh event loop, with a limit."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scenario()

    asyncio.run(limited())


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
