"""How a block travels between engines of several ranks: which rank sends which layers and heads to which rank, and one
checksum over all of it.

Every rank holds some layers and some heads of each block. A block is cut into equal cells, runs of layers and heads
that one rank of either side holds as a whole. Where both sides have the same ranks a cell is a rank's whole block, and
it goes to the rank of the same number. A sender with fewer ranks cuts its blocks, a receiver with fewer joins what it
gets. Where the two have blocks of different sizes, both cut them into runs of as many tokens as divide both sizes: a
block of the receiver is made of runs that lie in one or several blocks of the sender. Pure; `cells` moves bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from stoker.engine.transfer.checksum import MASK, odd_keys
from stoker.engine.transfer.layout import ONE_CELL, BlockLayout, Grid
from stoker.engine.transfer.port import Cells, LayoutMismatch, Move

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


class TokenRuns(NamedTuple):
    """Into how many runs of equally many tokens a block is cut."""

    sender: int = 1
    receiver: int = 1


WHOLE_BLOCKS = TokenRuns()


@dataclass(frozen=True)
class PartPlan:
    """The parts of every run of tokens that one engine sends to another, in the order of the receiver's ranks.

    The cells of `parts` are runs of layers and heads; the grids cut each of them into runs of tokens, too.
    """

    parts: tuple[Part, ...]
    cuts: tuple[Grid, ...] = (ONE_CELL,)
    """Cells of a block of each sender."""
    joins: tuple[Grid, ...] = (ONE_CELL,)
    """Cells of a block of each receiver."""
    tokens: TokenRuns = WHOLE_BLOCKS

    @property
    def repacks(self) -> bool:
        """Whether the two sides hold different layers, heads or tokens."""
        return any(grid.cells > 1 for grid in (*self.cuts, *self.joins))

    def cells(self, pair: tuple[int, int]) -> Cells:
        """How the link from a sender to a receiver cuts and joins."""
        senders = {part.sender for part in self.parts if part.receiver == pair[1]}
        return Cells(self.cuts[pair[0]], self.joins[pair[1]].cells, links=len(senders))

    def runs(self, place: int, table: Sequence[int]) -> list[int]:
        """The sender's runs that are a block of the receiver, by its index in the request: `block * runs + number`.

        `table`: the sender's blocks of the request.
        """
        sender, receiver = self.tokens
        return [table[run // sender] * sender + run % sender for run in range(place * receiver, (place + 1) * receiver)]

    def moves(self, pair: tuple[int, int], moves: Sequence[Move]) -> list[Move]:
        """The moves of cells between two ranks, for moves of runs."""
        own = [part for part in self.parts if (part.sender, part.receiver) == pair]
        return [
            Move(self._sent_cell(part, run), self._received_cell(part, slot), generation)
            for run, slot, generation in moves
            for part in own
        ]

    def sent_sums(self, blocks: Sequence[Sequence[int]], by_rank: Sequence[Sequence[int]]) -> list[int]:
        """The raw sums of the receiver's blocks at the sender.

        Args:
            blocks: the runs of each, as `runs`.
            by_rank: sums of the cells of `self.sources(blocks)`, one block after the other.
        """
        places = {block: place for place, block in enumerate(self.sources(blocks))}
        sender = self.tokens.sender
        moved = [[places[run // sender] * sender + run % sender for run in runs] for runs in blocks]
        return [
            joined_sum([by_rank[part.sender][self._sent_cell(part, run)] for part in self.parts for run in runs])
            for runs in moved
        ]

    def sources(self, blocks: Sequence[Sequence[int]]) -> list[int]:
        """The sender's blocks that hold these runs, each once."""
        return list(dict.fromkeys(run // self.tokens.sender for runs in blocks for run in runs))

    def received_sums(self, by_rank: Sequence[Sequence[int]]) -> list[int]:
        """The sums at the receiver: equal to those at the sender if and only if, but for chance, all parts are.

        `by_rank`: sums of the cells of each rank's blocks, one block after the other.
        """
        receiver = self.tokens.receiver
        count = len(by_rank[0]) // self.joins[0].cells
        return [
            joined_sum(
                [
                    by_rank[part.receiver][self._received_cell(part, block * receiver + number)]
                    for part in self.parts
                    for number in range(receiver)
                ]
            )
            for block in range(count)
        ]

    def _sent_cell(self, part: Part, run: int) -> int:
        return _cell_of_run(run, self.tokens.sender, self.cuts[part.sender], part.sender_cell)

    def _received_cell(self, part: Part, run: int) -> int:
        return _cell_of_run(run, self.tokens.receiver, self.joins[part.receiver], part.receiver_cell)


def _cell_of_run(run: int, runs: int, grid: Grid, cell: int) -> int:
    """The cell of a run of tokens: `block * grid.cells + number`. `cell`: of layers and heads."""
    block, number = divmod(run, runs)
    return block * grid.cells + cell * runs + number


WHOLE = PartPlan((Part(0, 0, 0, 0),))
"""From one rank to one rank, with blocks of the same size."""


def plan_parts(senders: Sequence[BlockLayout], receivers: Sequence[BlockLayout]) -> PartPlan:
    """The parts of a block, from the layout of each rank.

    Raises:
        LayoutMismatch: blocks differ in more than their layers, heads and tokens, the senders lack some layers or
            heads, or neither side's ranks hold a multiple of the other's heads.
    """
    _refuse_unlike([*senders, *receivers], ("head_dim", "dtype"))
    for ranks in (senders, receivers):
        _refuse_unlike(ranks, ("block_size",))
    shape = _cell_shape(senders, receivers)
    cuts, joins = (tuple(shape.grid(one) for one in ranks) for ranks in (senders, receivers))
    parts = []
    for number, receiver in enumerate(receivers):
        for cell in range(joins[number].cells // shape.runs(receiver)):
            box = shape.box(receiver, cell)
            sender = _sender_of(box, number, senders)
            parts.append(Part(sender, shape.number(senders[sender], box), number, cell))
    return PartPlan(tuple(parts), cuts, joins, TokenRuns(shape.runs(senders[0]), shape.runs(receivers[0])))


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
    """Layers, heads and tokens of each cell; no layers: as many as the rank holds."""

    layers: int
    heads: int
    tokens: int

    def grid(self, block: BlockLayout) -> Grid:
        layers, heads = block.num_layers // (self.layers or block.num_layers), block.num_heads // self.heads
        return Grid(layers, heads, self.runs(block))

    def runs(self, block: BlockLayout) -> int:
        return block.block_size // self.tokens

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
    heads, tokens = min(held), math.gcd(senders[0].block_size, receivers[0].block_size)
    if wrong := [one for one in sorted(held) if one % heads]:
        raise LayoutMismatch("heads of a rank", heads, wrong[0])
    stages = [{(one.first_layer, one.end_layer) for one in ranks} for ranks in (senders, receivers)]
    if stages[0] == stages[1]:
        return _CellShape(0, heads, tokens)
    ends = (place for one in (*senders, *receivers) for place in (one.first_layer, one.end_layer))
    return _CellShape(math.gcd(*ends), heads, tokens)


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


def _refuse_unlike(layouts: Sequence[BlockLayout], fields: Sequence[str]) -> None:
    first = layouts[0]
    for one in layouts[1:]:
        for field in fields:
            if getattr(one, field) != getattr(first, field):
                raise LayoutMismatch(field, getattr(first, field), getattr(one, field))
