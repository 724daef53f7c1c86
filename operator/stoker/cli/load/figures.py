"""What a bench measured, from the times of its answers. Pure.

Times are milliseconds: `ttft` from the request to the first output, `tpot` per output token behind the first, `gap`
between two events with output, `e2el` the whole request, `late` from when a request was due to when it was sent.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.cli.load.exchange import Answer

GOALS = ("ttft", "tpot", "gap", "e2el")
"""Times that a goal may name; of the gaps of a request the longest counts."""
PLACES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Times:
    """Milliseconds of one whole answer."""

    ttft: float
    tpot: float
    gaps: tuple[float, ...]
    e2el: float

    @classmethod
    def of(cls, answer: Answer) -> Times:
        first, last = answer.stamps[0], answer.stamps[-1]
        behind = max(answer.output_tokens - 1, 1)
        gaps = tuple(1000 * (later - earlier) for earlier, later in itertools.pairwise(answer.stamps))
        return cls(
            ttft=1000 * (first - answer.sent_s),
            tpot=1000 * (last - first) / behind,
            gaps=gaps,
            e2el=1000 * (last - answer.sent_s),
        )

    def meets(self, goals: Mapping[str, float]) -> bool:
        found = {"ttft": self.ttft, "tpot": self.tpot, "gap": max(self.gaps, default=0.0), "e2el": self.e2el}
        return all(found[name] <= goal for name, goal in goals.items())


def parse_goal(text: str) -> tuple[str, float]:
    """Parse `ttft:200`. Raises ValueError."""
    name, _, value = text.partition(":")
    try:
        goal = float(value)
    except ValueError:
        goal = 0.0
    if name not in GOALS or not goal > 0:
        raise ValueError(f"NAME:MILLISECONDS is needed, with a name of {', '.join(GOALS)} (got {text!r})")
    return name, goal


def figures(answers: Sequence[Answer], goals: Mapping[str, float]) -> dict[str, Any]:
    """Return all figures; those of times are of whole answers.

    Input tokens are null where the server did not count those of each answer.
    """
    good = [answer for answer in answers if not answer.error]
    times = [Times.of(answer) for answer in good]
    begin = min((answer.sent_s for answer in answers if answer.sent_s), default=0.0)
    seconds = max((answer.ended_s for answer in answers), default=0.0) - begin
    counts = [answer.prompt_tokens for answer in good if answer.prompt_tokens is not None]
    given = sum(counts) if len(counts) == len(good) else None
    made = sum(answer.output_tokens for answer in good)
    found: dict[str, Any] = {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "short": sum(answer.output_tokens < answer.max_tokens for answer in good if answer.prompt_tokens is not None),
        "errors": dict(Counter(answer.error for answer in answers if answer.error).most_common()),
        "duration_s": round(seconds, 3),
        "requests_per_s": _rate(len(good), seconds),
        "uncounted": len(good) - len(counts),
        "most_at_once": most_at_once(answers),
        "input_tokens": given,
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "output_tokens": made,
        "input_tokens_per_s": None if given is None else _rate(given, seconds),
        "output_tokens_per_s": _rate(made, seconds),
        "ttft_ms": spread([one.ttft for one in times]),
        "tpot_ms": spread([one.tpot for one, answer in zip(times, good, strict=True) if answer.output_tokens > 1]),
        "gap_ms": spread([gap for one in times for gap in one.gaps]),
        "e2el_ms": spread([one.e2el for one in times]),
        "late_ms": spread([1000 * (one.sent_s - one.due_s) for one in answers if one.sent_s]),
        "connect_ms": spread([1000 * answer.connected_s for answer in answers if answer.sent_s]),
    }
    if goals:
        met = sum(one.meets(goals) for one in times)
        found["goodput"] = {
            "goals_ms": dict(goals),
            "requests_per_s": _rate(met, seconds),
            "share": round(met / len(answers), 4) if answers else 0.0,
        }
    return found


def most_at_once(answers: Sequence[Answer]) -> int:
    """Return the most requests that were under way at one moment."""
    edges = [(one.sent_s, 1) for one in answers if one.sent_s] + [(one.ended_s, -1) for one in answers if one.sent_s]
    return max(itertools.accumulate(step for _, step in sorted(edges)), default=0)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles (the nearest value that was measured); empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    places = {name: ordered[min(int(part * len(ordered)), len(ordered) - 1)] for name, part in PLACES.items()}
    found = {"mean": statistics.fmean(ordered), **places, "max": ordered[-1]}
    return {name: round(value, 2) for name, value in found.items()}


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 2) if seconds > 0 else 0.0
