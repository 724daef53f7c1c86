"""The name that was probably meant where one does not exist. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CUTOFF = 0.6
"""Least similarity of two names, from 0 to 1, at which one is proposed for the other."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Build the end of a message, `; did you mean teach?`; empty where no known name is near."""
    spelling = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), spelling, n=3, cutoff=CUTOFF)
    return f"; did you mean {' or '.join(spelling[name] for name in near)}?" if near else ""
