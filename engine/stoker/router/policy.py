"""Policies that choose the backend of the next request: pure functions.

Chosen by name in the configuration and called by `Backends.choose`. These see pending requests only; `cacheAware` has a
module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from stoker.router.cache_aware import CacheAware
from stoker.router.node import NOWHERE, Node, distance
from stoker.router.work import NO_WORK, Work

_MASK = 2**64 - 1


FARTHER = 4
"""Pending requests that a backend in another zone may have less before it is chosen; on another node of the zone half
as many."""


class HasPending(Protocol):
    """The part of a backend that policies use."""

    @property
    def pending(self) -> int:
        """Unfinished requests of this router."""
        ...


class HasNode(HasPending, Protocol):
    """The part of a backend that `locality` uses."""

    @property
    def node(self) -> Node:
        """Where it runs."""
        ...


B = TypeVar("B", bound=HasPending)
L = TypeVar("L", bound=HasNode)
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


@dataclass(frozen=True)
class Locality:
    """Choose the nearest backend: of the router's node, then of its zone, then any.

    Distance is priced in pending requests, so that a near backend is not overloaded while others are idle.
    """

    home: Node

    def __call__(self, ready: Sequence[L], turn: int, _: Work = NO_WORK) -> L:
        costs = [backend.pending + distance(self.home, backend.node) * FARTHER // 2 for backend in ready]
        least = min(costs)
        return round_robin([one for one, cost in zip(ready, costs, strict=True) if cost == least], turn)


def policy_named(name: str, home: Node = NOWHERE) -> Policy[Any]:
    """Return the policy with this name; `cacheAware` is a new one each time, because it remembers requests.

    `home`: where the router runs.

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
    if name == "locality":
        return Locality(home)
    if name not in policies:
        raise ValueError(f"not supported yet: policy {name}")
    return policies[name]
