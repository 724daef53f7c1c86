"""`/v1/requests/{id}`, `/health` and what is refused: the state of requests and of the engine, for clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.messages import CoreState, RequestState
from stoker.engine.http.request_log import MAX_REQUESTS, LoggedRequest, RequestLog
from stoker.engine.sampling import SamplingParams
from testing.engine.fake_core import FACTS
from testing.engine.serving import Serving, run, serving, until

COMPLETIONS = "/v1/completions"
LONG = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)


async def life(s: Serving, name: str) -> dict[str, Any]:
    answer = await s.http.get(f"/v1/requests/{name}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_request_can_be_followed_by_either_of_its_ids(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = {"prompt": ["held say:abcdefgh", "hang say:x"]}
            asked = asyncio.ensure_future(s.http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "mine"}))
            await until(lambda: len(s.core.running) == 2)
            for state in get_args(RequestState):
                s.core.progress = state
                seen = await life(s, "mine")
                assert (seen["object"], seen["request_id"], seen["state"]) == ("request", "mine", state)
            assert (seen["prompt_tokens"], seen["preemptions"], seen["error"]) == (29, 2, None)
            await until(lambda: any(usage.facts for usage in s.front.log.find("mine").usage))  # type: ignore[union-attr]
            timing = (await life(s, "mine"))["timing"]
            assert (timing["decode_s"], timing["total_s"]) == (None, None), "it runs"
            asked.cancel()
            await until(lambda: bool(s.core.aborted))
            await until(lambda: s.front.log.find("mine").end is not None)  # type: ignore[union-attr]
            gone = await life(s, "mine")
            assert (gone["state"], gone["error"]) == ("FAILED", "the client has gone")
            assert gone["timing"]["decode_s"] is None
            assert gone["timing"]["total_s"] > gone["timing"]["queue_s"] + gone["timing"]["prefill_s"]
            assert (await life(s, "mine"))["timing"] == gone["timing"], "it does not go on"
            done = (await s.post(COMPLETIONS, prompt="say:hey")).json()
            whole = await life(s, done["id"])
            assert (whole["state"], whole["output_tokens"], whole["id"]) == ("COMPLETED", 4, done["id"])
            assert whole["timing"]["total_s"] >= 0
            failed = await s.http.post(COMPLETIONS, json={"prompt": "fail say:abcd"}, headers={"X-Request-Id": "bad"})
            assert failed.status_code == 500
            assert (await life(s, "bad"))["error"].startswith("The request failed")
            missing = await s.http.get("/v1/requests/other")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")

    run(scenario)


def test_the_log_keeps_the_newest_requests() -> None:
    log = RequestLog()
    for number in range(MAX_REQUESTS + 5):
        log.add(LoggedRequest(f"a{number}", f"r{number % 7}", "tiny", 0, (), []))
    assert log.find("a4") is None
    assert log.find("a5") is not None
    newest = log.find("r3")
    assert newest is not None
    assert int(newest.id[1:]) % 7 == 3
    assert int(newest.id[1:]) > MAX_REQUESTS - 7


def state(engine: LLMEngine) -> str:
    return engine.requests["", "first"].progress.state


def test_the_engine_says_how_far_a_request_is(make_engine: Callable[..., LLMEngine]) -> None:
    engine = make_engine(num_blocks=30, seats=2, budget=16, chunk=8)
    engine.add_request("first", list(range(3, 23)), LONG, priority=1)
    assert state(engine) == "QUEUED"
    engine.step()
    assert state(engine) == "PREFILLING"
    for _ in range(3):
        engine.step()
    assert state(engine) == "DECODING"
    engine.add_request("urgent", list(range(3, 63)), LONG, priority=0)
    seen = []
    while engine.progress("urgent") is not None:
        engine.step()
        progress = engine.progress("first")
        seen += [progress.state] if progress is not None else []
    assert "PREEMPTED" in seen
    while (last := engine.progress("first")) is not None:
        assert last.preemptions == 1
        seen.append(last.state)
        engine.step()
    again = seen[len(seen) - seen[::-1].index("PREEMPTED") :]
    assert again[0] == "PREFILLING"  # what it had is computed again
    assert again[-1] == "DECODING"


def test_health_has_a_status_and_a_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for path in ("/health", "/ping"):
                assert (await s.http.get(path)).json() == {"status": "healthy", "reason": ""}
            await s.core.set_state(CoreState("Draining", "draining", FACTS))
            await until(lambda: s.front.core.state.phase == "Draining")
            draining = await s.http.get("/health")
            assert (draining.status_code, draining.json()["status"]) == (503, "degraded")
            await s.core.set_state(CoreState("Failed", "RankFailed: lost", FACTS))
            await until(lambda: s.front.core.state.phase == "Failed")
            failed = await s.http.get("/health")
            assert (failed.status_code, failed.json()["status"]) == (503, "unhealthy")
            assert "RankFailed" in failed.json()["reason"]
            assert failed.json()["error"]["code"] == "not_ready"

    run(scenario)


def test_embeddings_are_refused_clearly(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            refused = await s.post("/v1/embeddings", model="tiny", input="x")
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "embeddings_not_supported")

    run(scenario)
