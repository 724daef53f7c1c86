"""Backoff of retries: 50 ms, doubled at each failure up to 5 minutes, with jitter.

Pure. Called by the work queue, the informers and the loop.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 0.05
LONGEST_S = 300.0

Jitter = Callable[[], float]
"""A random number in [0, 1)."""


def delay_s(failures: int, jitter: Jitter, *, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> float:
    """Delay after the `failures`-th failure in a row (1 is the first), between half and all of the doubled time."""
    doubled = min(longest_s, first_s * 2.0 ** min(failures - 1, 40))
    return doubled * (0.5 + 0.5 * jitter())
