"""The requests of one front, running and recent: for `GET /v1/requests/{id}`.

Holds counts and times, never texts. Owned by the front; a request's run follows its own entry.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from stoker.engine.core.messages import RequestProgress, RequestState
from stoker.engine.http.errors import ApiError
from stoker.engine.http.job import Usage
from stoker.engine.http.openai.usage import times

MAX_REQUESTS = 2048
"""Requests that are kept; the oldest goes first."""

LifeState = Literal["QUEUED", "PREFILLING", "DECODING", "PREEMPTED", "COMPLETED", "FAILED"]
ORDER: tuple[RequestState, ...] = ("DECODING", "PREFILLING", "PREEMPTED", "QUEUED")
"""Of several prompts the one that is furthest gives the state."""


@dataclass
class LoggedRequest:
    """One request, from its acceptance on."""

    id: str
    """The answer's id."""
    request_id: str
    """`X-Request-Id`."""
    model: str
    created: int
    job_ids: tuple[str, ...]
    usage: Sequence[Usage]
    """Changed by the request's run."""
    arrival_s: float = 0.0
    """By `clock`."""
    clock: Callable[[], float] = time.monotonic
    end: Literal["COMPLETED", "FAILED"] | None = None
    error: str | None = None
    failed_s: float | None = None
    """When it failed, by `clock`."""

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Follow the run of the request inside the block to its end."""
        try:
            yield
        except ApiError as error:
            self._fail(error.message)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._fail("the client has gone")
            raise
        except BaseException as error:
            self._fail(f"internal error: {type(error).__name__}")
            raise
        self.end = "COMPLETED"

    def _fail(self, error: str) -> None:
        self.end, self.error, self.failed_s = "FAILED", error, self.clock()

    def body(self, progress: Sequence[RequestProgress]) -> dict[str, Any]:
        """`GET /v1/requests/{id}`. `progress`: what the core knows of those prompts that have not ended."""
        facts = [one for part in self.usage for one in part.facts.values()]
        return {
            "id": self.id,
            "object": "request",
            "request_id": self.request_id,
            "model": self.model,
            "created": self.created,
            "state": self.state(progress),
            "error": self.error,
            "prompt_tokens": sum(part.prompt_tokens for part in self.usage),
            "cached_tokens": max((sum(part.cached_tokens for part in self.usage), _cached(progress))),
            "output_tokens": sum(part.completion_tokens for part in self.usage),
            "preemptions": max(sum(one.preemptions for one in facts), sum(one.preemptions for one in progress)),
            "timing": self._times(),
        }

    def _times(self) -> dict[str, float | None]:
        """The times of the request. The last token's is known when all answers are complete."""
        known = times(self.usage)
        if self.end == "COMPLETED":
            return known
        total_s = None if self.failed_s is None else round(self.failed_s - self.arrival_s, 6)
        return {**known, "decode_s": None, "total_s": total_s}

    def state(self, progress: Sequence[RequestProgress]) -> LifeState:
        if self.end is not None:
            return self.end
        states = {one.state for one in progress}
        begun = any(part.facts for part in self.usage)
        return next((state for state in ORDER if state in states), "DECODING" if begun else "QUEUED")


class RequestLog:
    """The newest requests by their ids."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, LoggedRequest] = OrderedDict()
        self._by_request_id: dict[str, str] = {}

    def add(self, request: LoggedRequest) -> None:
        self._requests[request.id] = request
        self._by_request_id[request.request_id] = request.id
        while len(self._requests) > MAX_REQUESTS:
            _, oldest = self._requests.popitem(last=False)
            if self._by_request_id.get(oldest.request_id) == oldest.id:
                del self._by_request_id[oldest.request_id]

    def find(self, name: str) -> LoggedRequest | None:
        """The request with this id, or the newest one with this `X-Request-Id`."""
        return self._requests.get(self._by_request_id.get(name, name))


def _cached(progress: Sequence[RequestProgress]) -> int:
    return sum(one.cached_tokens for one in progress)
