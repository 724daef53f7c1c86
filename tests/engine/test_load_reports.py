"""What an engine tells routers of its load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.core.messages import CoreState, RequestFacts
from stoker.engine.http.load import WEIGHT, LoadLedger
from testing.engine.fake_core import FACTS
from testing.engine.serving import run, serving

Report = dict[str, Any]


def test_reports_follow_the_requests_and_end_with_the_drain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, api_keys=("k",)) as s, s.http.stream("GET", "/load") as answer:
            reports = _reports(answer.aiter_text())
            first = await anext(reports)
            assert (first["seq"], first["requests"], first["waiting_tokens"]) == (0, 0, 0)
            key = {"Authorization": "Bearer k"}

            def ask(prompt: str) -> asyncio.Task[Any]:
                body = {"prompt": prompt, "max_tokens": 50}
                return asyncio.create_task(s.http.post("/v1/completions", json=body, headers=key))

            hanging = ask("hang say:abc")
            waiting = await _until(reports, lambda one: one["waiting"] == 1)
            assert (waiting["requests"], waiting["waiting_tokens"]) == (1, len("hang say:abc") + 1)
            hanging.cancel()
            await _until(reports, lambda one: one["requests"] == 0)
            slow = ask("slow say:" + "x" * 40)
            running = await _until(reports, lambda one: one["requests"] == 1 and one["waiting"] == 0)
            assert running["waiting_tokens"] == 0
            assert (await slow).status_code == 200
            ended = await _until(reports, lambda one: one["requests"] == 0)
            assert ended["gap_s"] > 0
            assert ended["epoch"] == first["epoch"]
            await s.core.set_state(CoreState("Draining", "draining", FACTS))
            seqs = [one["seq"] async for one in reports]
            assert seqs == sorted(seqs)

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


def test_rates_are_means_of_what_was_measured() -> None:
    load = LoadLedger()

    def facts(prompt: int, cached: int, seconds: float) -> RequestFacts:
        return RequestFacts(prompt, cached, 1, 0, 0.0, 1.0, 1.0 + seconds, 1.0 + seconds, 2.0)

    for name, measured in enumerate([facts(1000, 0, 0.5), facts(1000, 900, 0.1), facts(20, 10, 9.0)]):
        with load.job(str(name), 7):
            assert load.report()["waiting_tokens"] == 7
            load.first_token(str(name), measured)
            load.first_token(str(name), facts(9999, 0, 0.1))  # only the first token counts
            assert (load.report()["waiting"], load.report()["requests"]) == (0, 1)
    assert load.prefill_tokens_per_s == pytest.approx(2000 + WEIGHT * (1000 - 2000))  # ten tokens say nothing
    load.gap(0.5)
    load.gap(0.0)
    load.gap(1.0)
    assert load.gap_s == pytest.approx(0.5 + WEIGHT * 0.5)
    assert load.report()["requests"] == 0
