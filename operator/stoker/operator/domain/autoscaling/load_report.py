"""The `load` field of an engine's `/status`, typed, and the difference of two of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.pod.histogram import Histogram, merged


@dataclass(frozen=True)
class LoadCounts:
    """Counters that only grow while an engine lives, or what they grew by. Times in seconds, sizes in tokens."""

    arrived: int = 0
    first_tokens: int = 0
    generated: int = 0
    steps: int = 0
    step_tokens: int = 0
    busy_s: float = 0.0
    prompt: Histogram = field(default_factory=Histogram)
    uncached: Histogram = field(default_factory=Histogram)
    output: Histogram = field(default_factory=Histogram)
    first_token_s: Histogram = field(default_factory=Histogram)
    token_gap_s: Histogram = field(default_factory=Histogram)

    @property
    def decode_tokens(self) -> int:
        """Tokens of steps that continued an answer."""
        return max(self.generated - self.first_tokens, 0)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of steps that were part of a prompt, or of one that was computed again."""
        return max(self.step_tokens - self.decode_tokens, 0)

    def since(self, earlier: LoadCounts) -> LoadCounts | None:
        """What happened after `earlier`; None if a counter fell, because the program began anew."""
        if any(getattr(self, name) < getattr(earlier, name) for name in _NUMBERS):
            return None
        grown: dict[str, Any] = {name: getattr(self, name) - getattr(earlier, name) for name in _NUMBERS}
        grown |= {name: getattr(self, name).since(getattr(earlier, name)) for name in _SIZES}
        return LoadCounts(**grown)


_NUMBERS = ("arrived", "first_tokens", "generated", "steps", "step_tokens", "busy_s")
_SIZES = ("prompt", "uncached", "output", "first_token_s", "token_gap_s")


def total(parts: list[LoadCounts]) -> LoadCounts:
    """The sum of what happened."""
    summed: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _NUMBERS}
    summed |= {name: merged(getattr(part, name) for part in parts) for name in _SIZES}
    return LoadCounts(**summed)


@dataclass(frozen=True)
class LoadReport:
    """One engine at one moment."""

    counts: LoadCounts
    running: int
    waiting: int
    owned_tokens: int
    """Of the cache, in blocks of running sequences."""
    total_tokens: int
    max_requests: int
    max_batch_tokens: int
    mixed_tokens: int | None = None
    """Prompt tokens of a step beside decodes while few wait; None: as many as fit."""


def read_load(status: Mapping[str, Any]) -> LoadReport | None:
    """The load in a `/status` answer; None where it is absent or not of this form, which is an unknown input."""
    load = status.get("load")
    if not isinstance(load, Mapping):
        return None
    try:
        counted: dict[str, Any] = {name: type(getattr(_ZERO, name))(load[name]) for name in _NUMBERS}
        counted |= {name: Histogram.from_wire(load[name]) for name in _SIZES}
        fields = ("running", "waiting", "owned_tokens", "total_tokens", "max_requests", "max_batch_tokens")
        mixed = load.get("mixed_tokens")  # engines of earlier versions do not say it
        numbers = {name: int(load[name]) for name in fields}
        return LoadReport(LoadCounts(**counted), **numbers, mixed_tokens=None if mixed is None else int(mixed))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


_ZERO = LoadCounts()
