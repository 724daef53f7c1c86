"""An OpenAI server on a real port over a fake core, in the test's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, ProcessCollector

from stoker.engine.core.core_client import CoreClient, Join
from stoker.engine.http.core_metrics import register_core
from stoker.engine.http.front import Front
from stoker.engine.http.metrics import FrontMetrics
from stoker.engine.http.server import OpenAiServer
from stoker.pod.http import probe_routes
from stoker.pod.serve import Server, bind_tcp
from testing.engine.fake_core import ByteCodec, FakeCore
from testing.scenario import events as events
from testing.scenario import run as run
from testing.scenario import until as until


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
async def serving(tmp_path: Path, codec: Any = ByteCodec, join: Join = list, **options: Any) -> AsyncIterator[Serving]:
    """A server over a fake core. With `join` as it is, every delta has an event, however many wait."""
    address = f"ipc://{tmp_path}/core"
    core, client = FakeCore(address), CoreClient(address, join=join)
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
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await until(lambda: front.ready)
        try:
            yield Serving(core, front, app, url, http)
        finally:
            await server.stop(1)
            await client.close()
            await core.close()
