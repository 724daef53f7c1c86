"""The spans of a request at one engine, with the fake core's times."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stoker.pod.tracing import Attribute, Span
from testing.engine.serving import run, serving, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Kept:
    """A span that a test can read."""

    def __init__(self, name: str, parent: str, begin_s: float) -> None:
        self.name, self.parent, self.begin_s, self.end_s = name, parent, begin_s, -1.0
        self.attributes: dict[str, Attribute] = {}
        self.traceparent = f"below {parent}"

    def end(self, at_s: float, **attributes: Attribute) -> None:
        self.end_s, self.attributes = at_s, attributes


class KeepingTracer:
    """Keeps spans instead of exporting them."""

    on = True

    def __init__(self) -> None:
        self.spans: list[Kept] = []

    def begin(self, name: str, traceparent: str, at_s: float) -> Span:
        self.spans.append(Kept(name, traceparent, at_s))
        return self.spans[-1]

    def record(self, name: str, traceparent: str, begin_s: float, end_s: float, **attributes: Attribute) -> None:
        self.begin(name, traceparent, begin_s).end(end_s, **attributes)

    def close(self) -> None:
        pass


def test_a_prompt_has_one_queue_and_prefill_and_each_choice_its_decode(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.front.tracer = tracer = KeepingTracer()
            body = {"prompt": ["say:abc", "say:de"], "n": 2, "max_tokens": 5, "temperature": 1}
            answer = await s.http.post("/v1/completions", json=body, headers={"traceparent": PARENT})
            assert answer.status_code == 200, answer.text
            names = [span.name for span in tracer.spans]
            assert names == ["engine", *(2 * ["queue", "prefill", "decode", "decode"])]
            engine, *others = tracer.spans
            assert engine.parent == PARENT
            assert {span.parent for span in others} == {f"below {PARENT}"}
            assert {request.trace for request in s.core.requests} == {f"below {PARENT}"}
            assert [span.attributes["stoker__choice"] for span in others if span.name == "decode"] == [0, 1, 0, 1]
            assert all(engine.begin_s <= span.begin_s <= span.end_s <= engine.end_s for span in others)

    run(scenario)


def test_a_request_whose_client_leaves_has_its_span_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.front.tracer = tracer = KeepingTracer()
            asked = asyncio.create_task(s.http.post("/v1/completions", json={"prompt": "hang say:abc"}))
            await until(lambda: bool(s.core.requests))
            asked.cancel()
            await until(lambda: any(span.end_s > 0 for span in tracer.spans))
            assert [span.name for span in tracer.spans] == ["engine"]

    run(scenario)
