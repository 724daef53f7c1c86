"""The figures of a bench as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ROWS = {
    "ttft_ms": "first token",
    "tpot_ms": "per output token",
    "gap_ms": "gap",
    "e2el_ms": "whole request",
    "late_ms": "sent late",
}
COLUMNS = ("mean", "p50", "p90", "p99", "max")
AT_ONCE = "all at once"
"""The rate of a bench without one."""
LATE_MS = 10.0
"""Sending later than this at p99, a client has not offered the load that was asked for."""


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines."""
    good = found["requests"] - found["failed"]
    yield f"{good} of {found['requests']} requests answered in {found['duration_s']:g} s"
    yield f"at most {found['most_at_once']} at once"
    for message, count in list(found["errors"].items())[:5]:
        yield f"  {count} failed: {message}"
    if not good:
        return
    yield f"{found['requests_per_s']:g} requests/s, {found['output_tokens_per_s']:,g} output tokens/s"
    yield _tokens(found)
    if found["short"]:
        yield f"{found['short']} answers are shorter than was asked for"
    yield ""
    yield " " * 20 + "".join(f"{column:>11}" for column in COLUMNS) + "   ms"
    for name, title in ROWS.items():
        if found[name]:
            yield f"{title:<20}" + "".join(f"{found[name][column]:>11,.2f}" for column in COLUMNS)
    if goodput := found.get("goodput"):
        goals = ", ".join(f"{name} {goal:g}" for name, goal in goodput["goals_ms"].items())
        yield ""
        yield f"goodput: {goodput['requests_per_s']:g} requests/s within {goals} ms, {goodput['share']:.1%} of all"
    if found["rate"] != AT_ONCE and found["late_ms"].get("p99", 0.0) > LATE_MS:
        yield ""
        yield f"This client sent late (p99 {found['late_ms']['p99']:g} ms): it is too slow for this load, or disturbed."


def _tokens(found: Mapping[str, Any]) -> str:
    """Input and output tokens, or that the server has not counted them."""
    if found["uncounted"]:
        without = f"{found['uncounted']} answers came without the server's counts (usage)"
        return f"{found['output_tokens']:,} output tokens; {without}: their input is not known, events stand for tokens"
    cached = f", {found['cached_tokens']:,} of them cached" if found["cached_tokens"] else ""
    return f"{found['input_tokens']:,} input tokens{cached}; {found['output_tokens']:,} output tokens"
