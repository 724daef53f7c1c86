"""A budget for the bytes of request bodies that a program holds at one time, counted over all requests.

One `BodyBudget` each for the engine's server, the router's proxy and the control routes, used from their event loop. A
request takes a `BodyShare` and releases it at its end.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self


class BodyBudgetSpent(Exception):
    """The bodies in flight have reached the limit; the client may try again later."""


class BodyBudget:
    """A counter shared by all requests of one program. Used from one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def share(self) -> BodyShare:
        """The part of the budget that one request will use: a context manager that gives it back."""
        return BodyShare(self)


class BodyShare:
    """The bytes that one request holds."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held_bytes = 0

    def take(self, count: int) -> None:
        """Count `count` more bytes.

        Raises:
            BodyBudgetSpent: they do not fit; nothing was counted.
        """
        if self._budget.held_bytes + count > self._budget.max_bytes:
            raise BodyBudgetSpent(f"the request bodies in flight fill {self._budget.max_bytes} bytes")
        self._budget.held_bytes += count
        self._held_bytes += count

    def release(self) -> None:
        """Give back all bytes; harmless when repeated."""
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
