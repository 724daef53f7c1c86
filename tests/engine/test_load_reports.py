"""What an engine tells routers of its load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.core.messages import CoreState, RequestFacts
from stoker.engine.core.prefill_rate import KEPT, MOST_SPANS, PrefillRate
from stoker.engine.http.load_ledger import WEIGHT, LoadLedger
from stoker.engine.http.load_reports import LoadReports
from stoker.engine.http.load_share import LoadShare
from stoker.engine.http.peer_report import transfer_status
from stoker.pod.prompt_order import LOOK_AHEAD
from stoker.pod.split_requests import PREFILL_HEADER
from stoker.router.load import Load
from testing.engine.fake_core import FACTS, release
from testing.engine.serving import run, serving, until
from testing.engine.stats import STATS, TRANSFER

Report = dict[str, Any]


def test_reports_follow_the_requests_and_end_with_the_drain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, api_keys=("k",)) as s, s.http.stream("GET", "/load") as answer:
            reports = _reports(answer.aiter_text())
            first = await anext(reports)
            assert (first["requests"], first["waiting_tokens"]) == (0, 0)
            key = {"Authorization": "Bearer k"}

            def ask(prompt: str) -> asyncio.Task[Any]:
                body = {"prompt": prompt, "max_tokens": 50}
                return asyncio.create_task(s.http.post("/v1/completions", json=body, headers=key))

            hanging = ask("hang say:abc")
            waiting = await _until(reports, lambda one: one["waiting"] == 1)
            tokens = len("hang say:abc") + 1
            assert (waiting["requests"], waiting["waiting_tokens"], waiting["prompts"]) == (1, tokens, [tokens])
            assert waiting["step_tokens"] == FACTS.step_tokens > 0
            hanging.cancel()
            await _until(reports, lambda one: one["requests"] == 0)
            slow = ask("held say:" + "x" * 40)
            running = await _until(reports, lambda one: one["requests"] == 1 and one["waiting"] == 0)
            assert running["waiting_tokens"] == 0
            release(tmp_path)
            assert (await slow).status_code == 200
            ended = await _until(reports, lambda one: one["requests"] == 0)
            assert ended["gap_s"] > 0
            assert ended["epoch"] == first["epoch"]
            await s.core.set_state(CoreState("Draining", "draining", FACTS))
            seqs = [one["seq"] async for one in reports]
            assert [first["seq"], *seqs] == sorted({first["seq"], *seqs}), "each is newer than the last"

    run(scenario)


def test_a_prefill_engine_reports_what_it_computes_for_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            assert s.front.reports.report()["peer"] is None
            await s.core.send(replace(STATS, step_tokens=(0,) * 14, transfer=TRANSFER, queue_s={-9: 2}))
            await until(lambda: s.front.served.transfer is not None)
            report = s.front.reports.report()
            counts = {"requests": 2, "waiting": 1, "waiting_tokens": 300, "prefill_tokens_per_s": 5000.0}
            assert {**counts, "role": "colocated", "queue_s": {-9: 2}}.items() <= report.items()
            assert (report["splits"], report["failed_splits"]) == (sum(TRANSFER.outcomes.values()), 1)
            peer = {
                "endpoint": "0.0.0.0:8101",
                "fingerprint": "ab" * 32,
                "link_bytes_per_s": 8192.0,
                "handover_s": 0.01,
            }
            assert peer.items() <= report["peer"].items()
            status = transfer_status(s.front.served.transfer)
            assert status is not None
            assert status["facts"] == {"kv_dtype": "bfloat16"}
            assert status["avoided"] == {"10.0.0.7:8101": "damaged: 3 damaged blocks within 60 s"}
            assert (status["transport"], status["fallbacks"], status["unmet"]) == ("tcp", {"lost": 1}, "")
            metrics = (await s.http.get("/metrics")).text
            assert 'stoker_split_requests_total{engine="0",model_name="tiny",outcome="split"} 3.0' in metrics
            assert 'stoker_transfer_refused_blocks_total{cause="stale",engine="0",model_name="tiny"} 2.0' in metrics

    run(scenario)


def test_an_engine_that_cannot_offer_what_is_required_is_not_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            reason = "transfer.require is nvlink; this engine offers shared-memory, tcp"
            assert (await s.http.get("/readyz")).status_code == 200
            await s.core.send(replace(STATS, transfer=replace(TRANSFER, unmet=reason)))
            await until(lambda: not s.front.ready)
            assert (await s.http.get("/readyz")).status_code == 503
            health = await s.http.get("/health")
            assert (health.status_code, health.json()["reason"]) == (503, reason)
            refused = await s.post("/v1/completions", prompt="say:x")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")

    run(scenario)


def test_a_prompt_that_another_engine_computes_does_not_wait_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            headers = {PREFILL_HEADER.decode(): "10.0.0.7:8101"}
            body = {"prompt": "hang say:abc", "max_tokens": 5}
            asked = asyncio.create_task(s.http.post("/v1/completions", json=body, headers=headers))
            await until(lambda: bool(s.core.requests))
            assert s.core.requests[0].prefill == "10.0.0.7:8101"
            assert s.front.reports.report()["requests"] == 1
            assert s.front.reports.report()["waiting_tokens"] == 0
            asked.cancel()

    run(scenario)


async def _reports(texts: AsyncIterator[str]) -> AsyncIterator[Report]:
    tail = ""
    async for text in texts:
        *events, tail = (tail + text).split("\n\n")
        for event in events:
            yield json.loads(event.removeprefix("data: "))


async def _until(reports: AsyncIterator[Report], question: Callable[[Report], bool]) -> Report:
    async for report in reports:
        if question(report):
            return report
    raise AssertionError("the reports ended")


def test_the_first_prompts_that_wait_are_listed_in_the_order_of_arrival() -> None:
    one, other = LoadReports(LoadLedger()), LoadReports(LoadLedger())
    with ExitStack() as jobs:
        for number in range(2 * LOOK_AHEAD):
            jobs.enter_context(one.ledger.job(str(number), 1000 - number))
        jobs.enter_context(other.ledger.job("x", 7))
        one.ledger.first_token("0", None)
        sent = LoadShare.from_wire(json.loads(json.dumps(list(other.ledger.share))))
        assert sent == other.ledger.share
        one.others = (sent,)
        listed = [1000 - number for number in range(1, LOOK_AHEAD + 1)]
        assert list(one.report()["prompts"]) == listed
        other.others = (one.ledger.share,)
        assert list(other.report()["prompts"]) == [7, *listed[:-1]]
        load = Load.model_validate({"seq": 1, **other.report()})
        assert (len(load.waiting_prompts), sum(load.prompts)) == (2 * LOOK_AHEAD, 7 + sum(listed[:-1]))


def test_each_data_rank_is_counted_by_itself_over_all_fronts() -> None:
    helped = replace(TRANSFER, helping=4, helping_waiting=2, helping_tokens=900, prefill_tokens_per_s=None)
    one, other = LoadLedger(num_ranks=2), LoadLedger(num_ranks=2)
    reports = LoadReports(one, transfer_of=lambda rank: helped if rank else None)

    def facts(tokens: int, begin_s: float) -> RequestFacts:
        return RequestFacts(tokens, 0, 1, 0, 0.0, begin_s, begin_s + 1.0, begin_s + 1.0, 2.0)

    with one.job("a", 30, 0), one.job("b", 40, 1), other.job("c", 50, 1), other.job("d", 60, 0):
        one.first_token("a", facts(1000, 1.0))
        other.first_token("d", facts(3000, 1.0))
        other.gap(0.5, rank=1)
        sent = LoadShare.from_wire(json.loads(json.dumps(list(other.share))))
        assert sent == other.share
        reports.others = (sent,)
        report = reports.report()
        load = Load.model_validate({"seq": 1, **report})
        assert (load.requests, load.waiting, load.waiting_tokens) == (4, 2, 90)
        first, second = load.ranks
        assert (first.requests, first.waiting, first.waiting_tokens, first.prompts) == (2, 0, 0, ())
        assert (first.prefill_tokens_per_s, first.gap_s) == (2000, None)
        assert first.busy_tokens_per_s == pytest.approx(4000, rel=0.06), "side by side"
        assert (second.requests, second.waiting, second.waiting_tokens) == (6, 4, 990), "with what it helps"
        assert (second.prompts, second.prefill_tokens_per_s, second.gap_s) == ((40, 50), None, 0.5)
    assert [rank["requests"] for rank in reports.report()["ranks"]] == [1, 5], "its own jobs have ended"
    assert "ranks" not in LoadReports(LoadLedger()).report()


def test_rates_are_means_of_what_was_measured() -> None:
    load = LoadLedger()
    reports = LoadReports(load)

    def facts(prompt: int, cached: int, seconds: float, begin_s: float = 1.0) -> RequestFacts:
        return RequestFacts(prompt, cached, 1, 0, 0.0, begin_s, begin_s + seconds, begin_s + seconds, 2.0)

    for name, measured in enumerate([facts(1000, 0, 0.5), facts(1000, 900, 0.1, 2.0), facts(20, 10, 9.0)]):
        with load.job(str(name), 7):
            assert reports.report()["waiting_tokens"] == 7
            load.first_token(str(name), measured)
            load.first_token(str(name), facts(9999, 0, 0.1))  # only the first token counts
            assert (reports.report()["waiting"], reports.report()["requests"]) == (0, 1)
    both = (KEPT * 1000 + 100) / (KEPT * 0.5 + 0.1)
    assert reports.report()["busy_tokens_per_s"] == pytest.approx(both)  # ten tokens say nothing
    assert reports.report()["prefill_tokens_per_s"] == pytest.approx(2000 + WEIGHT * (1000 - 2000))
    load.gap(0.5)
    load.gap(0.0)
    load.gap(1.0)
    assert load.gap_s == pytest.approx(0.5 + WEIGHT * 0.5)
    assert reports.report()["requests"] == 0


def test_each_front_reports_the_rate_of_the_whole_engine() -> None:
    """At 2,000 tokens/s: prompts of two fronts are computed side by side, and each front alone has seen half."""
    whole, fronts = PrefillRate(), [LoadReports(LoadLedger()) for _ in range(3)]
    for number in range(100):
        begin_s = 5.0 * (number // 2)
        whole.computed(5000, begin_s, begin_s + 5.0)
        facts = RequestFacts(5000, 0, 1, 0, 0.0, begin_s, begin_s + 5.0, begin_s + 5.0, 2.0)
        with fronts[number % 2].ledger.job(str(number), 5000):
            fronts[number % 2].ledger.first_token(str(number), facts)
    assert fronts[0].ledger.prefill_rate.tokens_per_s == pytest.approx(1000)
    shares = [LoadShare.from_wire(json.loads(json.dumps(list(front.ledger.share)))) for front in fronts]
    for own, front in enumerate(fronts):
        front.others = [share for number, share in enumerate(shares) if number != own]
    rates = [front.report()["busy_tokens_per_s"] for front in fronts]
    assert rates == [pytest.approx(2000, rel=0.03)] * 3
    assert rates == [pytest.approx(whole.tokens_per_s, rel=0.03)] * 3


def test_the_rate_is_the_engines_where_prompts_are_in_work_side_by_side() -> None:
    """At 1,000 tokens/s: a long prompt leaves half of its steps to two short ones. Each alone: 500, 500 and 750."""
    rate = PrefillRate()
    assert rate.tokens_per_s is None
    for tokens, begin_s, end_s in [(500, 1.0, 2.0), (500, 3.0, 4.0), (3000, 0.0, 4.0), (1000, 3.5, 5.0)]:
        rate.computed(tokens, begin_s, end_s)
    assert rate.tokens_per_s == pytest.approx(1000, rel=0.04)
    for number in range(500):
        rate.computed(2000, 10.0 * number + 10, 10.0 * number + 11)
    assert rate.tokens_per_s == pytest.approx(2000, rel=0.01)
    assert len(rate._counted) == MOST_SPANS
