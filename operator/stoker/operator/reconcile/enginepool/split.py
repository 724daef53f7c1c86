"""The numbers of replicas to make and to remove next where several revisions have a share: one pure step.

Invariants as in `step`: at most `replicas + surge` pods, or one of each revision, are not draining. A step drains no
pod if fewer than `replicas - unavailable` would stay ready. Repeated steps end at the wanted number of each revision.
With one revision that has the whole share it decides as `step.next_step` does.

Called by `replicas`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RevisionStep:
    """Numbers of replicas of one revision to make, drop and drain now."""

    create: int = 0
    drop_unready: int = 0
    drain: int = 0


def wanted_by_revision(replicas: int, surge: int, shares: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Replicas of each revision: its share rounded up, at least one; the largest takes the rest, at least one.

    Where `surge` allows it, the largest gets as many as its share, so that rounding takes no capacity away.
    """
    wanted = {name: 0 for name, _ in shares}
    open_ = sorted(((share, name) for name, share in shares if share), reverse=True)
    if not open_ or replicas == 0:
        return wanted
    (most, largest), *others = open_
    for share, name in others:
        wanted[name] = max(math.ceil(replicas * share / 100), 1)
    rest = replicas - sum(wanted.values())
    wanted[largest] = max(min(math.floor(replicas * most / 100 + 0.5), rest + surge), rest, 1)
    return wanted


def next_split(
    replicas: int, surge: int, unavailable: int, wanted: Mapping[str, int], pods: Mapping[str, tuple[int, int]]
) -> dict[str, RevisionStep]:
    """The next step; empty steps when the pool has converged or a replica must become ready first.

    Args:
        replicas: of the pool.
        wanted: replicas by revision; a revision without an entry gets none.
        pods: (ready, unready) pods by revision that are neither ended nor draining.
    """
    if surge == 0 and unavailable == 0:
        surge = 1  # otherwise no replica could ever be replaced
    most = max(replicas + surge, sum(wanted.values()))
    counts = {name: pods.get(name, (0, 0)) for name in {**wanted, **pods}}
    surplus = {name: max(sum(count) - wanted.get(name, 0), 0) for name, count in counts.items()}
    drop = {name: min(surplus[name], count[1]) for name, count in counts.items()}
    room = most - sum(sum(count) for count in counts.values()) + sum(drop.values())
    spare = sum(count[0] for count in counts.values()) - max(replicas - unavailable, 0)
    missing = {name: max(wanted.get(name, 0) - sum(count), 0) for name, count in counts.items()}
    ready = {name: surplus[name] - drop[name] for name in counts}
    create = _allot(room, missing, sorted(counts, key=lambda name: (wanted.get(name, 0), name)))
    drain = _allot(spare, ready, sorted(counts, key=lambda name: (wanted.get(name, 0) > 0, wanted.get(name, 0), name)))
    return {name: RevisionStep(create[name], drop[name], drain[name]) for name in counts}


def _allot(number: int, most: Mapping[str, int], order: Sequence[str]) -> dict[str, int]:
    """Give each name in turn as many of `number` as it may have at most."""
    given = {}
    for name in order:
        given[name] = min(most[name], max(number, 0))
        number -= given[name]
    return given
