"""Requests of classes as their clients see them: refused, held or sent by the predicted first token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from stoker.pod.class_place import PLACE_HEADER
from stoker.pod.config_file import ConfigError, parse
from stoker.pod.marked_streams import RESUME_PATH
from stoker.router.app import Router
from stoker.router.config import RouterConfig
from stoker.router.request_class import RequestClass, UnknownClass, class_of
from testing.router.fake_engine import Exchange, FakeEngine, stream
from testing.router.harness import routed, run, until
from testing.router.resumable_engine import Resumable, marked_stream

HEADER = PLACE_HEADER.decode()

CLASSES = [
    {"name": "interactive", "ttft_goal_s": 2.0, "service_tiers": ["priority"]},
    {"name": "batch", "service_tiers": ["flex"], "max_queue_s": 50, "max_queued": 1},
]
SHORT = {"prompt": "p"}
LONG = {"prompt": "p" * 4000}
"""A thousand tokens."""


class Clock:
    """Stands still, so that reports stay young on a busy machine, until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def load(waiting_tokens: int, rate: float | None = 1000.0, step_tokens: int = 1_000_000) -> dict[str, object]:
    """Of an engine whose steps hold all that waits, in one prompt of another router, so that none passes another."""
    rates = {"prefill_tokens_per_s": rate} if rate else {}
    steps = {"step_tokens": step_tokens}
    waiting = {"waiting": 1, "waiting_tokens": waiting_tokens, "prompts": [waiting_tokens]}
    return {"epoch": "e", "requests": 1, **waiting, **steps, **rates}


async def engine_with(waiting_tokens: int, **behaviour: Any) -> FakeEngine:
    engine = await FakeEngine("a", **behaviour).start()
    engine.load = load(waiting_tokens)
    return engine


def sees(router: Router, waiting_tokens: int) -> Callable[[], bool]:
    """Whether the router has a report with so many tokens."""

    def question() -> bool:
        reports = [backend.load for backend in router.backends.all]
        return any(one is not None and one.waiting_tokens == waiting_tokens for one in reports)

    return question


async def post(client: httpx.AsyncClient, body: dict[str, Any], name: str | None = None) -> httpx.Response:
    headers = {} if name is None else {"X-Stoker-Class": name}
    return await client.post("/v1/completions", json=body, headers=headers)


def count(router: Router, name: str, **labels: str) -> float:
    assert router.admission is not None
    found = [
        sample.value for metric in router.admission.metrics.requests.collect() for sample in metric.samples
        if sample.name == "stoker_router_class_requests_total" and sample.labels == {"request_class": name, **labels}
    ]  # fmt: skip
    return sum(found)


def test_a_request_whose_goal_would_be_missed_is_refused_with_the_predicted_time() -> None:
    async def scenario() -> None:
        engine = await engine_with(10_000)
        async with routed(engine, clock=Clock(), classes=CLASSES) as (router, client):
            await until(sees(router, 10_000))
            refused = await post(client, SHORT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "9")  # 10.0 s, of which 2 are allowed
            error = refused.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "ttft_goal", None)
            assert "predicted in 10.0 s, later than the goal of 2 s (ttftMs of class interactive)" in error["message"]
            assert (await client.get("/v1/models")).status_code == 200  # has no prompt, so no class
            engine.load = load(0)
            await until(sees(router, 0))
            answer = await post(client, SHORT)
            assert (answer.status_code, answer.headers["x-stoker-class"]) == (200, "interactive")
            assert (await post(client, {"prompt": "p" * 40_000})).status_code == 200  # nothing waits before it
            assert count(router, "interactive", outcome="ttft_goal") == 1
            assert count(router, "interactive", outcome="admitted") == 2
            assert engine.served == 3

    run(scenario)


def test_a_short_request_that_passes_a_long_prompt_is_admitted() -> None:
    async def scenario() -> None:
        engine = await engine_with(10_000)
        engine.load = load(10_000, step_tokens=512)
        async with routed(engine, clock=Clock(), classes=CLASSES) as (router, client):
            await until(sees(router, 10_000))
            assert (await post(client, SHORT)).status_code == 200
            refused = await post(client, {"prompt": "p" * 24_000})  # 6,000 tokens do not pass 10,000
            assert "predicted in 16.5 s" in refused.json()["error"]["message"]  # and at the end of a full step

    run(scenario)


def test_batch_waits_where_interactive_requests_go_and_goes_when_there_is_room() -> None:
    async def scenario() -> None:
        engine = await engine_with(1500)
        async with routed(engine, clock=Clock(), classes=CLASSES) as (router, client):
            await until(sees(router, 1500))
            batch = asyncio.create_task(post(client, LONG, "batch"))
            await until(lambda: router.status()["queued"] == {"interactive": 0, "batch": 1})
            assert (await post(client, SHORT, "interactive")).status_code == 200
            full = await post(client, {**LONG, "service_tier": "flex"})
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert "1 requests of class batch wait already (maxQueued)" in full.json()["error"]["message"]
            assert not batch.done()
            engine.load = load(100)
            assert (await batch).headers["x-stoker-class"] == "batch"
            assert router.status()["queued"] == {"interactive": 0, "batch": 0}

    run(scenario)


@pytest.mark.parametrize(
    ("tokens", "prompt", "after", "text"),
    [
        (
            5000,
            4000,
            "5",
            "the prompts before this one take 5.0 s, and later classes fill only a quarter of the goal of",
        ),
        (400, 8000, "1", "a request of class interactive behind this one would get its first token in 2.4 s"),
    ],
    ids=["room", "goal"],
)
def test_a_request_whose_time_in_the_queue_is_over_is_refused(
    tokens: int, prompt: int, after: str, text: str
) -> None:  # fmt: skip
    async def scenario() -> None:
        engine = await engine_with(tokens)
        classes, clock = [CLASSES[0], {**CLASSES[1], "max_queue_s": 0.5, "aging_s": 60}], Clock()
        async with routed(engine, clock=clock, classes=classes) as (router, client):
            await until(sees(router, tokens))
            await post(client, SHORT, "interactive")  # others may come
            waiting = asyncio.create_task(post(client, {"prompt": "p" * prompt}, "batch"))
            await until(lambda: router.status()["queued"]["batch"] == 1)
            clock.now_s += 0.5
            refused = await waiting
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], refused.headers["retry-after"]) == (429, "ttft_goal", after)
            assert f"Class batch waits: {text}" in error["message"]
            assert "It waited 0.5 s (maxQueueSeconds 0.5)" in error["message"]

    run(scenario)


def test_a_request_that_would_be_late_goes_on_in_the_class_behind() -> None:
    async def scenario() -> None:
        engine, clock = await engine_with(5000), Clock()
        classes = [{**CLASSES[0], "late_class": "batch"}, {**CLASSES[1], "max_queued": 1}]
        async with routed(engine, clock=clock, classes=classes) as (router, client):
            await until(sees(router, 5000))
            late = asyncio.create_task(post(client, SHORT))
            await until(lambda: router.status()["queued"] == {"interactive": 0, "batch": 1})
            assert router.status()["goals"] == {"waiting": 1, "late": 0, "refused": 0}
            full = await post(client, SHORT)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert "1 requests of class batch wait already (maxQueued)" in full.json()["error"]["message"]
            engine.load = load(0)
            clock.now_s += 3
            answer = await late
            assert (answer.status_code, answer.headers["x-stoker-class"]) == (200, "batch")
            assert answer.json()["headers"][HEADER] == "1", "engines, too, serve it behind the others"
            assert router.status()["goals"] == {"waiting": 0, "late": 1, "refused": 1}
            assert (await post(client, SHORT)).headers["x-stoker-class"] == "interactive"
            assert count(router, "interactive", outcome="late_class") == 2
            assert count(router, "interactive", outcome="admitted") == 1
            assert count(router, "batch", outcome="admitted") == count(router, "batch", outcome="queue_full") == 1
            assert router.status()["goals"] == {"waiting": 0, "late": 1, "refused": 1}

    run(scenario)


def test_a_request_goes_to_the_soonest_engine_where_it_would_be_late_at_that_of_the_policy() -> None:
    async def scenario() -> None:
        busy, free = await engine_with(10_000), await FakeEngine("b").start()
        free.load = load(100)
        async with routed(busy, free, policy="roundRobin", clock=Clock(), classes=CLASSES) as (router, client):
            await until(sees(router, 10_000))
            await until(sees(router, 100))
            assert [(await post(client, SHORT)).status_code for _ in range(4)] == [200] * 4
        assert (busy.served, free.served) == (0, 4)

    run(scenario)


def test_an_old_request_goes_whatever_is_predicted_one_at_a_time() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await release.wait()
            await exchange.json({})

        engine = await engine_with(50_000, behaviour=waits)
        classes, clock = [CLASSES[0], {**CLASSES[1], "max_queued": 5, "aging_s": 0.5}], Clock()
        async with routed(engine, clock=clock, classes=classes) as (router, client):
            await until(sees(router, 50_000))
            batch = [asyncio.create_task(post(client, LONG, "batch")) for _ in range(3)]
            await until(lambda: router.status()["queued"]["batch"] == 3)
            clock.now_s += 0.5
            await until(lambda: engine.running == 1 and router.status()["queued"]["batch"] == 2)
            release.set()  # now each goes when the one before it has its answer
            assert [answer.status_code for answer in await asyncio.gather(*batch)] == [200] * 3
            assert engine.served == 3

    run(scenario)


def test_a_client_that_leaves_gives_its_place_back() -> None:
    async def scenario() -> None:
        engine = await engine_with(50_000)
        async with routed(engine, clock=Clock(), classes=CLASSES) as (router, client):
            await until(sees(router, 50_000))
            batch = asyncio.create_task(post(client, LONG, "batch"))
            await until(lambda: router.status()["queued"]["batch"] == 1)
            batch.cancel()
            await until(lambda: router.status()["queued"]["batch"] == 0)

    run(scenario)


def test_nothing_is_refused_while_no_rate_is_known() -> None:
    async def scenario() -> None:
        engine = await engine_with(10_000, behaviour=stream(2))
        engine.load = load(10_000, rate=None)
        async with routed(engine, clock=Clock(), classes=CLASSES) as (router, client):
            await until(sees(router, 10_000))
            answer = await post(client, {**SHORT, "stream": True})
            assert (answer.status_code, answer.headers["x-stoker-class"]) == (200, "interactive")
            metrics = (await client.get("/metrics")).text
            assert 'stoker_router_class_first_byte_seconds_count{request_class="interactive"} 1.0' in metrics
            assert 'stoker_router_class_queued_requests{request_class="batch"} 0.0' in metrics

    run(scenario)


def test_without_an_engine_the_router_answers_as_without_classes() -> None:
    async def scenario() -> None:
        async with routed(classes=CLASSES) as (_, client):
            answer = await post(client, SHORT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_backend")

    run(scenario)


def test_an_unknown_class_is_refused_by_name() -> None:
    async def scenario() -> None:
        engine = await engine_with(0)
        async with routed(engine, clock=Clock(), classes=CLASSES) as (_, client):
            answer = await post(client, SHORT, "bulk")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
            assert "header x-stoker-class: 'bulk' is no class" in answer.json()["error"]["message"]
            assert engine.served == 0

    run(scenario)


def test_a_class_of_a_deployment_that_falls_back_here_is_taken_for_none() -> None:
    async def scenario() -> None:
        engine = await engine_with(0)
        async with routed(engine, clock=Clock(), classes=CLASSES) as (_, client):
            for named, tier, name in (
                ({"x-stoker-class": "bulk"}, {}, "interactive"),
                ({}, {"service_tier": "bulk"}, "interactive"),
                ({"x-stoker-class": "batch"}, {}, "batch"),
            ):
                headers = {"x-stoker-fallback": "big", **named}
                answer = await client.post("/v1/completions", json={**SHORT, **tier}, headers=headers)
                assert (answer.status_code, answer.headers["x-stoker-class"]) == (200, name)

    run(scenario)


KNOWN = tuple(RequestClass.model_validate(one) for one in CLASSES)


@pytest.mark.parametrize(
    ("body", "header", "place"),
    [
        ({}, None, 0),
        ({"service_tier": "auto"}, None, 0),
        ({"service_tier": None}, None, 0),
        ({"service_tier": "flex"}, None, 1),
        ({"service_tier": "batch"}, None, 1),
        ({"prompt": "x" * 9000, "service_tier": "flex"}, None, 1),
        ({"service_tier": "priority"}, b"batch", 1),
        ({"prompt": '"service_tier":"nonsense"'}, None, 0),  # quoted: text of a prompt names no class
    ],
)
def test_the_class_of_a_request(body: dict[str, Any], header: bytes | None, place: int) -> None:
    headers = [(b"x-stoker-class", header)] if header is not None else []
    assert class_of(json.dumps(body).encode(), headers, KNOWN) == place


def test_a_tier_without_a_class_is_refused() -> None:
    allowed = "allowed: auto, default, interactive, priority, batch, flex"
    with pytest.raises(UnknownClass, match=rf"service_tier: 'scale' is no class of this deployment; {allowed}"):
        class_of(b'{"service_tier": "scale"}', [], KNOWN)


def test_wrong_classes_are_refused() -> None:
    for classes, message in (
        ([{"name": "a"}, {"name": "a"}], "classes: listed twice: a"),
        ([{"name": "a", "service_tiers": ["b"]}, {"name": "b"}], "classes: listed twice: b"),
        ([{"name": "a", "ttft_goal_s": 0}], "ttft_goal_s"),
        ([{"name": "a", "ttft_goal_s": 1, "late_class": "b"}], "late_class of a: 'b' is no later class; allowed: none"),
        (
            [{"name": "a"}, {"name": "b", "ttft_goal_s": 1, "late_class": "a"}, {"name": "c"}],
            "late_class of b: 'a' is no later class; allowed: c",
        ),
        ([{"name": "a", "late_class": "b"}, {"name": "b"}], "late_class of a has no effect without ttft_goal_s"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(RouterConfig, {"deployment": "d", "backends_file": "f", "classes": classes})


def test_the_engine_gets_the_number_of_the_class_and_not_a_client_s() -> None:
    """Also the engine at which a broken stream goes on."""

    async def scenario() -> None:
        engine = await engine_with(0)
        async with routed(engine, clock=Clock(), classes=CLASSES) as (router, client):
            await until(sees(router, 0))
            for name, place in (("interactive", "0"), ("batch", "1")):
                headers = {"X-Stoker-Class": name, HEADER: "5"}
                answer = await client.post("/v1/completions", json=SHORT, headers=headers)
                assert answer.json()["headers"][HEADER] == place
                assert HEADER not in answer.headers
            others = await client.get("/v1/models", headers={HEADER: "5"})
            assert HEADER not in others.json()["headers"]
        seen: list[tuple[str, str]] = []
        resumable = Resumable(3, [len(marked_stream(3)[0]) + 5])

        async def behaviour(exchange: Exchange) -> None:
            seen.append((exchange.path, exchange.headers[HEADER]))
            await resumable(exchange)

        pair = [await FakeEngine(name, behaviour).start() for name in "ab"]
        async with routed(*pair, hold_s=20, connect_timeout_s=20, classes=CLASSES) as (_, client):
            body = {"stream": True, "prompt": "x", "service_tier": "flex"}
            assert (await client.post("/v1/completions", json=body)).text.endswith("data: [DONE]\n\n")
        assert seen == [("/v1/completions", "1"), (RESUME_PATH, "1")]

    run(scenario)


def test_without_classes_no_number_is_sent() -> None:
    async def scenario() -> None:
        engine = await engine_with(0)
        async with routed(engine) as (_, client):
            answer = await client.post("/v1/completions", json=SHORT, headers={HEADER: "5"})
            assert HEADER not in answer.json()["headers"]

    run(scenario)
