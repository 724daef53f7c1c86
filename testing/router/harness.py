"""A router on a real port, in the test's event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
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
        {"deployment": "d", "backends_file": "unused", "probe_interval_s": 0.1, "connect_timeout_s": 0.5, **settings},
    )
    router = Router(config, pod_uid="router-0", policy=policy_object, clock=clock, tracer=tracer)
    server = Server(router.control_app, bind_tcp("127.0.0.1", 0))
    router.start(parse_snapshot(snapshot(1, *(engine.entry() for engine in engines))))
    await server.start()
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", limits=limits, timeout=20) as client:
        await until(lambda: len(router.backends.ready) == len(engines))
        try:
            yield router, client
        finally:
            await server.stop(0)
            await router.stop()
            for engine in engines:
                if isinstance(engine, FakeEngine):
                    engine.kill()


async def until(question: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a state; a test that needs longer has failed."""
    async with asyncio.timeout(timeout_s):
        while not question():
            await asyncio.sleep(0.005)


def run(scenario: Callable[[], Awaitable[None]], limit_s: float = 60) -> None:
    """Run a scenario in a fresh event loop, with a limit."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scenario()

    asyncio.run(limited())


def events(text: str) -> list[Any]:
    """Return the content of a stream's `data:` lines; `[DONE]` stays a string."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
