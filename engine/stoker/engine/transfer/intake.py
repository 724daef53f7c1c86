"""The way of announced blocks from the landing zone into the cache: copied, compared, and only then handed on.

On a GPU a copy ends after the call that begins it: `settled` compares what has been copied meanwhile.

The sum is that of what was stored in the cache, so damage at any point before it is found. A damaged block is asked for
once more; damaged again, it is given up, and its receiver computes from there on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from stoker.engine.transfer.checksum import raw_sums, seeded
from stoker.engine.transfer.landing_zone import BlockRefused, Grant, LandingZone, Owner


class Sums(Protocol):
    """Raw sums of blocks, which a device may still be computing."""

    def done(self) -> bool:
        """Whether they are there. Does not wait."""
        ...

    def values(self) -> Sequence[int]:
        """In the order in which the blocks were named; waits for them."""
        ...


class ReadySums(list[int]):
    """Sums that are there."""

    def done(self) -> bool:
        return True

    def values(self) -> Sequence[int]:
        return self


CopyAndSum = Callable[[Sequence[int], Sequence[int]], Sums]
"""(slots, cache blocks) -> raw sums of what was stored. What is computed after the call comes after the copies."""


class Announcement(NamedTuple):
    """A block that its writer says is there."""

    place: int
    """Index in the request, in blocks."""
    grant: Grant
    sum: int
    """As the sender computed it, seeded."""


@dataclass
class Taken:
    """What became of announced blocks."""

    sound: list[int] = field(default_factory=list)
    """Indices of blocks that are in the cache and may be used."""
    again: list[tuple[int, Grant]] = field(default_factory=list)
    """Damaged blocks (index, new grant) that the writer is asked for once more."""
    lost: list[int] = field(default_factory=list)
    """Indices of blocks that were damaged twice."""
    refused: list[BlockRefused] = field(default_factory=list)


class Intake:
    """One request's blocks on their way into the cache."""

    def __init__(
        self, zone: LandingZone, owner: Owner, copy_and_sum: CopyAndSum,
        target: Callable[[int], int], seed: Callable[[int], int],
    ) -> None:  # fmt: skip
        """`target` and `seed`: the cache block and the seed of the block with an index."""
        self.zone, self.owner, self.copy_and_sum = zone, owner, copy_and_sum
        self.target, self.seed = target, seed
        self._tried: set[int] = set()
        self._copying: deque[tuple[list[Announcement], Sums]] = deque()

    @property
    def copying(self) -> bool:
        """Whether copies are under way whose blocks are not compared yet."""
        return bool(self._copying)

    def take(self, announced: Sequence[Announcement], now_s: float) -> Taken:
        """Begin to copy the announced blocks; compare those whose copies have ended."""
        taken = Taken()
        ready = [one for one in announced if self._is_ready(one, now_s, taken)]
        if ready:
            for one in ready:
                self.zone.begin_copy(one.grant)
            places = [one.grant.slot for one in ready], [self.target(one.place) for one in ready]
            self._copying.append((ready, self.copy_and_sum(*places)))
        return self.settled(now_s, taken)

    def settled(self, now_s: float, taken: Taken | None = None) -> Taken:
        """Compare the blocks whose copies have ended."""
        taken = Taken() if taken is None else taken
        while self._copying and self._copying[0][1].done():
            copied, sums = self._copying.popleft()
            for one, raw in zip(copied, sums.values(), strict=True):
                if self.zone.end_copy(one.grant):  # else the request has gone, and with it the cache block
                    self._compare(one, int(raw), now_s, taken)
        return taken

    def _is_ready(self, one: Announcement, now_s: float, taken: Taken) -> bool:
        try:
            self.zone.announce(one.grant, self.owner, now_s)
        except BlockRefused as refused:
            taken.refused.append(refused)
            return False
        return True

    def _compare(self, one: Announcement, raw: int, now_s: float, taken: Taken) -> None:
        if seeded(raw, self.seed(one.place)) == one.sum:
            self.zone.free(one.grant)
            taken.sound.append(one.place)
            return
        again = self.zone.grant_again(one.grant, now_s)
        if one.place not in self._tried:
            self._tried.add(one.place)
            taken.again.append((one.place, again))
            return
        self.zone.announce(again, self.owner, now_s)
        self.zone.begin_copy(again)
        self.zone.end_copy(again)
        self.zone.free(again)
        taken.lost.append(one.place)


def host_copy(zone_SN: np.ndarray, cache_BN: np.ndarray) -> Callable[[Sequence[int], Sequence[int]], ReadySums]:
    """Copy between arrays of bytes in this process."""

    def copy(slots: Sequence[int], blocks: Sequence[int]) -> ReadySums:
        for slot, block in zip(slots, blocks, strict=True):
            cache_BN[block] = zone_SN[slot]
        return ReadySums(int(raw_sums(cache_BN[block : block + 1])[0]) for block in blocks)

    return copy
