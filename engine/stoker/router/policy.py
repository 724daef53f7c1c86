"""Which backend gets the next request: pure choices among those that may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Loaded(Protocol):
    """What a policy sees of a backend."""

    @property
    def pending(self) -> int:
        """Requests of this router that it has not finished."""
        ...


B = TypeVar("B", bound=Loaded)
Policy = Callable[[Sequence[B], int], B]


def round_robin(ready: Sequence[B], turn: int) -> B:
    """The next in turn; `turn` counts the requests so far."""
    return ready[turn % len(ready)]


def least_pending(ready: Sequence[B], turn: int) -> B:
    """The least loaded; among equals the next in turn, so that an idle pool is used evenly."""
    least = min(backend.pending for backend in ready)
    return round_robin([backend for backend in ready if backend.pending == least], turn)


def policy_named(name: str) -> Policy[B]:
    """The policy of a configuration.

    Raises:
        ValueError: it is not built.
    """
    policies: dict[str, Policy[B]] = {"leastPending": least_pending, "roundRobin": round_robin}
    if name not in policies:
        raise ValueError(f"not supported yet: policy {name}")
    return policies[name]
