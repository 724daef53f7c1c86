"""The need of a pool in mode `load`: thresholds on queue, seats and cache, without goals or predictions. Pure."""

from __future__ import annotations

import math

from stoker.operator.domain.autoscaling.decision import Limits, PoolInput
from stoker.operator.domain.autoscaling.need import Need

FULL, EMPTY = 0.8, 0.5
"""Use of the cache or of the seats above which replicas are added, and which fewer replicas may have."""
QUEUE = 2.0
"""Waiting requests of each copy in a ready replica above which a replica is added."""


def needed_by_load(limits: Limits, seen: PoolInput, *, down: bool) -> Need:
    """Replicas so that cache and seats are used to `FULL` at most, or to `EMPTY` where replicas would go (`down`)."""
    least = max(limits.min, 0 if limits.min == 0 else 1)
    if seen.idle:
        return Need(least, "no requests")
    ready = max(seen.ready, 1)
    seats = seen.shape.max_requests * seen.copies if seen.shape else 0
    use = max(seen.kv_use, seen.running / (ready * seats) if seats else 0.0)
    text = f"cache and seats used to {use:.0%}, {seen.waiting} requests wait"
    need = max(math.ceil(ready * use / (EMPTY if down else FULL)), least, 1)
    if seen.waiting > QUEUE * ready * seen.copies or (down and seen.waiting):
        need = max(need, seen.replicas + (0 if down or seen.ready < seen.replicas else 1))
    return Need(need, text)
