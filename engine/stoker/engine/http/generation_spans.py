"""The span of one HTTP request at an engine, and those of its prompts and choices below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from stoker.engine.core.messages import RequestFacts
from stoker.engine.core.request_spans import decode_span, prompt_spans
from stoker.pod.tracing import Tracer


@contextmanager
def traced(
    tracer: Tracer, parent: str, arrival_s: float, clock: Callable[[], float],
    facts: Callable[[], Sequence[dict[int, RequestFacts]]],
) -> Iterator[str]:  # fmt: skip
    """Make the span of a request from its arrival to the end of the block; yield its `traceparent`.

    Args:
        parent: `traceparent` of the request.
        facts: counts and times of the choices that have begun, for each prompt.
    """
    span = tracer.begin("engine", parent, arrival_s)
    try:
        yield span.traceparent
    finally:
        if tracer.on:
            for choices in facts():
                _record(tracer, span.traceparent, choices)
        span.end(clock())


def _record(tracer: Tracer, trace: str, choices: dict[int, RequestFacts]) -> None:
    """Record the spans of one prompt. An engine that helped has recorded the prompt's own."""
    for place, (choice, facts) in enumerate(sorted(choices.items())):
        if place == 0 and not facts.helped:
            prompt_spans(tracer, trace, facts)
        decode_span(tracer, trace, choice, facts)
