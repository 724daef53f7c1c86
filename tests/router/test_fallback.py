"""Another deployment answers while no engine can: under its own model's name, once, and counted."""

from __future__ import annotations

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker.pod.marked_streams import RESUME_HEADER
from stoker.router.connection import Outgoing
from stoker.router.fallback import FALLBACK_HEADER, for_fallback
from stoker.router.snapshot import FallbackEntry
from testing.router.fake_engine import Exchange, FakeEngine
from testing.router.harness import routed, run, snapshot, until

TARGET = FallbackEntry(url="http://small.default.svc:80", deployment="small", model="tiny")


def post(body: bytes, *headers: tuple[bytes, bytes]) -> Outgoing:
    return Outgoing("POST", b"/v1/completions", list(headers), body)


def test_a_request_is_passed_on_once_with_the_other_models_name() -> None:
    passed = for_fallback(post(b'{"model": "big", "prompt": "x"}', (RESUME_HEADER, b"1"), (b"a", b"b")), TARGET, "big")
    assert passed is not None
    assert json.loads(passed.body) == {"model": "tiny", "prompt": "x"}
    assert list(passed.headers) == [(b"a", b"b"), (FALLBACK_HEADER, b"big")]
    assert for_fallback(passed, TARGET, "small") is None


def test_half_of_a_surrogate_pair_is_passed_on_as_its_escape() -> None:
    passed = for_fallback(post(b'{"model": "big", "prompt": "\\ud800 \xc3\xbc"}'), TARGET, "big")
    assert passed is not None
    assert json.loads(passed.body) == {"model": "tiny", "prompt": "\ud800 \xfc"}
    assert b"\\ud800" in passed.body


NESTED = b'{"model": "big", "prompt": %b%b}' % (b"[" * 20_000, b"]" * 20_000)


@pytest.mark.parametrize(
    "body", [b"", b"not JSON", b"[1]", b'{"prompt": "x"}', pytest.param(NESTED, id="nested too deeply")]
)
def test_what_names_no_model_is_not_passed_on(body: bytes) -> None:
    assert for_fallback(post(body), TARGET, "big") is None


async def answer_model(exchange: Exchange) -> None:
    """Answer with the model that the request names, as a stream where it asks for one."""
    request = json.loads(exchange.body)
    if not request.get("stream"):
        return await exchange.json({"model": request["model"], "for": exchange.headers.get("x-stoker-fallback")})
    await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
    await exchange.data(f"data: {json.dumps({'model': request['model']})}\n\ndata: [DONE]\n\n")
    await exchange.end()
    return None


def test_the_answer_names_the_model_that_spoke_and_the_own_engine_comes_first() -> None:
    async def scenario() -> None:
        big, small = await FakeEngine("big", answer_model).start(), await FakeEngine("small", answer_model).start()
        async with routed(big, deployment="main") as (router, client):
            target = {"url": small.url, "deployment": "small", "model": "tiny"}
            body = {**snapshot(2, big.entry()), "fallback": target}
            assert (await client.put("/backends", json=body)).json()["accepted"]
            request = {"model": "big", "prompt": "x"}
            assert (await client.post("/v1/completions", json=request)).json()["model"] == "big"
            big.ready = False
            await until(lambda: not router.backends.ready)
            answer = await client.post("/v1/completions", json=request)
            assert (answer.status_code, answer.json()) == (200, {"model": "tiny", "for": "main"})
            assert answer.headers["x-stoker-fallback"] == "small"
            stream = await client.post("/v1/completions", json={**request, "stream": True})
            assert '"model": "tiny"' in stream.text
            assert stream.text.endswith("data: [DONE]\n\n")
            again = await client.post("/v1/completions", json=request, headers={"x-stoker-fallback": "other"})
            assert (again.status_code, again.json()["error"]["code"]) == (503, "no_backend")
            families = text_string_to_metric_families((await client.get("/metrics")).text)
            (found,) = [one for one in families if one.name == "stoker_router_fallback_requests"]
            assert [(one.labels, one.value) for one in found.samples if one.name.endswith("_total")] == [
                ({"deployment": "small"}, 2.0)
            ]
            small.kill()
            lost = await client.post("/v1/completions", json=request)
            assert lost.status_code == 503
            assert "fallback small" in lost.json()["error"]["message"]

    run(scenario)


def test_a_held_request_waits_for_an_engine_before_the_fallback_gets_it() -> None:
    async def scenario() -> None:
        big, small = await FakeEngine("big", answer_model).start(), await FakeEngine("small", answer_model).start()
        async with routed(big, hold_s=30.0) as (router, client):
            target = {"url": small.url, "deployment": "small", "model": "tiny"}
            await client.put("/backends", json={**snapshot(2, big.entry()), "fallback": target})
            big.ready = False
            await until(lambda: not router.backends.ready)
            asked = client.build_request("POST", "/v1/completions", json={"model": "big", "prompt": "x"})
            waiting = asyncio.create_task(client.send(asked))
            await until(lambda: router.metrics.held == 1)
            big.ready = True
            assert (await waiting).json()["model"] == "big"
        small.kill()

    run(scenario)
