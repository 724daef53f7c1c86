"""Questions to a cluster, as the verbs that wait put them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Ask(Protocol):
    """Puts a question to a cluster; None where it does not answer now and may later."""

    def __call__(self, question: Callable[[], T], /) -> T | None: ...


def ask_once(question: Callable[[], T]) -> T | None:
    """Ask a cluster whose errors end the command."""
    return question()
