"""Figures of a round, from the facts of its requests. Pure. Times are milliseconds unless their name says `_s`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from stoker.engine.core.messages import RequestFacts

PLACES = {"p50": (0.5, 1), "p90": (0.9, 10), "p99": (0.99, 100)}
"""Name -> part of the values, and the rounds below which it would be little more than the largest. The requests of a
round are computed together: they are no samples of their own."""


def throughput(facts: Sequence[RequestFacts], seconds: float) -> dict[str, Any]:
    """Return the rates of a round that took so long."""
    given, made = sum(one.prompt_tokens for one in facts), sum(one.output_tokens for one in facts)
    return {
        "seconds": round(seconds, 3),
        "requests": len(facts),
        "input_tokens": given,
        "cached_tokens": sum(one.cached_tokens for one in facts),
        "output_tokens": made,
        "preemptions": sum(one.preemptions for one in facts),
        "requests_per_s": round(len(facts) / seconds, 2),
        "output_tokens_per_s": round(made / seconds, 1),
        "total_tokens_per_s": round((given + made) / seconds, 1),
    }


def latency(facts: Sequence[RequestFacts], num_rounds: int) -> dict[str, Any]:
    """Return the times of all requests of all rounds."""
    return {
        "requests": len(facts),
        "ttft_ms": spread([1000 * (_first_s(one) - one.arrival_s) for one in facts], num_rounds),
        "tpot_ms": spread([_per_token_ms(one) for one in facts if one.output_tokens > 1], num_rounds),
        "e2el_ms": spread([1000 * (one.finished_s - one.arrival_s) for one in facts], num_rounds),
        "preemptions": sum(one.preemptions for one in facts),
    }


def spread(values: Sequence[float], num_rounds: int) -> dict[str, float]:
    """Return mean, both ends, and the percentiles (values that were measured) for which there are enough rounds.

    Empty without values.
    """
    if not values:
        return {}
    ordered = sorted(values)
    places = {
        name: ordered[min(int(part * len(ordered)), len(ordered) - 1)]
        for name, (part, needed) in PLACES.items()
        if num_rounds >= needed
    }
    found = {"mean": statistics.fmean(ordered), "min": ordered[0], **places, "max": ordered[-1]}
    return {name: round(value, 3) for name, value in found.items()}


def _first_s(facts: RequestFacts) -> float:
    return facts.finished_s if facts.first_token_s is None else facts.first_token_s


def _per_token_ms(facts: RequestFacts) -> float:
    last_s = facts.finished_s if facts.last_token_s is None else facts.last_token_s
    return 1000 * (last_s - _first_s(facts)) / (facts.output_tokens - 1)
