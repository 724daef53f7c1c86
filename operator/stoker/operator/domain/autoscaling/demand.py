"""The work that arrives at a pool: rate, sizes, burstiness, and its forecast for when a new replica is ready. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.pod.histogram import Histogram

CURRENT_S = 30.0
TREND_S = 60.0
SURE = 3.0
"""Standard errors by which a rise must stand out of chance before it counts as a trend."""
MAX_GROWTH = 1.0
"""A trend of independent clients adds at most so many times the present rate; of bursts less, by their burstiness."""
MAX_BURSTINESS = 10.0


@dataclass(frozen=True)
class Demand:
    """Requests of a pool."""

    rate: float
    """Requests per second."""
    burstiness: float
    """Variance of arrivals over that of a Poisson process; 1 for independent clients."""
    uncached: Histogram
    """Prompt tokens to compute here, by request: few of a request whose prompt another engine computes."""
    prompt: float
    """Mean prompt tokens that a sequence holds in the cache."""
    output: float
    """Mean output tokens: of a prefill engine those until it is relieved."""


def forecast_rate(arrivals: Sequence[int], slot_s: float, horizon_s: float) -> float:
    """Requests per second to expect within `horizon_s`: the largest of now, trend and the last minutes' P90.

    Args:
        arrivals: requests in each slot of `slot_s` seconds, oldest first, without gaps.

    The trend of the last minute is what is left of the rise between its halves after `SURE` standard errors, so that
    chance alone forecasts nothing. A burst rises too, and is over before a replica that it asks for is ready.
    """
    width = max(round(CURRENT_S / slot_s), 1)
    current = _rate(arrivals[-width:], slot_s)
    windows = [_rate(arrivals[end - width : end], slot_s) for end in range(len(arrivals), width - 1, -width)]
    usual = sorted(windows)[max(math.ceil(0.9 * len(windows)) - 1, 0)] if windows else current
    return max(current, usual, _trend(arrivals, slot_s, current, horizon_s))


def burstiness(arrivals: Sequence[int]) -> float:
    """Index of dispersion of the counts, from differences of neighbours, so that a slow rise is not a burst."""
    if len(arrivals) < 4 or not sum(arrivals):
        return 1.0
    squares = sum((after - before) ** 2 for before, after in itertools.pairwise(arrivals))
    mean = sum(arrivals) / len(arrivals)
    return min(max(squares / (2 * (len(arrivals) - 1) * mean), 1.0), MAX_BURSTINESS)


def _trend(arrivals: Sequence[int], slot_s: float, current: float, horizon_s: float) -> float:
    half = max(round(TREND_S / 2 / slot_s), 1)
    if len(arrivals) < 2 * half:
        return current
    before, after = sum(arrivals[-2 * half : -half]), sum(arrivals[-half:])
    rise = after - before - SURE * math.sqrt(before + after)
    slope = max(rise, 0.0) / (half * slot_s) ** 2  # requests per second, per second
    return current + min(slope * horizon_s, MAX_GROWTH * current / burstiness(arrivals))


def _rate(arrivals: Sequence[int], slot_s: float) -> float:
    return sum(arrivals) / (len(arrivals) * slot_s) if arrivals else 0.0
