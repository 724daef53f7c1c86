"""Policies that choose the backend of the next request: pure functions.

Chosen by name in the configuration and called by `Backends.choose`. A policy sees pending requests only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class HasPending(Protocol):
    """The part of a backend that policies use."""

    @property
    def pending(self) -> int:
        """Unfinished requests of this router."""
        ...


B = TypeVar("B", bound=HasPending)
Policy = Callable[[Sequence[B], int], B]


def round_robin(ready: Sequence[B], turn: int) -> B:
    """Choose in turn; `turn` counts the requests so far."""
    return ready[turn % len(ready)]


def least_pending(ready: Sequence[B], turn: int) -> B:
    """Choose one with the fewest pending requests; among equals in turn, so that an idle pool is used evenly."""
    least = min(backend.pending for backend in ready)
    return round_robin([backend for backend in ready if backend.pending == least], turn)


def policy_named(name: str) -> Policy[B]:
    """Return the policy with this name.

    Raises:
        ValueError: it is not built.
    """
    policies: dict[str, Policy[B]] = {"leastPending": least_pending, "roundRobin": round_robin}
    if name not in policies:
        raise ValueError(f"not supported yet: policy {name}")
    return policies[name]
