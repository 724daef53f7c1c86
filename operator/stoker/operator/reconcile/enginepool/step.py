"""The numbers of replicas to make and to remove next: one pure step, for scaling and for moving revisions.

Invariants: at most `replicas + surge` pods are not draining. A step drains no pod if fewer than
`replicas - unavailable` would stay ready. Repeated steps end at `replicas` pods of the wanted revision.

Called by `replicas`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """Pods that are neither ended nor draining."""

    new_ready: int
    new_unready: int
    old_ready: int
    old_unready: int

    @property
    def total(self) -> int:
        return self.new_ready + self.new_unready + self.old_ready + self.old_unready


@dataclass(frozen=True)
class ReplicaStep:
    """Numbers of replicas to make, drop and drain now."""

    create_new: int = 0
    drop_old_unready: int = 0
    drain_old: int = 0
    drop_new_unready: int = 0
    drain_new: int = 0


def next_step(replicas: int, surge: int, unavailable: int, counts: Counts) -> ReplicaStep:
    """The next step; empty when the pool has converged or a replica must become ready first."""
    if surge == 0 and unavailable == 0:
        surge = 1  # otherwise no replica could ever be replaced
    new = counts.new_ready + counts.new_unready
    surplus = max(new - replicas, 0)
    drop_new = min(surplus, counts.new_unready)
    drain_new = surplus - drop_new
    missing = max(replicas - new, 0)
    room = replicas + surge - (counts.total - counts.old_unready)
    create = min(missing, max(room, 0))
    ready = counts.new_ready - drain_new + counts.old_ready
    spare = max(ready - max(replicas - unavailable, 0), 0)
    return ReplicaStep(
        create_new=create,
        drop_old_unready=counts.old_unready,
        drain_old=min(counts.old_ready, spare),
        drop_new_unready=drop_new,
        drain_new=drain_new,
    )


def resolve(value: int | str, replicas: int, *, up: bool) -> int:
    """The number, or that percentage of the replicas; `up` rounds up (surge), else down (unavailable)."""
    if isinstance(value, int):
        return value
    part = replicas * int(value.removesuffix("%")) / 100
    return math.ceil(part) if up else math.floor(part)
