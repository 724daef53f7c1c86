"""The parts that both kinds of completion share in their answers.

Called by `chat` and `completions`; the front makes the envelope, and the server writes an `Answer`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.engine.http.generation import Generation
from stoker.engine.http.openai.usage import usage


@dataclass(frozen=True)
class Envelope:
    """The fields that every chunk and every whole answer carries."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    """The name that the client used."""
    fingerprint: str | None

    def wrap(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


@dataclass(frozen=True)
class UsageChunks:
    """The choice of chunks in a stream that carry usage."""

    last: bool
    """One more chunk at the end, without choices."""
    running: bool
    """All of them."""
    timing: bool = False
    """The usage has the request's times."""

    def usage(self, generation: Generation) -> dict[str, Any]:
        """The usage so far."""
        return usage(generation.usage, timing=self.timing)

    def field(self, generation: Generation) -> dict[str, Any]:
        """Return the `usage` field of a chunk with choices: the usage so far, `null` before the last one, or none."""
        if self.running:
            return {"usage": self.usage(generation)}
        return {"usage": None} if self.last else {}


class Answer(Protocol):
    """A prepared answer; nothing has been sent to the core yet."""

    generation: Generation

    async def whole(self) -> dict[str, Any]: ...

    def chunks(self) -> AsyncGenerator[dict[str, Any]]: ...
