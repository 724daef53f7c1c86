"""Real engine processes: one is killed in the middle of its streams, and clients get what undisturbed runs give."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from stoker.router.app import Router
from testing.router.engine_process import Client, Engine, answer_of, assert_same
from testing.router.harness import routed, run, snapshot, until
from tests.engine.test_server_real import write_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "the quick fox"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "n": 2, "seed": 11, "temperature": 0.9, "presence_penalty": 0.5}),
    (TEXT, {"prompt": "Naïve cafés", "logprobs": 3, "temperature": 0}),
    (TEXT, {"prompt": ["lazy", "brown fox"], "seed": -5, "temperature": 1.1, "stop": ["jumps over"], "echo": True}),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    folder = tmp_path_factory.mktemp("engines")
    write_model(folder / "tiny")
    made = Engine(folder, "a"), Engine(folder, "b")
    try:
        for engine in made:
            engine.wait_until_ready()
        yield made
    finally:
        for engine in made:
            engine.kill()


def test_streams_of_a_killed_engine_go_on_at_another_one(engines: tuple[Engine, Engine]) -> None:
    """The engine is stopped in the middle of its streams, and killed once the router knows another one."""
    first, second = engines

    async def scenario() -> None:
        async with routed(first) as (router, http):
            clients = await cut_in_the_middle(router, http, first)
            known_s = time.monotonic()  # from now on streams move, also before the kill: their engine is silent
            await http.put("/backends", json=snapshot(2, first.entry(), second.entry()))
            await until(lambda: any(one.ready and one.entry.pod_uid == "b" for one in router.backends.all))
            first.kill()
            await asyncio.gather(*(task for _, task in clients))
            resumed = router.metrics.resumed._value.get()
            assert resumed >= 1
            assert router.metrics.resume_gap._sum.get() <= resumed * (time.monotonic() - known_s)
            for (client, _), (path, body) in zip(clients, REQUESTS, strict=True):
                undisturbed = Client()
                await undisturbed.read(http, path, body)
                assert_same(answer_of(client.text), answer_of(undisturbed.text))

    run(scenario, limit_s=600)


async def cut_in_the_middle(
    router: Router, http: httpx.AsyncClient, engine: Engine
) -> list[tuple[Client, asyncio.Task[None]]]:
    """Start the streams and stop the engine while one of them has begun and has not ended."""
    for _ in range(20):
        clients = [Client() for _ in REQUESTS]
        tasks = [
            asyncio.create_task(client.read(http, path, body))
            for client, (path, body) in zip(clients, REQUESTS, strict=True)
        ]
        await until(lambda: any("stoker" in client.text for client in clients))  # noqa: B023 - awaited here
        engine.signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)  # what is on its way arrives
        if any("stoker" in client.text and "[DONE]" not in client.text for client in clients):
            return list(zip(clients, tasks, strict=True))
        engine.signal(signal.SIGCONT)
        await asyncio.gather(*tasks)
    raise AssertionError("the engine was always faster")
