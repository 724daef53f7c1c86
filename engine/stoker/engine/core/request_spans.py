"""Spans of one request at an engine: its time in the queue, its prefill, and the decode of each choice.

They are recorded when the times are known, so a step costs nothing more.
"""

from __future__ import annotations

from stoker.engine.core.messages import RequestFacts
from stoker.pod.tracing import Tracer


def prompt_spans(tracer: Tracer, trace: str, facts: RequestFacts) -> None:
    """Record `queue` and `prefill` of a prompt that is computed here."""
    if not tracer.on or facts.scheduled_s is None:
        return
    tracer.record("queue", trace, facts.arrival_s, facts.scheduled_s)
    if facts.first_token_s is not None:
        counts = {"stoker__prompt_tokens": facts.prompt_tokens, "stoker__cached_tokens": facts.cached_tokens}
        tracer.record("prefill", trace, facts.scheduled_s, facts.first_token_s, **counts)


def decode_span(tracer: Tracer, trace: str, choice: int, facts: RequestFacts) -> None:
    """Record `decode` of one choice: from its first token to its last one."""
    if tracer.on and facts.first_token_s is not None and facts.last_token_s is not None:
        counts = {"stoker__choice": choice, "stoker__output_tokens": facts.output_tokens}
        tracer.record("decode", trace, facts.first_token_s, facts.last_token_s, **counts)
