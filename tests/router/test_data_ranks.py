"""Data ranks of an engine as choices of their own: what a report tells of each, which one a request names."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.pod.data_rank import RANK_HEADER
from stoker.pod.split_requests import PREFILL_HEADER
from stoker.router.app import Router
from stoker.router.backend import Backend, Timeouts
from stoker.router.backends import by_rank
from stoker.router.cache_aware import CacheAware
from stoker.router.load import Load, RankLoad
from stoker.router.pairs import cheapest
from stoker.router.snapshot import BackendEntry
from stoker.router.standing import standing_of
from stoker.router.work import Work
from testing.router.fake_engine import Exchange, FakeEngine
from testing.router.harness import routed as routed_by
from testing.router.harness import run, until
from testing.router.places import REPORTS, Engine, peer, report
from testing.router.resumable_engine import Resumable, told

HEADER, HELPER = RANK_HEADER.decode(), PREFILL_HEADER.decode()
routed = partial(routed_by, clock=lambda: time.monotonic() / 100)
"""A report stays young for 100 s, also on a busy machine."""
LONG = {"messages": [{"role": "user", "content": "tell " * 8000}]}


def pod_report(ranks: list[Load], seq: int = 1) -> Load:
    """The report of a pod with these ranks, the sums beside them."""
    parts = tuple(RankLoad(**{name: getattr(one, name) for name in RankLoad.model_fields}) for one in ranks)
    sums = {name: sum(getattr(one, name) for one in ranks) for name in ("requests", "waiting", "waiting_tokens")}
    return report(**sums, seq=seq, ranks=parts)


def pods(*ranks: list[Load]) -> list[Backend]:
    """Pods that have reported these ranks."""
    times = Timeouts(connect_s=1, silence_s=1, probe_s=1)
    found = []
    for number, loads in enumerate(ranks):
        entry = BackendEntry(url=f"http://127.0.0.{number + 1}:1", pod_uid=str(number))
        found.append(Backend(entry, times, lambda: 0.0))
        found[-1].reported(pod_report(loads))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(REPORTS, min_size=2, max_size=4), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 20_000)), max_size=6),
    st.integers(0, 20_000),
    st.integers(0, 100),
)
def test_ranks_are_chosen_as_engines_of_pods_of_their_own_would_be(
    drawn: list[list[Load]], sent: list[tuple[int, int]], tokens: int, turn: int
) -> None:
    found = by_rank(pods(*drawn))
    loads = [part for pod in drawn for part in pod_report(pod).of_ranks]
    engines = [Engine(str(number), load=load) for number, load in enumerate(loads)]
    with ExitStack() as open_requests:
        for number, prompt in sent:
            place = number % len(found)
            open_requests.enter_context(found[place].request())
            open_requests.enter_context(found[place].computing(prompt))
            engines[place].pending += 1
            engines[place].unstarted += (prompt,)
        assert [one.standing[1:] for one in found] == [standing_of(one)[1:] for one in engines]
        chosen = CacheAware().pair(found, (), turn, Work(tokens))
        alone = CacheAware().pair(engines, (), turn, Work(tokens))
        assert (found.index(chosen.answers), chosen.uncached) == (engines.index(alone.answers), alone.uncached)
        assert found.index(cheapest(found, tokens, turn)) == engines.index(cheapest(engines, tokens, turn))
        assert sum(pod.pending for pod in {one.backend for one in found}) == len(sent)
    assert all(one.pending == one.backend.pending == 0 and not one.unstarted for one in found)


def test_a_report_has_a_part_of_each_rank() -> None:
    first = RankLoad(requests=3, waiting=1, waiting_tokens=50, prompts=(50,), prefill_tokens_per_s=100.0)
    second = RankLoad(requests=1, waiting=0, waiting_tokens=0, busy_tokens_per_s=900.0, gap_s=0.5)
    whole = report(
        requests=4, waiting=1, waiting_tokens=50, prompts=(50,), step_tokens=64, prefill_tokens_per_s=300.0,
        busy_tokens_per_s=700.0, gap_s=0.25, queue_s={0: 1}, ranks=(first, second),
        peer=peer(copies=({"endpoint": "h:1"}, {"endpoint": "h:4"})),
    )  # fmt: skip
    one, two = whole.of_ranks
    assert (one.requests, one.decoding, one.waiting_prompts, one.step_of(0)) == (3, 2, (50,), 64)
    assert (one.measured_rate, one.gap_s) == (100.0, 0.25), "not the rate of all ranks together"
    assert (two.requests, two.prompts, two.prefill_tokens_per_s, two.measured_rate) == (1, (), 300.0, 900.0)
    assert two.gap_s == 0.5
    assert [part.peer.endpoint for part in (one, two) if part.peer is not None] == ["h:1", "h:4"]
    assert (one.queue_s, one.of_ranks) == ({}, ())
    assert report(ranks=(first,)).of_ranks == (), "one rank is the engine"


def test_the_parts_of_a_newer_report_go_to_the_same_ranks_and_a_restart_empties_their_caches() -> None:
    (pod,) = pods([report(), report(requests=2)])
    before = pod.candidates
    pod.reported(pod_report([report(requests=7), report()], seq=2))
    assert pod.candidates is before
    assert [one.load.requests for one in before if one.load is not None] == [7, 0]
    identities = [one.identity for one in before]
    assert len({pod.identity, *identities}) == 3
    pod.reported(pod_report([report(), report()]).model_copy(update={"epoch": "other"}))
    assert not {one.identity for one in pod.candidates} & set(identities)
    pod.reported(report(seq=9))
    assert pod.candidates == (pod,)


# Over HTTP.


def engine(pod: str, *ranks: dict[str, Any], role: str = "", **changes: Any) -> FakeEngine:
    """An engine that reports ranks: each its requests, and that it is fast."""
    made = FakeEngine(pod)
    made.role = role
    known = {"requests": 0, "waiting": 0, "waiting_tokens": 0, "prefill_tokens_per_s": 10_000.0, "gap_s": 0.02}
    copies = [{"endpoint": f"0.0.0.0:{7001 + 3 * number}"} for number in range(len(ranks))]
    own = peer(endpoint="0.0.0.0:7001", copies=copies).model_dump(mode="json") if role else None
    parts = [{**known, **one} for one in ranks]
    made.load = {"epoch": f"{pod}1", **known, "ranks": parts, "peer": own, **changes}
    return made


async def reported(router: Router, *pod_uids: str) -> None:
    """Wait until the router knows the ranks of these pods."""
    await until(lambda: set(pod_uids) <= {one.entry.pod_uid for one in router.backends.all if one.ranks})


def rank_load(router: Router, rank: int) -> Load:
    """The part of a rank in the newest report of the first pod."""
    load = router.backends.all[0].ranks[rank].report
    assert load is not None
    return load


async def rank_of(client: Any, body: dict[str, Any] = LONG, **headers: str) -> tuple[str, str | None]:
    """The pod that got a request, and the rank that was named."""
    found = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert found.status_code == 200, found.text
    return found.json()["pod"], found.json()["headers"].get(HEADER)


def test_a_rank_is_named_by_its_queue_and_again_for_the_beginning_that_it_has() -> None:
    async def scenario() -> None:
        a = await engine("a", {"requests": 9}, {"requests": 3}, {"requests": 9}).start()
        b = await engine("b", {"requests": 9}, {"requests": 9}).start()
        async with routed(a, b, policy="cacheAware") as (router, client):
            await reported(router, "a", "b")
            assert await rank_of(client) == ("a", "1")
            assert a.load is not None
            a.load["ranks"], a.load["seq"] = [{**one, "requests": 5} for one in a.load["ranks"]], 10**9  # type: ignore[attr-defined]
            await until(lambda: rank_load(router, 1).requests == 5)
            assert await rank_of(client) == ("a", "1"), "equally long queues, and the others have not its beginning"
            assert (await rank_of(client, {"prompt": "x"}, **{HEADER: "17"}))[1] in ("0", "1", "2"), "not the client's"
            pending = [one.pending for pod in router.backends.all for one in (pod, *pod.ranks)]
            assert pending == [0] * 7
            status = (await client.get("/status")).json()["backends"]
            assert [one["ranks"] for one in status] == [[{"pending": 0}] * 3, [{"pending": 0}] * 2]

    run(scenario)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"policy": "leastPending"}, None), ({"policy": "leastPending", "classes": [{"name": "all"}]}, "1")],
    ids=["the front chooses", "predicted for the rank that is named"],
)
def test_a_policy_that_sees_pods_leaves_the_rank_to_the_engine_unless_its_queue_is_predicted(
    settings: dict[str, Any], named: str | None
) -> None:
    async def scenario() -> None:
        a = await engine("a", {"requests": 5}, {"requests": 1}).start()
        async with routed(a, **settings) as (router, client):
            if named is not None:
                await reported(router, "a")
            assert await rank_of(client) == ("a", named)

    run(scenario)


def test_the_first_token_is_predicted_at_one_rank() -> None:
    """While both are late, the request is refused; then one is free, though as much as before waits at the other."""

    async def scenario() -> None:
        late = {"requests": 1, "waiting": 1, "waiting_tokens": 90_000}
        a = await engine("a", late, late, waiting=2, requests=2, waiting_tokens=180_000, step_tokens=10**6).start()
        goals = [{"name": "all", "ttft_goal_s": 5.0}]
        async with routed(a, classes=goals) as (router, client):
            await reported(router, "a")
            refused = await client.post("/v1/chat/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "ttft_goal")
            assert a.load is not None
            free = {"requests": 0, "waiting": 0, "waiting_tokens": 0}
            a.load["ranks"], a.load["seq"] = [a.load["ranks"][0], {**a.load["ranks"][1], **free}], 10**9  # type: ignore[index]
            await until(lambda: rank_load(router, 1).waiting == 0)
            assert await rank_of(client) == ("a", "1")

    run(scenario)


def test_each_prompt_goes_to_the_rank_of_the_prefill_engine_with_least_to_compute() -> None:
    """What this router has sent counts at once, where it is more than what the rank reports."""

    async def scenario() -> None:
        busy = [{"waiting": 1, "requests": 1, "waiting_tokens": tokens} for tokens in (9000, 1000, 500)]
        p = await engine("p", *busy, role="prefill", step_tokens=10**6).start()
        d = await engine("d", {"requests": 40}, {"requests": 36}, role="decode").start()
        seen: list[tuple[str | None, str | None]] = []
        begin = asyncio.Event()

        async def hold(exchange: Exchange) -> None:
            seen.append((exchange.headers.get(HELPER), exchange.headers.get(HEADER)))
            await begin.wait()
            await Resumable(3)(exchange)

        d.behaviour = hold
        async with routed(p, d, policy="cacheAware") as (router, client):
            await reported(router, "p", "d")
            asked = []
            for number in range(3):
                body = {
                    "messages": [{"role": "user", "content": f"{number} " * (16_000 - 4000 * number)}],
                    "stream": True,
                }
                asked.append(asyncio.create_task(client.post("/v1/chat/completions", json=body)))
                await until(lambda number=number: len(seen) > number)  # type: ignore[misc]
            assert seen == [(f"127.0.0.1:{port}", "1") for port in (7007, 7004, 7004)]
            begin.set()
            assert [(await one).status_code for one in asked] == [200] * 3

    run(scenario)


def test_a_stream_goes_on_at_a_rank_of_another_engine() -> None:
    async def scenario() -> None:
        a = await engine("a", {}, {"requests": 4}).start()
        b = await engine("b", {"requests": 8}, {"requests": 6}).start()
        seen: list[str | None] = []
        whole = Resumable(30)

        async def note(exchange: Exchange) -> None:
            seen.append(exchange.headers.get(HEADER))
            await whole(exchange)

        a.behaviour, b.behaviour = Resumable(30, cuts=[700]), note
        async with routed(a, b, policy="cacheAware") as (router, client):
            await reported(router, "a", "b")
            found = await client.post("/v1/chat/completions", json={**LONG, "stream": True})
            tokens = [token for chunk in told(found.text) for token in chunk.get("stoker", {}).get("tokens", ())]
            assert (tokens, seen) == (list(range(30)), ["1"])
            assert not any(one.pending for pod in router.backends.all for one in (pod, *pod.ranks))

    run(scenario)
