"""Curves as text: two by four dots in each character (Unicode's Braille patterns). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.cli.curves import Curve

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""[row][column] -> bit of a character."""
LABEL = 10


def drawn(curve: Curve, width: int, height: int) -> str:
    """Draw a curve on `width` x `height` characters with its title, its limits and its steps.

    Neighbouring points are joined by a line.
    """
    columns, rows = max(2, width - LABEL - 1), max(2, height)
    cells = [[0] * columns for _ in range(rows)]
    places = _places(curve, 2 * columns, 4 * rows)
    for (x, y), (next_x, next_y) in zip(places, [*places[1:], places[-1]], strict=True):
        for dot_x, dot_y in _line(x, y, next_x, next_y):
            cells[dot_y // 4][dot_x // 2] |= DOTS[dot_y % 4][dot_x % 2]
    high, low = max(curve.values), min(curve.values)
    labels = [f"{high:.3g}", *[""] * (rows - 2), f"{low:.3g}"]
    body = [f"{label:>{LABEL}} {_row(cells_of_row)}" for label, cells_of_row in zip(labels, cells, strict=True)]
    last = f"last {curve.values[-1]:.4g}"
    first_step, last_step = str(curve.steps[0]), str(curve.steps[-1])
    steps = f"{'step':>{LABEL}} {first_step}{last_step.rjust(max(len(last_step) + 1, columns - len(first_step)))}"
    return "\n".join([f"{curve.title}  ({last})", *body, steps])


def _row(cells: Sequence[int]) -> str:
    return "".join(chr(BLANK + bits) for bits in cells).rstrip(chr(BLANK))


def _places(curve: Curve, width: int, height: int) -> list[tuple[int, int]]:
    """The dot of each point; the top row is 0."""
    first, last = curve.steps[0], curve.steps[-1]
    low, high = min(curve.values), max(curve.values)
    return [
        (
            round((step - first) / max(last - first, 1) * (width - 1)),
            round((high - value) / (high - low) * (height - 1)) if high > low else height // 2,
        )
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]


def _line(x: int, y: int, to_x: int, to_y: int) -> list[tuple[int, int]]:
    """The dots of a straight line, both ends included."""
    count = max(abs(to_x - x), abs(to_y - y), 1)
    return [(x + round(i * (to_x - x) / count), y + round(i * (to_y - y) / count)) for i in range(count + 1)]
