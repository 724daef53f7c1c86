"""Shares by revision: who gets a request, what is counted of each revision, and windows that begin together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from stoker.pod.config_file import ConfigError
from stoker.router.revision_counts import RevisionCounts
from stoker.router.shares import Shares, key_of
from stoker.router.snapshot import BackendEntry, parse_snapshot
from testing.router.fake_engine import Exchange, FakeEngine, stream
from testing.router.harness import routed, run, snapshot, until

OLD, NEW = "r-old", "r-new"


def shares(percent: int) -> list[dict[str, object]]:
    return [{"revision": NEW, "percent": percent}, {"revision": OLD, "percent": 100 - percent}]


@given(percent=st.integers(0, 100), more=st.integers(0, 100), key=st.binary(max_size=20))
def test_a_session_stays_with_its_revision_and_a_rising_share_keeps_what_it_has(
    percent: int, more: int, key: bytes
) -> None:
    here = Shares(((NEW, percent), (OLD, 100 - percent)))
    assert here.order(key) == here.order(key)
    assert set(here.order(key)) == {name for name, share in here.percents if share}
    higher = Shares(((NEW, max(percent, more)), (OLD, 100 - max(percent, more))))
    if here.order(key)[0] == NEW:
        assert higher.order(key)[0] == NEW


def test_sessions_are_shared_out_as_the_percents_say() -> None:
    for percent in (5, 25, 50):
        mine = Shares(((NEW, percent), (OLD, 100 - percent)))
        got = sum(mine.order(f"user-{number}".encode())[0] == NEW for number in range(4000))
        assert abs(got / 40 - percent) < 3


def test_a_request_without_a_session_goes_by_its_body() -> None:
    assert key_of(b'{"prompt": "a"}', ()) == key_of(b'{"prompt": "a"}', [(b"host", b"x")])
    assert key_of(b'{"prompt": "a"}', ()) != key_of(b'{"prompt": "b"}', ())
    assert key_of(b'{"prompt": "a", "user": "u"}', ()) == key_of(b'{"prompt": "b", "user": "u"}', ()) == b"u"


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([{"revision": "a", "percent": 60}], "must add up to 100, got 60"),
        ([{"revision": "a", "percent": 50}, {"revision": "a", "percent": 50}], "shares: listed twice: a"),
        ([{"revision": "a", "percent": 101}], "less than or equal to 100"),
    ],
)
def test_shares_that_do_not_make_a_whole_are_refused(listed: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_snapshot({"version": 1, "backends": [], "shares": listed})


def test_counts_of_a_window_begin_anew_for_every_revision_and_the_totals_go_on() -> None:
    now = [0.0]
    counts = RevisionCounts(lambda: now[0])
    entry = BackendEntry(url="http://a", pod_uid="a", revision=NEW, pool="main")
    counts.begin("one")
    counts.answered(entry, 200, 0.1)
    counts.gap(entry, 0.02)
    counts.begin("one")
    (found,) = counts.status()["revisions"]
    assert (found["revision"], found["pool"], found["requests"], found["errors"]) == (NEW, "main", 1, 0)
    assert (sum(found["first_token_s"].values()), sum(found["token_gap_s"].values())) == (1, 1)
    now[0] = 7.0
    counts.begin("two")
    counts.unanswered(entry)
    counts.answered(entry, 503, None)
    counts.broke_off(entry)
    now[0] = 9.0
    status = counts.status()
    assert (status["id"], status["seconds"]) == ("two", 2)
    assert [(one["requests"], one["errors"]) for one in status["revisions"]] == [(2, 3)]
    samples = {metric.name: metric for metric in counts.collect()}
    assert samples["stoker_router_revision_requests"].samples[0].value == 3
    assert samples["stoker_router_revision_requests"].samples[0].labels == {"revision": NEW, "pool": "main"}


def test_the_router_gives_each_revision_its_share_and_counts_it() -> None:
    async def scenario() -> None:
        old, new = await FakeEngine("old", stream(3)).start(), await FakeEngine("new", stream(3)).start()
        async with routed(old, new) as (_, client):
            entries = [old.entry(revision=OLD, pool="main"), new.entry(revision=NEW, pool="main")]
            body = {**snapshot(2, *entries), "shares": shares(30), "window": "w1"}
            assert (await client.put("/backends", json=body)).json()["accepted"]
            for number in range(60):
                answer = await client.post(
                    "/v1/completions", json={"prompt": "x"}, headers={"x-session-id": str(number)}
                )
                assert answer.status_code == 200
            assert 5 <= new.served <= 31
            moves = set()
            for _ in range(5):
                before = (old.served, new.served)
                await client.post("/v1/completions", json={"prompt": "y"}, headers={"x-session-id": "same"})
                moves.add((old.served - before[0], new.served - before[1]))
            assert moves in ({(1, 0)}, {(0, 1)})
            window = (await client.get("/status")).json()["window"]
            assert window["id"] == "w1"
            counted = {found["revision"]: found for found in window["revisions"]}
            assert counted[NEW]["requests"] == new.served
            assert counted[OLD]["requests"] == old.served
            assert sum(counted[OLD]["first_token_s"].values()) == old.served
            assert sum(counted[OLD]["token_gap_s"].values()) > 0
            families = {f.name for f in text_string_to_metric_families((await client.get("/metrics")).text)}
            assert {"stoker_router_revision_requests", "stoker_router_revision_first_token_seconds"} <= families

            body = {**snapshot(3, *entries), "shares": shares(0), "window": ""}
            await client.put("/backends", json=body)
            served = new.served
            for number in range(40):
                await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-session-id": str(number)})
            assert new.served == served, "a revision without a share gets nothing"

    run(scenario)


def test_a_running_stream_of_a_revision_that_lost_its_share_finishes_there() -> None:
    async def scenario() -> None:
        old, new = await FakeEngine("old", stream(2)).start(), await FakeEngine("new", stream(40, 0.02)).start()
        async with routed(old, new) as (_, client):
            entries = [old.entry(revision=OLD), new.entry(revision=NEW)]
            await client.put("/backends", json={**snapshot(2, *entries), "shares": shares(100), "window": "w"})
            async with client.stream("POST", "/v1/completions", json={"prompt": "x"}) as answer:
                chunks = answer.aiter_text()
                text = await anext(chunks)
                await client.put("/backends", json={**snapshot(3, *entries), "shares": shares(0), "window": ""})
                text += "".join([chunk async for chunk in chunks])
            assert text.count('"pod": "new"') == 40
            assert text.endswith("data: [DONE]\n\n")

    run(scenario)


def test_a_failing_revision_is_counted_although_the_other_one_answers() -> None:
    async def fail(exchange: Exchange) -> None:
        raise ConnectionResetError

    async def scenario() -> None:
        old, new = await FakeEngine("old").start(), await FakeEngine("new", fail).start()
        async with routed(old, new) as (_, client):
            entries = [old.entry(revision=OLD), new.entry(revision=NEW)]
            await client.put("/backends", json={**snapshot(2, *entries), "shares": shares(99), "window": "w"})
            answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-session-id": "a"})
            assert (answer.status_code, answer.json()["pod"]) == (200, "old")
            window = (await client.get("/status")).json()["window"]
            counted = {found["revision"]: (found["requests"], found["errors"]) for found in window["revisions"]}
            assert counted[OLD] == (1, 0)
            assert counted[NEW][0] == counted[NEW][1] >= 1

    run(scenario)


def test_times_in_engines_queues_are_counted_by_revision_once() -> None:
    async def scenario() -> None:
        old, new = await FakeEngine("a").start(), await FakeEngine("b").start()
        old.load, new.load = queued({-9: 5}, splits=(7, 7)), queued({})
        async with routed(old, new) as (router, client):
            entries = [old.entry(revision=OLD, pool="main"), new.entry(revision=NEW, pool="main")]

            async def begin(version: int, window: str) -> None:
                body = {**snapshot(version, *entries), "shares": shares(50), "window": window}
                assert (await client.put("/backends", json=body)).is_success

            def counts() -> list[dict[str, Any]]:
                return list(router.metrics.revisions.status()["revisions"])

            def counted(window: str) -> dict[str, dict[str, int]]:
                found = router.metrics.revisions.status()
                assert found["id"] == window
                return {one["revision"]: one["queue_s"] for one in found["revisions"] if one["queue_s"]}

            assert all(backend.load is None for backend in router.backends.all)  # nothing compares revisions
            await begin(2, "w1")
            await until(lambda: all(backend.load is not None for backend in router.backends.all))
            old.load, new.load = queued({-9: 6, 3: 1}, splits=(10, 8)), queued({4: 2})
            await until(lambda: counted("w1") == {OLD: {"-9": 1, "3": 1}, NEW: {"4": 2}})
            splits = {one["revision"]: (one["splits"], one["failed_splits"]) for one in counts()}
            assert splits == {OLD: (3, 1), NEW: (0, 0)}
            await begin(3, "w2")
            assert counted("w2") == {}
            new.load = queued({4: 1}, epoch="after a restart", splits=(5, 2))
            await until(lambda: counted("w2") == {NEW: {"4": 1}})
            assert [(one["splits"], one["failed_splits"]) for one in counts()] == [(5, 2)]
            metrics = (await client.get("/metrics")).text
            assert 'stoker_router_revision_queue_p95_seconds{pool="main",revision="r-new"} 1.46' in metrics
            assert 'stoker_router_revision_splits_total{pool="main",revision="r-old"} 3.0' in metrics
            assert 'stoker_router_revision_failed_splits_total{pool="main",revision="r-new"} 2.0' in metrics

    run(scenario)


def queued(times: dict[int, int], epoch: str = "e", splits: tuple[int, int] = (0, 0)) -> dict[str, object]:
    """A report of an engine with these times in its queue so far, and these transfers, of which some failed."""
    counted = {"splits": splits[0], "failed_splits": splits[1]}
    return {"epoch": epoch, "requests": 0, "waiting": 0, "waiting_tokens": 0, "queue_s": times, **counted}
