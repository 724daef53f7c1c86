"""One HTTP request to a handler, and what a handler returns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from stoker.engine.http.errors import from_validation
from stoker.engine.http.openai.resume import ResumeState
from stoker.engine.http.reply import Page

B = TypeVar("B", bound=BaseModel)
Events = AsyncGenerator[bytes]
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class HttpCall:
    """One HTTP request."""

    path: str
    body: bytes
    id: str
    request_id: str
    """`X-Request-Id`, the client's or a new one."""
    arrival_s: float
    marks_tokens: bool = False
    """Whether a stream's chunks should have their tokens, so that another engine can go on with it."""
    resumed: ResumeState | None = None
    prefill: str = ""
    """Where a router lets the prompt be computed."""
    trace: str = ""
    """W3C `traceparent` of the request."""
    place: int = 0
    """The number of the request's class, which a router found."""
    beginning: str = ""
    """A router's name for the beginning of the prompt."""
    rank: int | None = None
    """The data rank that a router chose; None: it chose none."""
    comments: bool = True
    """Whether a silent stream may have comments: not where a router sends its own."""

    def parse(self, cls: type[B]) -> B:
        """Parse the body as `cls`.

        Raises:
            ApiError: 400, with the wrong field.
        """
        try:
            return cls.model_validate_json(self.body or b"{}")
        except ValidationError as error:
            raise from_validation(error) from error


class Stream(NamedTuple):
    """An answer in events."""

    events: Events
    headers: Mapping[str, str] = NO_HEADERS
    comments: bool = False
    """Whether its silence is filled with comments."""


Result = Mapping[str, Any] | Stream | Page
Handler = Callable[[HttpCall], Awaitable[Result]]
