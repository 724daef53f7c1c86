"""What a pool has shown: the share of requests that met the goals with at most so many replicas, lately. Pure.

A prediction keeps room for what it does not know, and its forecast counts each half minute. What was measured needs no
room: where 95 of 100 requests of the last minutes met the goals, and the demand is still that of these minutes, the
same replicas suffice. Made by `LoadWindow`, judged by `rule`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.operator.domain.autoscaling.demand import SURE, burstiness
from stoker.operator.domain.autoscaling.prediction import TAIL, Goals
from stoker.pod.histogram import Histogram

ENOUGH = 50
"""Fewer requests show nothing."""
RISES_S = (60.0, 300.0)
"""Newest parts of the evidence whose arrivals must not stand out of those before."""


@dataclass(frozen=True)
class Evidence:
    """Measured while no more replicas than the present ones were at work."""

    slot_s: float = 5.0
    arrivals: tuple[int, ...] = ()
    """Requests of each slot, oldest first."""
    first_token_s: Histogram = field(default_factory=Histogram)
    gap_s: Histogram = field(default_factory=Histogram)
    late: int = 0
    """Requests that waited too long in routers, although their engine's first token was in time."""
    refused: int = 0
    """Requests that routers refused because of a goal."""


def is_proven(evidence: Evidence, goals: Goals, overdue: float = 0.0) -> bool:
    """Whether enough requests met the goals, and the demand has not risen since.

    Args:
        overdue: requests in queues that will miss the first token's goal.
    """
    if evidence.first_token_s.total < ENOUGH or has_risen(evidence.arrivals, evidence.slot_s):
        return False
    return met_share(evidence, goals, overdue) >= 1 - TAIL


def met_share(evidence: Evidence, goals: Goals, overdue: float = 0.0) -> float:
    """Share of first tokens, or of gaps, that met their goal: the smaller of both."""
    requests = evidence.first_token_s.total
    met = _share_within(evidence.first_token_s, goals.first_token_s) * requests
    if goals.first_token_s is not None:
        met, requests = max(met - evidence.late, 0.0), requests + evidence.refused
    first = met / max(requests + overdue, 1.0)
    return min(first, _share_within(evidence.gap_s, goals.gap_s))


def has_risen(arrivals: Sequence[int], slot_s: float) -> bool:
    """Whether the last minutes have more arrivals than chance explains, by those before and by their burstiness.

    They are compared with at least as long a time. Where there is not even a minute before the last, it is a rise.
    """
    spread = burstiness(arrivals)
    lengths = [round(seconds / slot_s) for seconds in RISES_S]
    compared = [(arrivals[:-length], arrivals[-length:]) for length in lengths if len(arrivals) >= 2 * length]
    return not compared or any(_stands_out(before, newest, spread) for before, newest in compared)


def _stands_out(before: Sequence[int], newest: Sequence[int], spread: float) -> bool:
    """Whether the newest slots have more arrivals than those before let expect, beyond `SURE` standard errors."""
    share = len(newest) / len(before)
    expected = sum(before) * share
    return sum(newest) > expected + SURE * math.sqrt(expected * (1 + share) * spread)


def _share_within(times: Histogram, goal_s: float | None) -> float:
    """Share of times up to the goal; 1 where there is no goal or no time."""
    return 1.0 if goal_s is None or not times.total else times.share_within(goal_s)
