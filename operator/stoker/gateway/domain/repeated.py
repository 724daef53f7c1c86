"""Whether a request asks for what a stored resource was made for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIXED = ("model", "modelFrom", "training", "optimization", "data")
"""Sections of a TrainingJob that cannot change, so that they show what the first request asked for."""


def is_part_of(asked: Any, stored: Any) -> bool:
    """Whether the stored value is the asked one with defaults added. What was not asked for fits everything."""
    if asked is None:
        return True
    if isinstance(asked, Mapping):
        return isinstance(stored, Mapping) and all(is_part_of(value, stored.get(name)) for name, value in asked.items())
    if isinstance(asked, list):
        return isinstance(stored, list) and len(asked) == len(stored) and all(map(is_part_of, asked, stored))
    return bool(asked == stored)
