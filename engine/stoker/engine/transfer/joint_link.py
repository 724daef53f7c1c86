"""A link to an engine of several ranks, from one or several: one write goes by the links of all pairs of ranks, and has
ended when all of its parts have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stoker.engine.transfer.part_plan import PartPlan
from stoker.engine.transfer.port import MOST_MOVES, Link, Move
from stoker.engine.transfer.ticket import LinkMeter, Ticket, TransferError

Pair = tuple[int, int]
"""(rank of the sender, rank of the receiver)."""


def pairs_of(plan: PartPlan) -> list[Pair]:
    """The ranks between which something travels."""
    return list(dict.fromkeys((part.sender, part.receiver) for part in plan.parts))


def batched(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """Yield as many as one write may have."""
    for first in range(0, len(moves), MOST_MOVES):
        yield moves[first : first + MOST_MOVES]


class JointTicket:
    """One transfer in parts."""

    def __init__(self, parts: Sequence[Ticket]) -> None:
        self.parts = parts
        self.bytes = sum(part.bytes for part in parts)

    @property
    def seconds(self) -> float:
        return max(part.seconds for part in self.parts)

    def done(self) -> bool:
        """Whether all parts have ended: until then some rank may still read or write its blocks."""
        return all(part.done() for part in self.parts)

    def wait(self, timeout_s: float | None = None) -> bool:
        return all(part.wait(timeout_s) for part in self.parts)

    def error(self) -> TransferError | None:
        """The error of any part; None while one is under way."""
        return next((error for part in self.parts if (error := part.error())), None) if self.done() else None

    def cancel(self) -> None:
        for part in self.parts:
            part.cancel()


class JointLink:
    """The links of all pairs of ranks as one. Its moves name runs of tokens, which are blocks and slots where those of
    both sides have the same size."""

    def __init__(self, plan: PartPlan, links: Mapping[Pair, Link]) -> None:
        self._plan, self._links = plan, links
        self.meter = LinkMeter()
        self.transport = ",".join(sorted({link.transport for link in links.values()}))
        """What its parts use; several names where they differ."""

    @property
    def lost(self) -> str | None:
        return next((why for link in self._links.values() if (why := link.lost)), None)

    def write(self, moves: Sequence[Move], tag: bytes) -> JointTicket:
        """Begin the writes of all pairs, each in as many as it takes."""
        parts = ((link, self._plan.moves(pair, moves)) for pair, link in self._links.items())
        return JointTicket([link.write(some, tag) for link, own in parts for some in batched(own)])

    def close(self) -> None:
        for link in self._links.values():
            link.close()
