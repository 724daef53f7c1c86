"""Requests that a router splits between two engines: the header, the retries, the engines that do not fit."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from stoker.pod.split_requests import PREFILL_HEADER
from testing.router.fake_engine import Exchange, FakeEngine, say_hello
from testing.router.harness import routed as routed_by
from testing.router.harness import run, snapshot, until
from testing.router.places import peer
from testing.router.resumable_engine import Resumable, told

HEADER = PREFILL_HEADER.decode()
routed = partial(routed_by, clock=lambda: time.monotonic() / 100)
"""A report stays young for 100 s, also on a busy machine."""
LONG = {"messages": [{"role": "user", "content": "tell " * 8000}]}
SHORT = {"messages": [{"role": "user", "content": "tell"}]}


def engine(pod: str, role: str, *, requests: int = 0, **changes: Any) -> FakeEngine:
    """An engine that reports a peer; with `requests`, as many sequences decode there."""
    made = FakeEngine(pod)
    made.role = role
    own = peer(endpoint=f"0.0.0.0:{9000 + len(pod)}", **changes).model_dump(mode="json")
    made.load = {"epoch": f"{pod}1", "requests": requests, "waiting": 0, "waiting_tokens": 0,
                 "prefill_tokens_per_s": 10_000.0, "gap_s": 0.02, "peer": own}  # fmt: skip
    return made


async def answer(client: Any, body: dict[str, Any] = LONG, **headers: str) -> dict[str, Any]:
    found = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert found.status_code == 200, found.text
    content: dict[str, Any] = found.json()
    return content


async def reported(router: Any, *engines: FakeEngine) -> None:
    """Wait until the router has the reports of these engines."""
    pods = {one.pod_uid for one in engines}
    await until(lambda: pods <= {one.entry.pod_uid for one in router.backends.all if one.peer_endpoint is not None})


async def fleet() -> tuple[FakeEngine, FakeEngine, FakeEngine]:
    p, d, e = engine("p", "prefill"), engine("dd", "decode", requests=20), engine("eee", "decode", requests=24)
    for one in (p, d, e):
        await one.start()
    return p, d, e


@pytest.mark.parametrize("policy", ["cacheAware", "leastPending"])
def test_the_decode_engine_gets_the_request_with_the_prefill_engines_address(policy: str) -> None:
    async def scenario() -> None:
        p, d, e = await fleet()
        async with routed(p, d, e, policy=policy) as (router, client):
            await reported(router, p, d, e)
            got = await answer(client)
            assert got["pod"] in ("dd", "eee")
            assert got["headers"][HEADER] == "127.0.0.1:9001"  # an engine that listens everywhere: its url's host
            assert (p.served, d.served + e.served) == (0, 1)  # one request, to one engine
            short = await answer(client, SHORT)
            assert short["pod"] in ("dd", "eee")
            assert HEADER not in short["headers"]
            assert b"stoker_router_split_requests_total 1.0" in (await client.get("/metrics")).content

    run(scenario)


def test_a_client_cannot_name_a_prefill_engine() -> None:
    async def scenario() -> None:
        p, d, e = await fleet()
        async with routed(p, d, e, policy="cacheAware") as (router, client):
            await reported(router, p, d, e)
            assert HEADER not in (await answer(client, SHORT, **{HEADER: "10.0.0.1:22"}))["headers"]
            assert (await answer(client, LONG, **{HEADER: "10.0.0.1:22"}))["headers"][HEADER] == "127.0.0.1:9001"
            models = await client.get("/v1/models", headers={HEADER: "10.0.0.1:22"})
            assert HEADER not in models.json()["headers"]

    run(scenario)


def test_another_decode_engine_gets_the_request_and_the_address_when_one_dies_before_the_first_byte() -> None:
    async def scenario() -> None:
        p, d, e = await fleet()

        async def die(exchange: Exchange) -> None:
            d.kill()

        d.behaviour = die
        async with routed(p, d, e, policy="cacheAware") as (router, client):
            await reported(router, p, d, e)
            got = await answer(client)  # d is the cheaper one
            assert (got["pod"], got["headers"][HEADER]) == ("eee", "127.0.0.1:9001")
            assert b"stoker_router_retries_total 1.0" in (await client.get("/metrics")).content
            await until(lambda: not router.backends.all[0].unstarted)

    run(scenario)


def test_a_decode_engine_that_is_full_leaves_the_request_to_another_then_to_the_prefill_engine() -> None:
    async def scenario() -> None:
        p, d, e = await fleet()

        async def full(exchange: Exchange) -> None:
            await exchange.json({}, 429)

        d.behaviour = full
        async with routed(p, d, e, policy="cacheAware") as (router, client):
            await reported(router, p, d, e)
            got = await answer(client)
            assert (got["pod"], got["headers"][HEADER]) == ("eee", "127.0.0.1:9001")
            e.behaviour = full
            got = await answer(client)
            assert got["pod"] == "p"
            assert HEADER not in got["headers"]

    run(scenario)


def test_a_lost_prefill_engine_means_that_requests_are_not_split() -> None:
    async def scenario() -> None:
        p, d, e = await fleet()
        async with routed(p, d, e, policy="cacheAware") as (router, client):
            await reported(router, p, d, e)
            assert HEADER in (await answer(client))["headers"]
            p.kill()
            await until(lambda: len(router.backends.ready) == 2)
            got = await answer(client, {"messages": [{"role": "user", "content": "else " * 8000}]})
            assert got["pod"] in ("dd", "eee")
            assert HEADER not in got["headers"]

    run(scenario)


def test_a_prefill_engine_serves_alone_while_no_decode_engine_does() -> None:
    async def scenario() -> None:
        p, d, e = await fleet()
        async with routed(p, d, e, policy="roundRobin") as (router, client):
            await reported(router, p, d, e)
            d.kill()
            e.kill()
            await until(lambda: len(router.backends.ready) == 1)
            got = await answer(client)
            assert got["pod"] == "p"
            assert HEADER not in got["headers"]

    run(scenario)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"fingerprint": "other"}, id="another fingerprint"),
        pytest.param({"transports": ("nixl",)}, id="no common transport"),
    ],
)
def test_engines_that_do_not_fit_are_not_paired(changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        p, d = engine("p", "prefill", **changes), engine("dd", "decode", requests=20)
        async with routed(await p.start(), await d.start(), policy="leastPending") as (router, client):
            await reported(router, p, d)
            got = await answer(client)
            assert got["pod"] == "dd"
            assert HEADER not in got["headers"]

    run(scenario)


def test_engines_of_two_revisions_are_not_paired() -> None:
    async def scenario() -> None:
        p, d = engine("p", "prefill"), engine("dd", "decode", requests=20)
        async with routed(await p.start(), await d.start(), policy="leastPending") as (router, client):
            await reported(router, p, d)
            assert HEADER in (await answer(client))["headers"]
            moved = snapshot(2, p.entry(revision="r2"), d.entry(revision="r1"))
            assert (await client.put("/backends", json=moved)).json()["accepted"]
            assert HEADER not in (await answer(client))["headers"]

    run(scenario)


def test_a_draining_prefill_engine_gets_no_prompts() -> None:
    async def scenario() -> None:
        p, d = engine("p", "prefill"), engine("dd", "decode", requests=20)
        async with routed(await p.start(), await d.start(), policy="cacheAware") as (router, client):
            await reported(router, p, d)
            moved = snapshot(2, p.entry(draining=True), d.entry())
            assert (await client.put("/backends", json=moved)).json()["accepted"]
            assert HEADER not in (await answer(client))["headers"]

    run(scenario)


def test_a_stream_whose_decode_engine_dies_goes_on_at_another_without_a_prefill_engine() -> None:
    async def scenario() -> None:
        p, d, e = await fleet()
        broken, whole = Resumable(30, cuts=[700]), Resumable(30)
        seen: list[dict[str, str]] = []

        async def note(exchange: Exchange) -> None:
            seen.append(exchange.headers)
            await whole(exchange)

        d.behaviour, e.behaviour = broken, note
        async with routed(p, d, e, policy="cacheAware") as (router, client):
            await reported(router, p, d, e)
            found = await client.post("/v1/chat/completions", json={**LONG, "stream": True})
            tokens = [token for chunk in told(found.text) for token in chunk.get("stoker", {}).get("tokens", ())]
            assert tokens == list(range(30))
            assert HEADER not in seen[0]

    run(scenario)


def test_the_status_names_roles_epochs_and_peers() -> None:
    async def scenario() -> None:
        p, d = engine("p", "prefill"), engine("dd", "decode")
        async with routed(await p.start(), await d.start(), policy="leastPending") as (router, client):
            await reported(router, p, d)
            found = {one["pod_uid"]: one for one in (await client.get("/status")).json()["backends"]}
            assert [found["p"][key] for key in ("role", "epoch", "peer")] == ["prefill", "p1", "127.0.0.1:9001"]
            assert [found["dd"][key] for key in ("role", "epoch")] == ["decode", "dd1"]

    run(scenario)


@pytest.mark.parametrize("policy", ["cacheAware", "leastPending"])
def test_a_newer_snapshot_flips_roles_whatever_the_engines_report(policy: str) -> None:
    async def scenario() -> None:
        p, d = engine("p", "prefill"), engine("dd", "decode")
        for one in (p, d):
            assert one.load is not None
            one.load["role"] = one.role
        async with routed(await p.start(), await d.start(), policy=policy) as (router, client):
            await reported(router, p, d)
            assert (await answer(client, SHORT))["pod"] == "dd"
            flipped = snapshot(2, p.entry(role="decode"), d.entry(role="prefill"))
            assert (await client.put("/backends", json=flipped)).json()["accepted"]
            assert {one.entry.pod_uid: one.role for one in router.backends.all} == {"p": "decode", "dd": "prefill"}
            assert (await answer(client, SHORT))["pod"] == "p"
            back = snapshot(3, p.entry(), d.entry())
            assert (await client.put("/backends", json=back)).json()["accepted"]
            assert (await answer(client, SHORT))["pod"] == "dd"

    run(scenario)


def test_an_engine_names_its_role_where_the_snapshot_does_not() -> None:
    async def scenario() -> None:
        p, d = engine("p", ""), engine("dd", "decode")
        assert p.load is not None
        p.load["role"] = "prefill"
        async with routed(await p.start(), await d.start(), policy="leastPending") as (router, _):
            await reported(router, p, d)
            assert {one.entry.pod_uid: one.role for one in router.backends.all} == {"p": "prefill", "dd": "decode"}

    run(scenario)


def test_a_fleet_without_roles_is_not_followed_by_a_policy_that_counts() -> None:
    async def scenario() -> None:
        plain = await FakeEngine("a", say_hello).start()
        async with routed(plain, policy="leastPending") as (router, client):
            await answer(client)
            assert not router.backends.pairs_engines
            assert not router.backends._followers

    run(scenario)
