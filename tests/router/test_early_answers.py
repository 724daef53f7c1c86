"""An engine that answers before it has read the whole body is not taken for broken."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from stoker.pod.config_file import parse
from stoker.pod.serve import Server, bind_tcp
from stoker.router.app import Router
from stoker.router.config import RouterConfig
from stoker.router.snapshot import parse_snapshot
from testing.router.harness import run, snapshot, until

MIB = 2**20


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    """Answer status and probes as an engine does, and any other request with 401 before its body is read."""
    own = scope["path"] in ("/status", "/readyz")
    text = json.dumps({"pod_uid": "a", "phase": "Serving"} if own else {"error": {"code": "invalid_api_key"}}).encode()
    headers = [(b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200 if own else 401, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@pytest.mark.parametrize("size", [1, 15, 60])
def test_a_refusal_before_the_end_of_a_large_body_is_passed_on(size: int) -> None:
    settings = {
        "deployment": "d", "backends_file": "unused", "probe_interval_s": 0.1, "connect_timeout_s": 60,
        "max_body_bytes": 64 * MIB,
    }  # fmt: skip

    async def scenario() -> None:
        engine = Server(refuses, bind_tcp("127.0.0.1", 0))
        await engine.start()
        router = Router(parse(RouterConfig, settings), pod_uid="router-0")
        front = Server(router.control_app, bind_tcp("127.0.0.1", 0))
        await front.start()
        entry: dict[str, object] = {"url": f"http://127.0.0.1:{engine.port}", "pod_uid": "a"}
        router.start(parse_snapshot(snapshot(1, entry)))
        await until(lambda: len(router.backends.ready) == 1)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.port}", timeout=120) as client:
            for _ in range(3):
                answer = await client.post("/v1/completions", content=bytes(size * MIB))
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert router.backends.all[0].healthy
        assert router.proxy.bodies.held_bytes == 0
        await front.stop(1)
        await router.stop()
        await engine.stop(1)

    run(scenario)
