"""Headroom of the old revision: how much of the traffic its ready replicas can take from one that has failed. Pure.

While a canary went on, the old revision gave replicas away. With all of the traffic at once, the few that are left
would refuse most of it for as long as a model takes to load.
"""

from __future__ import annotations

from collections.abc import Iterable

OVERLOAD = 2
"""Times its usual part of the traffic that a replica may have until the others are back."""


def carried_percent(pools: Iterable[tuple[int, int]]) -> int:
    """Return the percent of the traffic that the old revision can take now.

    Args:
        pools: (ready replicas of the old revision, replicas of the pool) of each pool that has the old revision. The
            one that lacks most decides.
    """
    return min((min(100, 100 * OVERLOAD * ready // wanted) for ready, wanted in pools if wanted), default=100)
