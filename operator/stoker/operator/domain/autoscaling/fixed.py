"""The replicas of pools with `mode: fixed`: a constant number, or a constant ratio of prefill to decode. Pure.

A colocated pool keeps the number of its spec; what else is written to its `/scale` is taken back. Of a prefill and a
decode pool the decode pool's `/scale` is free within its bounds: it gives the total. The prefill pool follows by the
ratio of both numbers in the spec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Role = Literal["colocated", "prefill", "decode"]


@dataclass(frozen=True)
class FixedPool:
    """One pool's role, its number in the spec, its bounds, and what its `/scale` has now."""

    role: Role
    replicas: int
    min: int
    max: int
    scale: int


def fixed_replicas(pool: FixedPool, decode: FixedPool | None = None) -> int:
    """The replicas that the pool should have.

    Args:
        decode: the decode pool beside a prefill pool.
    """
    if pool.role == "decode":
        return _within(pool, pool.scale)
    if pool.role == "prefill" and decode is not None and decode.replicas:
        total = fixed_replicas(decode)
        share = math.floor(total * pool.replicas / decode.replicas + 0.5)
        return _within(pool, max(share, 1) if total and pool.replicas else 0)
    return _within(pool, pool.replicas)


def _within(pool: FixedPool, wanted: int) -> int:
    return min(max(wanted, pool.min), pool.max)
