"""Snapshots, probes, draining and replacement while requests run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial

import httpx

from testing.router.fake_engine import Exchange, FakeEngine, stream
from testing.router.harness import events, routed, run, snapshot, until


def test_only_a_higher_version_is_taken_and_each_answer_says_which_holds() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(engine) as (router, client):

            async def put(body: dict[str, object]) -> tuple[int, dict[str, object]]:
                answer = await client.put("/backends", json=body)
                return answer.status_code, answer.json()

            assert await put(snapshot(5, engine.entry())) == (202, {"accepted": True, "version": 5})
            assert await put(snapshot(5, engine.entry())) == (202, {"accepted": True, "version": 5})  # sent again
            assert await put(snapshot(5)) == (202, {"accepted": False, "version": 5})  # another content
            assert await put(snapshot(4)) == (202, {"accepted": False, "version": 5})
            assert len(router.backends.ready) == 1
            status, body = await put({"version": 6, "backends": [{"url": "x", "pod_uid": "y"}]})
            assert status == 400
            assert "backends.0.url" in str(body["error"])
            assert router.backends.version == 5

    run(scenario)


def test_a_draining_backend_finishes_its_stream_and_gets_nothing_new() -> None:
    async def scenario() -> None:
        old, new = await FakeEngine("old", stream(30, 0.01)).start(), await FakeEngine("new", stream(1)).start()
        async with routed(old) as (router, client):
            running = asyncio.ensure_future(client.post("/v1/completions", content=b"{}"))
            await until(lambda: old.running == 1)
            await client.put("/backends", json=snapshot(2, old.entry(draining=True), new.entry()))
            await until(lambda: len(router.backends.ready) == 1)
            for _ in range(5):
                assert events((await client.post("/v1/completions", content=b"{}")).text)[0]["pod"] == "new"
            await client.put("/backends", json=snapshot(3, new.entry()))  # it leaves while it still answers
            assert len(events((await running).text)) == 31
            assert old.served == 1
        new.kill()

    run(scenario)


def test_an_unready_backend_is_left_out_until_it_is_ready_again() -> None:
    async def scenario() -> None:
        a, b = await FakeEngine("a").start(), await FakeEngine("b").start()
        async with routed(a, b) as (router, client):
            a.ready = False
            await until(lambda: [x.entry.pod_uid for x in router.backends.ready] == ["b"])
            assert {(await client.get("/v1/models")).json()["pod"] for _ in range(4)} == {"b"}
            a.ready = True
            await until(lambda: len(router.backends.ready) == 2)
            assert {(await client.get("/v1/models")).json()["pod"] for _ in range(4)} == {"a", "b"}

    run(scenario)


def test_a_dead_backend_comes_back_by_itself() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(engine, hold_s=240) as (router, client):
            engine.kill()
            await until(lambda: not router.backends.ready)
            request = asyncio.ensure_future(client.get("/v1/models"))
            await until(lambda: router.metrics.held == 1)
            await engine.start()
            assert (await request).status_code == 200

    run(scenario)


def is_idle(engine: FakeEngine) -> bool:
    return engine.running == 0


def test_a_rolling_replacement_under_load_fails_no_request() -> None:
    async def scenario() -> None:
        behaviour = stream(5, 0.004)
        engines = [await FakeEngine(f"old-{i}", behaviour).start() for i in range(3)]
        version = 1
        async with routed(*engines) as (_, client):
            done, counts = asyncio.Event(), [0] * 12
            loads = [asyncio.ensure_future(_load(client, done, counts, number)) for number in range(12)]
            for i in range(3):
                new = await FakeEngine(f"new-{i}", behaviour).start()
                old, engines = engines[0], [*engines[1:], new]
                version += 1
                entries = [engine.entry() for engine in engines]
                await client.put("/backends", json=snapshot(version, old.entry(draining=True), *entries))
                old.behaviour = (
                    refuse  # as an engine does after POST /drain: a request that was under way goes elsewhere
                )
                await until(partial(is_idle, old))
                version += 1
                await client.put("/backends", json=snapshot(version, *entries))
                old.kill()
                await more(counts, loads)
            done.set()
            await asyncio.gather(*loads)
        for engine in engines:
            engine.kill()

    run(scenario)


def test_killing_backends_at_random_fails_only_streams_that_had_begun() -> None:
    async def scenario() -> None:
        rng = random.Random(7)
        engines = [await FakeEngine(f"e{i}", stream(4, 0.003)).start() for i in range(3)]
        async with routed(*engines, hold_s=240, max_attempts=6) as (router, client):
            done, counts = asyncio.Event(), [0] * 8
            loads = [
                asyncio.ensure_future(_load(client, done, counts, number, cuts_allowed=True)) for number in range(8)
            ]
            for _ in range(12):
                await asyncio.sleep(rng.random() * 0.08)
                victim = rng.choice(engines)
                victim.kill()
                await asyncio.sleep(rng.random() * 0.03)
                await victim.start()
            await more(counts, loads)
            done.set()
            await asyncio.gather(*loads)
            assert sum(backend.pending for backend in router.backends.all) == 0

    run(scenario)


async def refuse(exchange: Exchange) -> None:
    await exchange.json({"error": {"message": "draining"}}, 503)


async def more(counts: list[int], loads: Sequence[asyncio.Future[None]]) -> None:
    """Wait until each load has had a further answer, or one has failed."""
    before = list(counts)
    await until(
        lambda: any(load.done() for load in loads) or all(now > then for now, then in zip(counts, before, strict=True))
    )


async def _load(
    client: httpx.AsyncClient, done: asyncio.Event, counts: list[int], number: int, *, cuts_allowed: bool = False
) -> None:
    """Send requests one after another until `done`, and count the answers in `counts[number]`.

    Each answer must be whole, or marked as cut if that is allowed.
    """
    while not done.is_set():
        answer = await client.post("/v1/completions", content=b"{}")
        assert answer.status_code == 200, answer.text
        parts = events(answer.text)
        assert parts[-1] == "[DONE]"
        if cuts_allowed and "error" in parts[-2]:
            parts = [*parts[:-2], "[DONE]"]
            assert len(parts) > 1  # a cut answer had begun
        pods = {part["pod"] for part in parts[:-1]}
        assert len(pods) == 1  # never pieced together from two engines
        counts[number] += 1
