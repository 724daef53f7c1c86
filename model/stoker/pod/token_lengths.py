"""Numbers on the command lines of the benches: tokens to draw as `N` or `MIN:MAX`, and counts.

Pure. The functions are types of options of `argparse`, which prints their message.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLengths:
    """Tokens, drawn evenly from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> TokenLengths:
        """Parse `N` or `MIN:MAX`. Raises ValueError."""
        parts = text.split(":")
        if len(parts) > 2 or not all(part.isdecimal() for part in parts):
            raise ValueError(f"a number of tokens is needed, N or MIN:MAX (got {text!r})")
        found = cls(int(parts[0]), int(parts[-1]))
        if not 1 <= found.low <= found.high:
            raise ValueError(f"1 <= MIN <= MAX is needed (got {text!r})")
        return found

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def token_lengths(text: str) -> TokenLengths:
    """Raises ArgumentTypeError."""
    try:
        return TokenLengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_above_zero(text: str) -> int:
    """Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number above 0 is needed (got {text!r})")
    return int(text)


def count(text: str) -> int:
    """Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a whole number is needed (got {text!r})")
    return int(text)
