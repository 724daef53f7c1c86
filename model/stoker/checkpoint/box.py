"""Rectangles in a tensor's index space, and flat ranges inside them.

A writer's shard is `box[flat_start:flat_end]`: a rectangle, flattened row by row, of which a range is taken. `slabs`
cuts such a range into at most `2 * dims - 1` rectangles, so that everything else (reading, proofs, comparison) only
ever meets rectangles.

Pure values. Called by manifest, cover, reader, writer, and by the model's loader of checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from stoker.checkpoint.errors import CheckpointError

MAX_DIMS = 16
MAX_ELEMENTS = 1 << 62


@dataclass(frozen=True)
class Box:
    """A rectangle in a global tensor: first index and extent for each dim.

    A scalar's box has no dims and one element.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.size) or len(self.start) > MAX_DIMS:
            raise CheckpointError(
                f"box start {self.start} and size {self.size} need the same number of dims, {MAX_DIMS} at most"
            )
        for value in (*self.start, *self.size):
            if type(value) is not int or value < 0:
                raise CheckpointError(f"box start {self.start} and size {self.size} must be integers >= 0")
        if self.volume > MAX_ELEMENTS:
            raise CheckpointError(f"box size {self.size} has more than {MAX_ELEMENTS} elements")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(first + extent for first, extent in zip(self.start, self.size, strict=True))

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape holds the whole box."""
        return len(shape) == len(self.size) and all(last <= limit for last, limit in zip(self.end, shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common rectangle, or None when there is no common element."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(last - first for first, last in zip(start, map(min, self.end, other.end), strict=True))
        return Box(start, size) if all(extent > 0 for extent in size) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in an array that holds `outer`."""
        return tuple(
            slice(first - base, first - base + extent)
            for first, extent, base in zip(self.start, self.size, outer.start, strict=True)
        )

    def index_of(self, flat: int) -> tuple[int, ...]:
        """Global index of the element at a flat position inside the box."""
        index = []
        for first, extent in zip(reversed(self.start), reversed(self.size), strict=True):
            flat, inner = divmod(flat, extent)
            index.append(first + inner)
        return tuple(reversed(index))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{first}:{last}" for first, last in zip(self.start, self.end, strict=True)) + "]"


def slabs(box: Box, flat_start: int, flat_end: int) -> list[Box]:
    """Return rectangles whose elements, one rectangle after the other, are those of the flat range in order."""
    return [
        Box(tuple(map(int.__add__, box.start, start)), size) for start, size in _slabs(box.size, flat_start, flat_end)
    ]


def _slabs(size: tuple[int, ...], first: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if first >= end:
        return
    if not size:
        yield (), ()
        return
    inner = size[1:]
    row_elements = math.prod(inner)
    row, skipped = divmod(first, row_elements)
    last_row, rest = divmod(end, row_elements)
    if row == last_row:
        yield from _in_row(row, inner, skipped, rest)
        return
    if skipped:
        yield from _in_row(row, inner, skipped, row_elements)
        row += 1
    if row < last_row:
        yield (row,) + (0,) * len(inner), (last_row - row, *inner)
    yield from _in_row(last_row, inner, 0, rest)


def _in_row(
    row: int, inner: tuple[int, ...], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for start, size in _slabs(inner, first, end):
        yield (row, *start), (1, *size)


def address(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    """Row-major position of an index in a tensor of that shape."""
    position = 0
    for extent, value in zip(shape, index, strict=True):
        position = position * extent + value
    return position
