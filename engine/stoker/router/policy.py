"""Policies that choose the backend of the next request: pure functions.

Chosen by name in the configuration and called by `Backends.choose`. These see pending requests only; `cacheAware` has a
module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from stoker.router.cache_aware import CacheAware
from stoker.router.work import NO_WORK, Work

_MASK = 2**64 - 1


class HasPending(Protocol):
    """The part of a backend that policies use."""

    @property
    def pending(self) -> int:
        """Unfinished requests of this router."""
        ...


B = TypeVar("B", bound=HasPending)
Policy = Callable[[Sequence[B], int, Work], B]


def round_robin(ready: Sequence[B], turn: int, _: Work = NO_WORK) -> B:
    """Choose in turn; `turn` counts the requests so far."""
    return ready[turn % len(ready)]


def least_pending(ready: Sequence[B], turn: int, _: Work = NO_WORK) -> B:
    """Choose one with the fewest pending requests; among equals in turn, so that an idle pool is used evenly."""
    least = min(backend.pending for backend in ready)
    return round_robin([backend for backend in ready if backend.pending == least], turn)


def power_of_two(ready: Sequence[B], turn: int, _: Work = NO_WORK) -> B:
    """Choose the one with fewer pending requests of two drawn by chance.

    Routers that do not see each other's requests do not all choose the same backend then (Mitzenmacher, 2001).
    """
    if len(ready) == 1:
        return ready[0]
    drawn = _drawn(turn)
    first = drawn % len(ready)
    second = (first + 1 + (drawn // len(ready)) % (len(ready) - 1)) % len(ready)
    return min((ready[first], ready[second]), key=lambda backend: backend.pending)


def random_one(ready: Sequence[B], turn: int, _: Work = NO_WORK) -> B:
    """Choose by chance, whatever is pending."""
    return ready[_drawn(turn) % len(ready)]


def _drawn(turn: int) -> int:
    """A number of 64 bits that looks random (splitmix64); a policy keeps no state, so it is drawn from the turn."""
    mixed = (turn * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def policy_named(name: str) -> Policy[Any]:
    """Return the policy with this name; `cacheAware` is a new one each time, because it remembers requests.

    Raises:
        ValueError: it is not built.
    """
    policies: dict[str, Policy[Any]] = {
        "leastPending": least_pending,
        "roundRobin": round_robin,
        "powerOfTwo": power_of_two,
        "random": random_one,
    }
    if name == "cacheAware":
        return CacheAware()
    if name not in policies:
        raise ValueError(f"not supported yet: policy {name}")
    return policies[name]
