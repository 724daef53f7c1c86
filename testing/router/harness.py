"""A router on a real port, in the test's event loop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import httpx

from stoker.pod.config_file import parse
from stoker.pod.serve import Server, bind_tcp
from stoker.pod.tracing import NoTracer, Tracer
from stoker.router.app import Router
from stoker.router.config import RouterConfig
from stoker.router.snapshot import parse_snapshot
from testing.router.fake_engine import FakeEngine
from testing.scenario import events as events
from testing.scenario import run as run
from testing.scenario import until as until


class HasEntry(Protocol):
    """An engine, as a snapshot lists it."""

    def entry(self) -> dict[str, object]: ...


def snapshot(version: int, *entries: dict[str, object]) -> dict[str, Any]:
    return {"version": version, "backends": list(entries)}


@asynccontextmanager
async def routed(
    *engines: HasEntry,
    clock: Callable[[], float] = time.monotonic,
    policy_object: Any = None,
    tracer: Tracer = NoTracer(),  # noqa: B008 - it has no state
    **settings: Any,
) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    """A started router over `engines` and a client on it; all backends are probed already."""
    config = parse(
        RouterConfig,
        {"deployment": "d", "backends_file": "unused", "probe_interval_s": 0.1, "connect_timeout_s": 60, **settings},
    )
    router = Router(config, pod_uid="router-0", policy=policy_object, clock=clock, tracer=tracer)
    server = Server(router.control_app, bind_tcp("127.0.0.1", 0))
    router.start(parse_snapshot(snapshot(1, *(engine.entry() for engine in engines))))
    await server.start()
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", limits=limits, timeout=120) as client:
        await until(lambda: len(router.backends.ready) == len(engines))
        try:
            yield router, client
        finally:
            await server.stop(0)
            await router.stop()
            for engine in engines:
                if isinstance(engine, FakeEngine):
                    engine.kill()
