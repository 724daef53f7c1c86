"""The part of a trace that `pd_goodput` replays, and what of its answers counts. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stoker.cli.load.workload import TRACE_BLOCK

Answer = Mapping[str, Any]
"""A record of `stoker bench serve`."""
STEPS = ((0.98, 1.5), (0.95, 1.25), (0.92, 1.1), (0.87, 1.0), (0.78, 0.85), (0.6, 0.7))
"""(least share of good requests, factor of the speed)."""
LEAST_FACTOR = 0.5


Reading = Callable[[Sequence[float], Answer], float]
"""(gaps in milliseconds, answer) -> the one number that a goal holds against them."""


class Goals(NamedTuple):
    """What a good request meets."""

    ttft_ms: float
    gap_ms: float
    apart: int
    """Prompts with more new tokens are counted apart."""


@dataclass(frozen=True)
class Line:
    """A request of a trace."""

    text: str
    new_tokens: int
    """Tokens of the prompt that no earlier request began with."""


def first_lines(lines: Iterable[str], seconds: float, most_tokens: int) -> list[Line]:
    """The requests of the first seconds; those that fit no engine are left out."""
    found, seen = [], set[int]()
    for text in lines:
        row = json.loads(text)
        if row["timestamp"] >= 1000 * seconds:
            break
        known = sum(1 for _ in itertools.takewhile(seen.__contains__, row["hash_ids"]))
        seen.update(row["hash_ids"])
        if row["input_length"] + row["output_length"] < most_tokens:
            found.append(Line(text, max(row["input_length"] - known * TRACE_BLOCK, 0)))
    return found


def shares(lines: Sequence[Line], answers: Sequence[Answer], goals: Goals) -> dict[str, Any]:
    """Shares of good requests, by three readings of the gap: its mean over a request, its p99, and its longest.

    `answers`: records of `stoker bench serve`, in the order of the lines.
    """
    counted = [one for line, one in zip(lines, answers, strict=True) if line.new_tokens <= goals.apart]
    found: dict[str, Any] = {"counted": len(counted), "apart": len(answers) - len(counted)}
    for name, reading in (("share", mean), ("share_gap_p99", p99), ("share_longest_gap", longest)):
        good = sum(is_good(one, reading, goals) for one in counted)
        found[name] = round(good / max(len(counted), 1), 4)
    found["share_ttft"] = round(sum(first_ms(one) <= goals.ttft_ms for one in counted) / max(len(counted), 1), 4)
    return found


def is_good(answer: Answer, reading: Reading, goals: Goals) -> bool:
    if answer["error"] or first_ms(answer) > goals.ttft_ms:
        return False
    gaps = [1000 * (later - earlier) for earlier, later in itertools.pairwise(answer["stamps"])]
    return reading(gaps, answer) <= goals.gap_ms


def first_ms(answer: Answer) -> float:
    return 1000 * (answer["stamps"][0] - answer["sent_s"]) if answer["stamps"] else float("inf")


def mean(gaps: Sequence[float], answer: Answer) -> float:
    return sum(gaps) / max(int(answer["output_tokens"]) - 1, 1)


def p99(gaps: Sequence[float], _: Answer) -> float:
    return sorted(gaps)[int(0.99 * len(gaps))] if gaps else 0.0


def longest(gaps: Sequence[float], _: Answer) -> float:
    return max(gaps, default=0.0)


def speed_for(speed: float, share: float) -> float:
    """The speed at which about nine of ten requests would be good, where at `speed` this share is."""
    return round(speed * next((factor for least, factor in STEPS if share >= least), LEAST_FACTOR), 3)
