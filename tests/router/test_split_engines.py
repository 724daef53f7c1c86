"""A prefill engine and two decode engines, real processes: split requests give what whole ones give, and none is lost.

The router's choice depends on measured rates; here a policy splits every request, so that no test depends on time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker.pod.tracing import tracer_of
from stoker.router.app import Router
from testing.router.always_split import AlwaysSplit
from testing.router.collector import Collector
from testing.router.engine_process import Client, Engine, answer_of, assert_same
from testing.router.harness import routed, run, until
from tests.engine.test_server_real import write_model

Requests = list[tuple[str, dict[str, Any]]]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "the lazy brown fox jumps over the quick dog"


def requests_of(story: str) -> Requests:
    """Requests whose prompts no engine has had: each story has its own."""
    return [
        (TEXT, {"prompt": f"{story}1 {LONG}", "logprobs": 3, "temperature": 0}),
        (TEXT, {"prompt": f"{story}2 {LONG}", "seed": 5, "temperature": 1.1}),
        (CHAT, {"messages": [{"role": "user", "content": f"{story}3 {LONG}"}], "n": 2, "seed": 11, "temperature": 0.9}),
        (TEXT, {"prompt": f"{story}4 {LONG}", "seed": 7, "temperature": 0.7, "stop": ["jumps over"], "echo": True}),
        (TEXT, {"prompt": f"{story}5 {LONG}", "seed": 3, "temperature": 0.9, "guided_regex": "[a-y ]{60,90}z"}),
    ]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with pytest.MonkeyPatch.context() as patch, Collector() as found:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield found


def start(folder: Path, name: str, role: str) -> Engine:
    transfer = {"listen": "127.0.0.1:0", "key_file": str(folder / "key"), "zone_blocks": 32}
    return Engine(folder, name, role=role, transfer=transfer)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[dict[str, Engine]]:
    assert collector.url
    folder = tmp_path_factory.mktemp("split")
    write_model(folder / "tiny")
    (folder / "key").write_text(secrets.token_hex(32))
    made = {name: start(folder, name, role) for name, role in (("p", "prefill"), ("d", "decode"), ("e", "decode"))}
    try:
        for engine in made.values():
            engine.wait_until_ready()
        yield made
    finally:
        for engine in made.values():
            engine.kill()


def test_a_split_request_is_one_trace(engines: dict[str, Engine], collector: Collector) -> None:
    traces: list[str] = []

    def is_whole(trace: str) -> bool:
        return collector.names(trace) == {"router", "engine", "queue", "prefill", "decode"}

    async def scenario() -> None:
        tracer = tracer_of("stoker-router", os.environ)
        async with routed(
            engines["p"], engines["d"], policy_object=AlwaysSplit(), tracer=tracer, max_resume_bytes=0
        ) as (router, http):
            await paired(router)
            for number in itertools.count(1):
                trace = f"{number:032x}"
                body = {"prompt": f"trace {trace} {LONG}", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
                headers = {"traceparent": f"00-{trace}-00000000000000aa-01"}
                assert (await http.post(TEXT, json=body, headers=headers)).status_code == 200
                await until(partial(is_whole, trace))
                traces.append(trace)
                if collector.trace(trace)["prefill"].instance == "p":
                    break  # on a busy machine the decode engine may compute the first prompts itself
        tracer.close()
        for trace in traces:
            spans = collector.trace(trace)
            assert spans["router"].parent == "00000000000000aa"
            assert spans["engine"].parent == spans["router"].id
            assert {spans[name].parent for name in ("queue", "prefill", "decode")} == {spans["engine"].id}
            assert spans["queue"].service == spans["prefill"].service == "stoker-engine"
            assert (spans["router"].service, spans["engine"].instance, spans["decode"].instance) == (
                "stoker-router", "d", "d",
            )  # fmt: skip
            assert spans["queue"].instance == spans["prefill"].instance
            assert spans["router"].attributes["http.response.status_code"] == 200
            assert spans["decode"].attributes["stoker.output_tokens"] == 8
            for span in spans.values():
                assert span.begin_ns <= span.end_ns
            assert spans["queue"].end_ns == spans["prefill"].begin_ns

    run(scenario, limit_s=600)


async def outcomes(engine: Engine) -> dict[str, float]:
    """Split requests of an engine, by outcome, and by the reason of those that it computed itself."""
    async with httpx.AsyncClient(timeout=120) as http:
        text = (await http.get(f"{engine.url}/metrics")).text
    samples = (one for family in text_string_to_metric_families(text) for one in family.samples)
    wanted = {"stoker_split_requests_total": "outcome", "stoker_split_fallbacks_total": "reason"}
    return {one.labels[wanted[one.name]]: one.value for one in samples if one.name in wanted and one.value}


async def whole_answers(engine: Engine, requests: Requests) -> list[dict[str, Any]]:
    """What one engine answers alone."""
    clients = [Client() for _ in requests]
    async with httpx.AsyncClient(base_url=engine.url, timeout=120) as http:
        for client, (path, body) in zip(clients, requests, strict=True):
            await client.read(http, path, body)
    return [without_tokens(answer_of(client.text)) for client in clients]


def without_tokens(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without marks, which an engine sends to routers alone."""
    for choice in answer.values():
        if isinstance(choice, dict):
            choice.pop("tokens")
    return answer


async def paired(router: Router) -> None:
    """Wait until every backend has told where other engines reach it."""
    await until(lambda: all(one.peer_endpoint is not None for one in router.backends.all))


def read_all(http: httpx.AsyncClient, requests: Requests) -> list[tuple[Client, asyncio.Task[None]]]:
    clients = [Client() for _ in requests]
    return [
        (client, asyncio.create_task(client.read(http, path, body)))
        for client, (path, body) in zip(clients, requests, strict=True)
    ]


async def split_answers(
    engines: dict[str, Engine], names: Sequence[str], requests: Requests, victim: str | None = None
) -> list[str]:
    """What a router over the named engines answers; the victim is killed when a stream has begun."""
    async with routed(*(engines[name] for name in names), policy_object=AlwaysSplit()) as (router, http):
        await paired(router)
        streams = read_all(http, requests)
        if victim is not None:
            await until(lambda: any('"choices"' in client.text for client, _ in streams))
            engines[victim].kill()
        await asyncio.gather(*(task for _, task in streams))
        return [client.text for client, _ in streams]


def assert_equal(texts: list[str], expected: list[dict[str, Any]]) -> None:
    for text, answer in zip(texts, expected, strict=True):
        assert "backend_lost" not in text
        assert_same(without_tokens(answer_of(text)), json.loads(json.dumps(answer)))


def test_split_requests_have_the_tokens_of_whole_ones(engines: dict[str, Engine]) -> None:
    async def scenario() -> None:
        for number in itertools.count():  # on a busy machine the decode engine may compute the first prompts itself
            requests = requests_of(f"a{number} ")
            expected = await whole_answers(engines["e"], requests)
            assert_equal(await split_answers(engines, ("p", "d"), requests), expected)
            counted = await outcomes(engines["d"])
            if counted.get("split", 0) + counted.get("prefill_only", 0) >= 3:
                break

    run(scenario, limit_s=600)


def test_engines_whose_roles_flip_under_streams_lose_none_and_compute_for_each_other_the_other_way_round(
    engines: dict[str, Engine],
) -> None:
    async def scenario() -> None:
        before, after = requests_of("f"), requests_of("g")
        expected = await whole_answers(engines["e"], before), await whole_answers(engines["e"], after)
        counted = await outcomes(engines["p"])
        async with routed(engines["p"], engines["d"], policy_object=AlwaysSplit()) as (router, http):
            await paired(router)
            streams = read_all(http, before)
            await until(lambda: any('"choices"' in client.text for client, _ in streams))
            flipped = [engines[name].entry() | {"role": role} for name, role in (("p", "decode"), ("d", "prefill"))]
            answer = await http.put("/backends", json={"version": 2, "backends": flipped})
            assert answer.json()["accepted"]
            later = read_all(http, after)
            await asyncio.gather(*(task for _, task in (*streams, *later)))
        assert_equal([client.text for client, _ in streams], expected[0])
        assert_equal([client.text for client, _ in later], expected[1])
        while await outcomes(engines["p"]) == counted:  # until it reports that it has answered split requests
            await asyncio.sleep(0.05)

    run(scenario, limit_s=600)


def test_no_request_is_lost_when_first_a_decode_engine_and_then_the_prefill_engine_is_killed(
    engines: dict[str, Engine],
) -> None:
    async def scenario() -> None:
        for victim, names in (("d", ("p", "d", "e")), ("p", ("p", "e"))):
            requests = requests_of(victim)
            texts = await split_answers(engines, names, requests, victim)
            assert_equal(texts, await whole_answers(engines["e"], requests))
        counted = await outcomes(engines["e"])
        assert counted, "no request was split"

    run(scenario, limit_s=600)
