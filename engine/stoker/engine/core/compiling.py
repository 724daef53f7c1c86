"""Requests whose grammars are being compiled in threads, so that the core's loop goes on meanwhile.

Owned by the core; called by its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stoker.engine.core.messages import AddRequest
from stoker.engine.errors import RequestRefused

MAX_COMPILE_S = 10.0
"""Longest time for one grammar, the wait for a thread included."""


@dataclass(frozen=True)
class Compiling:
    """One request that waits for its grammar."""

    front: str
    request: AddRequest
    compiled: Future[Any]
    until_s: float

    def error(self) -> RequestRefused | None:
        """The reason to refuse the request, once it is ready or out of time."""
        grammar = self.request.params.grammar
        assert grammar is not None
        if not self.compiled.done():
            return grammar.refused(f"takes longer than {MAX_COMPILE_S:g} s to compile")
        problem = self.compiled.exception()
        if problem is None or isinstance(problem, RequestRefused):
            return problem
        return grammar.refused(f"cannot be used: {type(problem).__name__}: {problem}")


class CompilingRequests:
    """Requests in the order of their arrival."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: list[Compiling] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, front: str, request: AddRequest, compiled: Future[Any]) -> None:
        self._waiting.append(Compiling(front, request, compiled, self._clock() + MAX_COMPILE_S))

    def drop(self, front: str, request_id: str | None = None) -> None:
        """Forget a request, or all of a front, because its client has gone."""
        gone = [one for one in self._waiting if one.front == front and request_id in (None, one.request.request_id)]
        for one in gone:
            one.compiled.cancel()
            self._waiting.remove(one)

    def holds(self, front: str, request_id: str) -> bool:
        return any((one.front, one.request.request_id) == (front, request_id) for one in self._waiting)

    def ready(self) -> Iterator[tuple[Compiling, RequestRefused | None]]:
        """Take out those that are compiled, refused or out of time, with the refusal."""
        now_s = self._clock()
        for one in [one for one in self._waiting if one.compiled.done() or now_s >= one.until_s]:
            self._waiting.remove(one)
            yield one, one.error()
