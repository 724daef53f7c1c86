"""Colour and width of tables: what a terminal shows, and what a pipe gets.

`NO_COLOR`, `FORCE_COLOR` and `TERM=dumb` decide as in other programs. Nothing is cut in a pipe.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import IO

RESET = "\x1b[0m"
GAP = "   "
COLOURS = {"good": "\x1b[32m", "bad": "\x1b[31m", "going": "\x1b[33m", "header": "\x1b[1m"}
LEAST_TEXT = 12
"""Characters that the last column keeps, however narrow the terminal is."""


@dataclass(frozen=True)
class TextStyle:
    """How tables are written."""

    colour: bool = False
    width: int | None = None
    """Characters of a line after which the last column is cut; None cuts nothing."""


PLAIN = TextStyle()


def style_of(stream: IO[str] | None = None, environment: Mapping[str, str] | None = None) -> TextStyle:
    """Choose the style for a stream (default: standard output)."""
    chosen, variables = stream or sys.stdout, os.environ if environment is None else environment
    terminal = chosen.isatty()
    return TextStyle(
        is_coloured(variables, terminal=terminal), shutil.get_terminal_size().columns if terminal else None
    )


def is_coloured(environment: Mapping[str, str], *, terminal: bool) -> bool:
    """Whether to write colours: never with NO_COLOR, always with FORCE_COLOR, else on a terminal that has them."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return terminal and environment.get("TERM") != "dumb"


def aligned(rows: Sequence[Sequence[str]], style: TextStyle = PLAIN, states: Sequence[str] = ()) -> str:
    """Pad the columns of a table with spaces, as kubectl does.

    Args:
        rows: the header, then a row for each object.
        states: for each object a key of COLOURS, or empty: the colour of its phase.
    """
    widths = widths_of(rows)
    column = phase_column(rows[0])
    header = _coloured(_joined(rows[0], widths, None), style, "header")
    body = [
        line_of(row, widths, style, state, column)
        for row, state in zip_longest(rows[1:], states[: len(rows) - 1], fillvalue="")
    ]
    return "\n".join([header, *body])


def widths_of(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column."""
    return [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]


def phase_column(header: Sequence[str]) -> int | None:
    """The column that is coloured."""
    return next((index for index, name in enumerate(header) if name in ("PHASE", "STATUS")), None)


def line_of(row: Sequence[str], widths: Sequence[int], style: TextStyle, state: str, column: int | None) -> str:
    """Write one row in columns of given widths; a cell that is wider pushes the rest of its line."""
    text = _joined(row, widths, _last_width(widths, style))
    if not state or column is None:
        return text
    start = sum(max(width, len(cell)) + len(GAP) for cell, width in zip(row[:column], widths, strict=False))
    end = start + len(row[column])
    return text[:start] + _coloured(text[start:end], style, state) + text[end:]


def _joined(row: Sequence[str], widths: Sequence[int], last: int | None) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
    return GAP.join([*cells, _cut(row[-1], last)]).rstrip()


def _coloured(text: str, style: TextStyle, state: str) -> str:
    return f"{COLOURS[state]}{text}{RESET}" if style.colour and text else text


def _last_width(widths: Sequence[int], style: TextStyle) -> int | None:
    if style.width is None:
        return None
    return max(LEAST_TEXT, style.width - sum(widths[:-1]) - len(GAP) * (len(widths) - 1))


def _cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"
