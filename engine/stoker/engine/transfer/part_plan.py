"""How a block travels between engines of several ranks: which rank sends which heads to which rank, and one checksum
over all of it.

Every rank holds some heads of each block. A block is cut into cells, runs of heads that one rank of either side holds
as a whole. Where both sides have as many ranks a cell is a rank's whole block, and it goes to the rank of the same
number. A sender with fewer ranks cuts its blocks, a receiver with fewer joins what it gets. Pure; `cells` moves bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from stoker.engine.transfer.checksum import MASK, odd_keys
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.port import LayoutMismatch

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
    cuts: int = 1
    """Cells of a sender's block."""
    joins: int = 1
    """Cells of a receiver's block."""

    @property
    def repacks(self) -> bool:
        """Whether the two sides hold different heads."""
        return self.cuts > 1 or self.joins > 1

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
        LayoutMismatch: blocks differ in more than their heads, or neither side's ranks hold a multiple of the other's.
    """
    _refuse_unlike([*senders, *receivers])
    sent, received = senders[0].num_heads, receivers[0].num_heads
    cell = min(sent, received)
    if max(sent, received) % cell:
        raise LayoutMismatch("heads of a rank", received, sent)
    parts = []
    for number, receiver in enumerate(receivers):
        for place in range(received // cell):
            first = receiver.first_head + place * cell
            sender = _sender_of(first, cell, number, senders)
            parts.append(Part(sender, (first - senders[sender].first_head) // cell, number, place))
    return PartPlan(tuple(parts), sent // cell, received // cell)


def joined_sum(sums: Sequence[int]) -> int:
    """The sum of a block from those of its parts. A change in one part always changes it; one part's is its own."""
    return sum(one * key for one, key in zip(sums, _part_keys(len(sums)), strict=True)) & MASK


@cache
def _part_keys(count: int) -> tuple[int, ...]:
    return (1, *(int(key) for key in odd_keys(FIRST_KEY, count - 1)))


def _sender_of(first_head: int, num_heads: int, receiver: int, senders: Sequence[BlockLayout]) -> int:
    """The rank that sends these heads: the receiver's own number if it has them, else the holders take turns."""
    holders = [
        rank for rank, one in enumerate(senders)
        if one.first_head <= first_head and first_head + num_heads <= one.end_head
        and (first_head - one.first_head) % num_heads == 0
    ]  # fmt: skip
    if not holders:
        raise LayoutMismatch(f"ranks with heads {first_head} to {first_head + num_heads - 1}", "at least 1", 0)
    return receiver if receiver in holders else holders[receiver % len(holders)]


def _refuse_unlike(layouts: Sequence[BlockLayout]) -> None:
    first = layouts[0]
    for one in layouts[1:]:
        for field in ("block_size", "first_layer", "end_layer", "head_dim", "dtype"):
            if getattr(one, field) != getattr(first, field):
                raise LayoutMismatch(field, getattr(first, field), getattr(one, field))
