"""How a block travels between engines of several ranks: which rank sends which layers and heads to which rank, and one
checksum over all of it.

Every rank holds some layers and some heads of each block. A block is cut into equal cells, runs of layers and heads
that one rank of either side holds as a whole. Where both sides have the same ranks a cell is a rank's whole block, and
it goes to the rank of the same number. A sender with fewer ranks cuts its blocks, a receiver with fewer joins what it
gets. Pure; `cells` moves bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from stoker.engine.transfer.checksum import MASK, odd_keys
from stoker.engine.transfer.layout import ONE_CELL, BlockLayout, Grid
from stoker.engine.transfer.port import Cells, LayoutMismatch

FIRST_KEY = 1 << 32
"""Where the constants of parts begin; those of words are far below."""


class Part(NamedTuple):
    """A cell of a block, and its way."""

    sender: int
    """Rank."""
    sender_cell: int
    """Number of the cell within the sender's block."""
    receiver: int
    receiver_cell: int


@dataclass(frozen=True)
class PartPlan:
    """The parts of every block that one engine sends to another, in the order of the receiver's ranks."""

    parts: tuple[Part, ...]
    cuts: tuple[Grid, ...] = (ONE_CELL,)
    """Cells of a block of each sender."""
    joins: tuple[Grid, ...] = (ONE_CELL,)
    """Cells of a block of each receiver."""

    @property
    def repacks(self) -> bool:
        """Whether the two sides hold different layers or heads."""
        return any(grid.cells > 1 for grid in (*self.cuts, *self.joins))

    def cells(self, pair: tuple[int, int]) -> Cells:
        """How the link from a sender to a receiver cuts and joins."""
        senders = {part.sender for part in self.parts if part.receiver == pair[1]}
        return Cells(self.cuts[pair[0]], self.joins[pair[1]].cells, links=len(senders))

    def sent_sum(self, sums: Sequence[Sequence[int]]) -> int:
        """The raw sum of a block at the sender, from [rank][cell] sums."""
        return joined_sum([sums[part.sender][part.sender_cell] for part in self.parts])

    def received_sum(self, sums: Sequence[Sequence[int]]) -> int:
        """The same at the receiver: equal if and only if, but for chance, all parts are."""
        return joined_sum([sums[part.receiver][part.receiver_cell] for part in self.parts])


WHOLE = PartPlan((Part(0, 0, 0, 0),))
"""From one rank to one rank."""


def plan_parts(senders: Sequence[BlockLayout], receivers: Sequence[BlockLayout]) -> PartPlan:
    """The parts of a block, from the layout of each rank.

    Raises:
        LayoutMismatch: blocks differ in more than their layers and heads, the senders lack some of these, or neither
            side's ranks hold a multiple of the other's heads.
    """
    _refuse_unlike([*senders, *receivers])
    shape = _cell_shape(senders, receivers)
    cuts, joins = (tuple(shape.grid(one) for one in ranks) for ranks in (senders, receivers))
    parts = []
    for number, receiver in enumerate(receivers):
        for cell in range(joins[number].cells):
            box = shape.box(receiver, cell)
            sender = _sender_of(box, number, senders)
            parts.append(Part(sender, shape.number(senders[sender], box), number, cell))
    return PartPlan(tuple(parts), cuts, joins)


class _Box(NamedTuple):
    """The layers and heads of a cell."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    def is_in(self, block: BlockLayout) -> bool:
        layers = block.first_layer <= self.first_layer and self.end_layer <= block.end_layer
        return layers and block.first_head <= self.first_head and self.end_head <= block.end_head


class _CellShape(NamedTuple):
    """Layers and heads of each cell; no layers: as many as the rank holds."""

    layers: int
    heads: int

    def grid(self, block: BlockLayout) -> Grid:
        return Grid(block.num_layers // (self.layers or block.num_layers), block.num_heads // self.heads)

    def box(self, block: BlockLayout, cell: int) -> _Box:
        layers, (row, column) = self.layers or block.num_layers, divmod(cell, self.grid(block).heads)
        layer, head = block.first_layer + row * layers, block.first_head + column * self.heads
        return _Box(layer, layer + layers, head, head + self.heads)

    def number(self, block: BlockLayout, box: _Box) -> int:
        """The cell of a rank's block."""
        row = (box.first_layer - block.first_layer) // (box.end_layer - box.first_layer)
        return row * self.grid(block).heads + (box.first_head - block.first_head) // self.heads


def _cell_shape(senders: Sequence[BlockLayout], receivers: Sequence[BlockLayout]) -> _CellShape:
    """Runs of heads that divide those of every rank, and runs of layers that end where any rank's layers do.

    Ranks whose layers are the same on both sides need no cut, however uneven their stages are.
    """
    held = {one.num_heads for one in (*senders, *receivers)}
    heads = min(held)
    if wrong := [one for one in sorted(held) if one % heads]:
        raise LayoutMismatch("heads of a rank", heads, wrong[0])
    stages = [{(one.first_layer, one.end_layer) for one in ranks} for ranks in (senders, receivers)]
    if stages[0] == stages[1]:
        return _CellShape(0, heads)
    ends = (place for one in (*senders, *receivers) for place in (one.first_layer, one.end_layer))
    return _CellShape(math.gcd(*ends), heads)


def joined_sum(sums: Sequence[int]) -> int:
    """The sum of a block from those of its parts. A change in one part always changes it; one part's is its own."""
    return sum(one * key for one, key in zip(sums, _part_keys(len(sums)), strict=True)) & MASK


@cache
def _part_keys(count: int) -> tuple[int, ...]:
    return (1, *(int(key) for key in odd_keys(FIRST_KEY, count - 1)))


def _sender_of(box: _Box, receiver: int, senders: Sequence[BlockLayout]) -> int:
    """The rank that sends a cell: the receiver's own number if it has it, else the holders take turns."""
    heads = box.end_head - box.first_head
    holders = [
        rank for rank, one in enumerate(senders) if box.is_in(one) and (box.first_head - one.first_head) % heads == 0
    ]
    if not holders:
        place = f"layers {box.first_layer} to {box.end_layer - 1} and heads {box.first_head} to {box.end_head - 1}"
        raise LayoutMismatch(f"ranks with {place}", "at least 1", 0)
    return receiver if receiver in holders else holders[receiver % len(holders)]


def _refuse_unlike(layouts: Sequence[BlockLayout]) -> None:
    first = layouts[0]
    for one in layouts[1:]:
        for field in ("block_size", "head_dim", "dtype"):
            if getattr(one, field) != getattr(first, field):
                raise LayoutMismatch(field, getattr(first, field), getattr(one, field))
