"""Streams that are silent at a router: comments, what they do not count for, and errors behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from stoker.pod.stream_comments import COMMENT
from testing.router.fake_engine import Behaviour, Exchange, FakeEngine, stream
from testing.router.harness import events, routed, run, until

COMMENTS: dict[str, Any] = {"listen": {"limits": {"comment_interval_s": 0.03}}}
PATH = "/v1/chat/completions"
AGAIN = {"retry-after": "7"}
STREAM: dict[str, Any] = {"json": {"stream": True}}


def after(go_on: asyncio.Event, behaviour: Behaviour) -> Behaviour:
    async def waits(exchange: Exchange) -> None:
        await go_on.wait()
        await behaviour(exchange)

    return waits


async def refused(exchange: Exchange) -> None:
    await exchange.json({"error": {"message": "no room", "type": "server_error", "code": "queue_full"}}, 503, **AGAIN)


async def dated(exchange: Exchange) -> None:
    await exchange.json({"fault": "?"}, 503, **{"retry-after": "Sat, 28 Nov 2026 10:00:00 GMT"})


async def broken(exchange: Exchange) -> None:
    await exchange.json({"fault": "?"}, 500)


@asynccontextmanager
async def asked(client: httpx.AsyncClient, **more: Any) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
    """An answer that has begun, and what follows."""
    async with client.stream("POST", PATH, **{**STREAM, **more}) as answer:
        yield answer, answer.aiter_raw()


def test_a_stream_that_waits_gets_comments_which_are_no_first_byte() -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()
        engine = await FakeEngine("a", after(go_on, stream(2))).start()
        async with routed(engine, **COMMENTS) as (router, client), asked(client) as (answer, parts):
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-request-id"]
            assert [await anext(parts), await anext(parts)] == [COMMENT, COMMENT]
            assert router.metrics.first_byte._sum.get() == 0  # nothing was answered yet
            go_on.set()
            rest = COMMENT + b"".join([part async for part in parts])
            assert events(rest.decode()) == [{"pod": "a", "n": 0}, {"pod": "a", "n": 1}, "[DONE]"]
            assert router.metrics.first_byte._sum.get() > 0.03

    run(scenario)


def test_a_stream_that_pauses_gets_comments_between_whole_events() -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()

        async def pauses(exchange: Exchange) -> None:
            await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
            await exchange.data('data: {"n": 0}\n\ndata: {"n"')
            await go_on.wait()
            await exchange.data(": 1}\n\ndata: [DONE]\n\n")
            await exchange.end()

        engine = await FakeEngine("a", pauses).start()
        async with routed(engine, **COMMENTS) as (_, client), asked(client) as (_, parts):
            assert [await anext(parts), await anext(parts)] == [b'data: {"n": 0}\n\n', COMMENT]
            go_on.set()
            rest = b"".join([part async for part in parts]).replace(COMMENT, b"")
            assert rest == b'data: {"n": 1}\n\ndata: [DONE]\n\n'

    run(scenario)


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (refused, {"message": "no room", "code": "queue_full", "status": 503, "retry_after_s": 7}),
        (broken, {"message": "The engine answered 500 instead of a stream.", "code": None, "status": 500}),
        (dated, {"message": "The engine answered 503 instead of a stream.", "code": None, "status": 503}),
    ],
)
def test_an_error_behind_a_comment_is_an_event(behaviour: Behaviour, error: dict[str, Any]) -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()
        engine = await FakeEngine("a", after(go_on, behaviour)).start()
        async with routed(engine, **COMMENTS) as (router, client), asked(client) as (answer, parts):
            assert (answer.status_code, await anext(parts)) == (200, COMMENT)
            go_on.set()
            found, done = events(b"".join([part async for part in parts]).replace(COMMENT, b"").decode())
            assert {key: found["error"][key] for key in error} == error
            assert ("retry_after_s" in error) == ("retry_after_s" in found["error"])
            assert done == "[DONE]"
            assert router.metrics.requests.labels(error["status"])._value.get() == 1

    run(scenario)


def test_a_held_stream_gets_comments_and_its_refusal_is_an_event() -> None:
    async def scenario() -> None:
        async with routed(hold_s=0.5, **COMMENTS) as (_, client):
            answer = await client.post(PATH, **STREAM)
            assert (answer.status_code, answer.content.startswith(COMMENT)) == (200, True)
            error = events(answer.text.replace(COMMENT.decode(), ""))[0]["error"]
            assert (error["status"], error["code"], error["retry_after_s"]) == (503, "no_backend", 1)

    run(scenario)


@pytest.mark.parametrize(
    ("asks", "settings"),
    [
        pytest.param({"json": {"stream": False}}, COMMENTS, id="no stream"),
        pytest.param({**STREAM, "headers": {"x-stoker-comments": "0"}}, COMMENTS, id="not wanted"),
        pytest.param(STREAM, {}, id="not so long"),
    ],
)
def test_an_error_before_any_comment_keeps_its_status(asks: Any, settings: Any) -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()
        engine = await FakeEngine("a", after(go_on, refused)).start()
        async with routed(engine, max_attempts=1, **settings) as (_, client):
            asking = asyncio.ensure_future(client.post(PATH, **asks))
            await until(lambda: engine.running == 1)
            await asyncio.sleep(0.2)
            go_on.set()
            answer = await asking
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")

    run(scenario)


def test_engines_are_asked_for_no_comments_and_theirs_are_no_answer() -> None:
    async def scenario() -> None:
        heads = []

        async def comments_then_dies(exchange: Exchange) -> None:
            heads.append(exchange.headers["x-stoker-comments"])
            await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
            await exchange.data(": pro")
            await exchange.data("cessing\n\n: more\n\n")
            exchange.engine.kill()

        async def comments(exchange: Exchange) -> None:
            await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
            await exchange.data(f": processing\n\ndata: {json.dumps({'pod': 'good'})}\n\n: more\n\n")
            await exchange.data("data: [DONE]\n\n")
            await exchange.end()

        bad, good = await FakeEngine("bad", comments_then_dies).start(), await FakeEngine("good", comments).start()
        async with routed(bad, good) as (router, client):
            for _ in range(2):
                answer = await client.post(PATH, **STREAM, headers={"x-stoker-comments": "1"})
                assert answer.text == 'data: {"pod": "good"}\n\n: more\n\ndata: [DONE]\n\n'
            assert heads == ["0"]
            assert router.metrics.cut._value.get() == 0

    run(scenario)
