"""Streams whose engine breaks go on at another one; the client sees one stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.marked_streams import RESUME_PATH
from stoker.router.app import Router
from stoker.router.connection import Outgoing
from stoker.router.kept_stream import DONE, RAW_BYTES, KeptStream, NotResumable, UpdateCutter
from testing.router.fake_engine import Exchange, FakeEngine
from testing.router.harness import events, routed, run, until
from testing.router.resumable_engine import SEED, STREAM_HEADERS, Resumable, answers, marked_stream, state_of, told

TOKENS = 7
WHOLE = b"".join(marked_stream(TOKENS)) + DONE
BODY = b'{"stream": true,\n"prompt": "x"}'
PATH = "/v1/completions"


async def ask(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await client.post(PATH, content=BODY, headers=headers)


def count(router: Router, name: str, **labels: str) -> float:
    """A counter of the router."""
    counter: Any = getattr(router.metrics, name)
    return float((counter.labels(**labels) if labels else counter)._value.get())


def test_a_stream_cut_at_any_byte_arrives_whole() -> None:
    """Each cut is followed by another one, at the engine that goes on."""
    cuts = [*range(1, len(WHOLE), 37), *range(len(WHOLE) - len(DONE) - 1, len(WHOLE))]

    async def scenario() -> None:
        behaviour = Resumable(TOKENS)
        engines = [await FakeEngine(name, behaviour).start() for name in "ab"]
        async with routed(*engines, hold_s=20, connect_timeout_s=20) as (router, client):
            for number, cut in enumerate(cuts):
                behaviour.cuts = [cut, 9 * number + 1]
                answer = await ask(client)
                assert answer.status_code == 200
                assert told(answer.text) == told(WHOLE.decode()), cut
                assert answer.text.endswith("data: [DONE]\n\n")
                assert "x-stoker-resume" not in answer.headers
                assert not behaviour.cuts or cut + len(DONE) >= len(WHOLE)
            assert set(behaviour.bodies) == {BODY}  # byte for byte
            assert count(router, "resumed") >= len(behaviour.states) > 0
            assert {state["choices"][0]["seed"] for state in behaviour.states if state["choices"]} == {SEED}
            assert sum(backend.pending for backend in router.backends.all) == 0
            assert router.proxy.kept.held_bytes == 0

    run(scenario)


def test_a_long_stream_goes_on_behind_what_was_kept_unread() -> None:
    async def scenario() -> None:
        tokens = 400
        whole = b"".join(marked_stream(tokens))
        behaviour = Resumable(tokens, [len(whole) // 2, len(whole) // 3])
        engines = [await FakeEngine(name, behaviour).start() for name in "ab"]
        assert len(whole) > 4 * RAW_BYTES
        async with routed(*engines, connect_timeout_s=20) as (_, client):
            assert told((await ask(client)).text) == told(whole.decode())
            assert [len(state["choices"][0]["tokens"]) for state in behaviour.states] == sorted(
                len(state["choices"][0]["tokens"]) for state in behaviour.states
            )

    run(scenario)


async def cut_once(exchange: Exchange) -> None:
    await exchange.head(200, STREAM_HEADERS)
    await exchange.data(marked_stream(TOKENS)[0].decode())
    raise ConnectionResetError


def lost_of(answer: httpx.Response) -> str:
    error, done = events(answer.text)[-2:]
    assert (error["error"]["code"], done) == ("backend_lost", "[DONE]")
    return str(error["error"]["message"])


@pytest.mark.parametrize(
    ("other", "revision"),
    [
        pytest.param(None, "", id="no other engine"),
        pytest.param(Resumable(TOKENS), "r2", id="another revision"),
        pytest.param(answers(409, error={"code": "other_model"}), "", id="another model"),
        pytest.param(answers(200, answer="not a stream"), "", id="no stream"),
    ],
)
def test_where_no_engine_can_go_on_the_backend_is_lost(other: Any, revision: str) -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a", cut_once).start()
        second = await FakeEngine("b", other or cut_once).start()
        async with routed(engine, resume_wait_s=0.3) as (router, client):

            async def dies(exchange: Exchange) -> None:
                if other is not None:
                    entries = [engine.entry(), second.entry(revision=revision)]
                    await client.put("/backends", json={"version": 2, "backends": entries})
                    await until(lambda: len(router.backends.ready) == 2)
                engine.ready = False
                await cut_once(exchange)

            engine.behaviour = dies
            answer = await ask(client)
            assert "no other engine" in lost_of(answer)
            assert answer.text.startswith(marked_stream(TOKENS)[0].decode())
            assert count(router, "lost", reason="no_backend") == 1
            assert count(router, "resumed") == 0
        second.kill()

    run(scenario)


def test_a_token_at_which_every_engine_breaks_ends_the_stream() -> None:
    async def scenario() -> None:
        behaviour = Resumable(TOKENS, [len(marked_stream(TOKENS)[0]), *[3] * 50])
        engines = [await FakeEngine(name, behaviour).start() for name in "ab"]
        async with routed(*engines, max_attempts=3) as (router, client):
            assert "failed at the same token" in lost_of(await ask(client))
            assert 45 < len(behaviour.cuts) < 50
            assert count(router, "lost", reason="no_progress") == 1

    run(scenario)


@pytest.mark.parametrize("code", ["aborted", "engine_lost", "generation_failed"])
def test_an_engine_that_gives_a_stream_up_is_replaced_but_a_failed_request_is_not(code: str) -> None:
    async def scenario() -> None:
        behaviour = Resumable(TOKENS)
        error = f"data: {json.dumps({'error': {'message': 'x', 'code': code}}, separators=(',', ':'))}\n\n"

        async def gives_up(exchange: Exchange) -> None:
            if exchange.path == RESUME_PATH:
                return await behaviour(exchange)
            await exchange.head(200, STREAM_HEADERS)
            await exchange.data(marked_stream(TOKENS)[0].decode() + error + DONE.decode())
            return await exchange.end()

        engines = [await FakeEngine(name, gives_up).start() for name in "ab"]
        async with routed(*engines, connect_timeout_s=20) as (router, client):
            answer = await ask(client)
            if code == "generation_failed":
                assert answer.text.endswith(error + DONE.decode())
                assert count(router, "resumed") == 0
            else:
                assert told(answer.text) == told(WHOLE.decode())
                assert count(router, "resumed") == 1

    run(scenario)


def test_a_stream_that_goes_silent_at_a_stalled_engine_moves() -> None:
    async def scenario() -> None:
        behaviour = Resumable(TOKENS)

        async def hangs(exchange: Exchange) -> None:
            if exchange.path == RESUME_PATH:
                return await behaviour(exchange)
            await exchange.head(200, STREAM_HEADERS)
            await exchange.data(marked_stream(TOKENS)[0].decode())
            exchange.engine.ready = False
            return await asyncio.sleep(60)

        engines = [await FakeEngine(name, hangs).start() for name in "ab"]
        async with routed(*engines, connect_timeout_s=20) as (router, client):
            assert told((await ask(client)).text) == told(WHOLE.decode())
            assert count(router, "resumed") == 1

    run(scenario)


@pytest.mark.parametrize(("settings", "asked"), [({"max_resume_bytes": 0}, False), ({"max_resume_bytes": 100}, True)])
def test_without_room_to_keep_a_stream_its_break_is_told(settings: dict[str, int], asked: bool) -> None:
    async def scenario() -> None:
        headers: list[dict[str, str]] = []

        async def breaks(exchange: Exchange) -> None:
            headers.append(exchange.headers)
            await cut_once(exchange)

        engines = [await FakeEngine(name, breaks).start() for name in "ab"]
        async with routed(*engines, **settings) as (router, client):
            lost_of(await ask(client, **{"x-stoker-resume": "1"}))
            assert [("x-stoker-resume" in one) for one in headers] == [asked]
            assert count(router, "not_kept") == asked

    run(scenario)


def test_headers_and_the_trace_go_with_the_stream() -> None:
    async def scenario() -> None:
        headers: list[dict[str, str]] = []
        behaviour = Resumable(TOKENS, [len(marked_stream(TOKENS)[0])])

        async def notes(exchange: Exchange) -> None:
            headers.append(exchange.headers)
            if exchange.path == RESUME_PATH:
                assert state_of(exchange)["path"] == PATH
            await behaviour(exchange)

        engines = [await FakeEngine(name, notes).start() for name in "ab"]
        trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
        async with routed(*engines, connect_timeout_s=20) as (_, client):
            await ask(client, authorization="Bearer k", **{"x-request-id": "i-1"}, **trace)
        assert len(headers) == 2
        for one in headers:
            assert {"authorization": "Bearer k", "x-request-id": "i-1", **trace}.items() <= one.items()

    run(scenario)


def test_a_client_that_leaves_ends_a_stream_that_went_on() -> None:
    async def scenario() -> None:
        async def slow(exchange: Exchange) -> None:
            if exchange.path != RESUME_PATH:
                await cut_once(exchange)
            await exchange.head(200, STREAM_HEADERS)
            await exchange.data(marked_stream(TOKENS)[1].decode())
            await asyncio.sleep(60)

        engines = [await FakeEngine(name, slow).start() for name in "ab"]
        async with routed(*engines, connect_timeout_s=20) as (router, client):
            async with client.stream("POST", PATH, content=BODY) as answer:
                received = ""
                async for text in answer.aiter_text():
                    received += text
                    if "word 1" in received:
                        break
            await until(lambda: router.proxy.running == 0)
            await until(lambda: sum(engine.running for engine in engines) == 0)
            assert router.proxy.kept.held_bytes == 0

    run(scenario)


@given(st.integers(0, 12), st.data())
def test_a_stream_is_cut_behind_whole_updates_however_it_arrives(number: int, data: st.DataObject) -> None:
    updates = marked_stream(12)[:number]
    stream = b"".join(updates) + DONE
    cutter, whole, position = UpdateCutter(), b"", 0
    while position < len(stream):
        size = data.draw(st.integers(1, 400))
        whole += cutter.add(stream[position : position + size])
        position += size
        ends = [len(b"".join(updates[:end])) for end in range(number + 1)]
        assert len(whole) == max(end for end in ends if end <= position)
        assert whole + bytes(cutter.tail) == stream[:position]
    assert cutter.complete
    assert whole == b"".join(updates)


@pytest.mark.parametrize(
    "data",
    [b"data: {}\n\n", b"data: [1]\n\n", b"data: {\n\n", marked_stream(2)[1].replace(b"[1]", b'["x"]'),
     marked_stream(2)[1].replace(b"[1]", b"[-1]")],
)  # fmt: skip
def test_a_stream_that_is_not_as_promised_cannot_go_on(data: bytes) -> None:
    kept = KeptStream(Outgoing("POST", PATH.encode(), (), BODY), PATH)
    kept.add(marked_stream(2)[0])
    assert json.loads(kept.next_request().body.partition(b"\n")[0])["choices"][0]["tokens"] == [0]
    kept.add(data)
    kept.add(b"x" * RAW_BYTES)
    with pytest.raises(NotResumable, match="not as promised"):
        kept.next_request()


def test_a_stream_of_which_nothing_was_sent_begins_again() -> None:
    request = Outgoing("POST", PATH.encode(), (), BODY)
    assert KeptStream(request, PATH).next_request() is request
