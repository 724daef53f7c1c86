"""An engine that is stuck loses the requests that it has not begun to answer, and no others."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from testing.router.fake_engine import Behaviour, Exchange, FakeEngine, stream
from testing.router.harness import events, routed, run, until

Request = asyncio.Future[httpx.Response]


async def stuck(exchange: Exchange) -> None:
    await asyncio.sleep(600)


async def stuck_after_head(exchange: Exchange) -> None:
    """Send the head of an event stream, then hang: the head comes long before the first token."""
    await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
    await asyncio.sleep(600)


BODY = b'{"seed": 7, "prompt": "x"}'


@pytest.mark.parametrize("behaviour", [stuck, stuck_after_head])
def test_a_request_without_a_first_byte_moves_to_another_engine(behaviour: Behaviour) -> None:
    async def scenario() -> None:
        a, b = await FakeEngine("a", behaviour).start(), await FakeEngine("b", behaviour).start()
        async with routed(a, b) as (router, client):
            requests: list[Request] = [
                asyncio.ensure_future(client.post("/v1/completions", content=BODY)) for _ in range(10)
            ]
            await until(lambda: a.running + b.running == 10)
            assert (a.running, b.running) == (5, 5)
            b.behaviour = stream(2)
            begun = asyncio.ensure_future(client.post("/v1/completions", content=BODY))  # and one that does not hang
            await until(lambda: a.running + b.running >= 10)
            a.ready, a.phase = False, "Serving"
            await until(lambda: a.running == 0)
            assert a.disconnects >= 5
            for request in await _first(requests, 5):
                assert [part["pod"] for part in events((await request).text)[:-1]] == ["b", "b"]
            await begun
            assert router.metrics.retries._value.get() >= 5
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    run(scenario)


async def _first(requests: list[Request], number: int) -> list[Request]:
    await until(lambda: sum(request.done() for request in requests) >= number)
    return [request for request in requests if request.done()]


def test_the_same_body_is_sent_again() -> None:
    async def scenario() -> None:
        a = await FakeEngine("a", stuck).start()
        async with routed(a) as (router, client):
            request = asyncio.ensure_future(client.post("/v1/completions", content=BODY, headers={"x-request-id": "i"}))
            await until(lambda: a.running == 1)
            b = await FakeEngine("b").start()
            a.ready = False
            await until(lambda: not router.backends.ready)
            await asyncio.sleep(0.3)
            assert a.running == 1  # no other engine is ready: it may still answer
            await client.put("/backends", json={"version": 2, "backends": [a.entry(), b.entry()]})
            answer = (await request).json()
            assert (answer["pod"], answer["body"], answer["headers"]["x-request-id"]) == ("b", BODY.decode(), "i")
            b.kill()

    run(scenario)


def test_an_answer_that_has_begun_stays_where_it_is() -> None:
    async def scenario() -> None:
        a, b = await FakeEngine("a", stream(20, 0.05)).start(), await FakeEngine("b").start()
        async with routed(a, b) as (router, client):
            b.ready = False
            await until(lambda: len(router.backends.ready) == 1)
            async with client.stream("POST", "/v1/completions", content=BODY) as answer:
                text = answer.aiter_text()
                first = await anext(text)
                a.ready, b.ready = False, True
                rest = "".join([part async for part in text])
            assert [part["n"] for part in events(first + rest)[:-1]] == list(range(20))
            assert (a.disconnects, b.served) == (0, 0)

    run(scenario)


@pytest.mark.parametrize("told", ["by its status", "by the snapshot"])
def test_an_engine_that_drains_keeps_its_requests(told: str) -> None:
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await gate.wait()
        await exchange.json({"pod": exchange.engine.pod_uid})

    async def scenario() -> None:
        a, b = await FakeEngine("a", slow).start(), await FakeEngine("b").start()
        async with routed(a, b) as (router, client):
            b.ready = False
            await until(lambda: len(router.backends.ready) == 1)
            request = asyncio.ensure_future(client.post("/v1/completions", content=BODY))
            await until(lambda: a.running == 1)
            if told == "by its status":
                a.phase = "Draining"
            else:
                body = {"version": 2, "backends": [a.entry(draining=True), b.entry()]}
                await client.put("/backends", json=body)
            a.ready, b.ready = False, True
            await until(lambda: [backend.entry.pod_uid for backend in router.backends.ready] == ["b"])
            await asyncio.sleep(0.4)
            gate.set()
            assert (await request).json() == {"pod": "a"}

    run(scenario)
