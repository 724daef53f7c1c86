"""The part of a block that one file or one rank has: some layers and some heads. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from stoker.engine.transfer.layout import BlockLayout


class BlockPart(NamedTuple):
    """Ranges of global indices."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    def is_in(self, whole: BlockPart) -> bool:
        layers = whole.first_layer <= self.first_layer < self.end_layer <= whole.end_layer
        return layers and whole.first_head <= self.first_head < self.end_head <= whole.end_head

    def overlaps(self, other: BlockPart) -> bool:
        layers = self.first_layer < other.end_layer and other.first_layer < self.end_layer
        return layers and self.first_head < other.end_head and other.first_head < self.end_head


Parts = tuple[BlockPart, ...]


def part_of(layout: BlockLayout) -> BlockPart:
    """The part that blocks of this layout are."""
    return BlockPart(layout.first_layer, layout.end_layer, layout.first_head, layout.end_head)


def layout_of_part(whole: BlockLayout, part: BlockPart) -> BlockLayout:
    """The layout of a part of blocks like these."""
    return replace(whole, **part._asdict())


@lru_cache(maxsize=1024)
def tiling(parts: frozenset[BlockPart], whole: BlockPart) -> Parts | None:
    """Parts that hold every layer and head once; None where some are missing. Of several ways one with large parts.

    Parts are laid down from the first layer on: `tops` is the first layer that each head lacks. The lowest of these
    places can only be filled by a part that begins there.
    """
    corners: dict[tuple[int, int], list[BlockPart]] = defaultdict(list)
    for part in sorted(parts, key=lambda one: (one.first_layer - one.end_layer, one.first_head - one.end_head)):
        if part.is_in(whole):
            corners[part.first_layer, part.first_head].append(part)
    tops = (whole.first_layer,) * (whole.end_head - whole.first_head)
    return _lay(corners, whole, tops, set())


def _lay(
    corners: Mapping[tuple[int, int], Sequence[BlockPart]], whole: BlockPart, tops: tuple[int, ...],
    dead: set[tuple[int, ...]],
) -> Parts | None:  # fmt: skip
    """The parts from these tops on. `dead`: tops from which there is no way."""
    layer = min(tops)
    if layer == whole.end_layer:
        return ()
    if tops in dead:
        return None
    head = tops.index(layer)
    for part in corners.get((layer, whole.first_head + head), ()):
        width = part.end_head - part.first_head
        if tops[head : head + width] == (layer,) * width:
            rest = _lay(corners, whole, (*tops[:head], *(part.end_layer,) * width, *tops[head + width :]), dead)
            if rest is not None:
                return (part, *rest)
    dead.add(tops)
    return None
