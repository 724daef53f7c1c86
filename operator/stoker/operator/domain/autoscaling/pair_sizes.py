"""The sizes of a prefill and a decode pool where not both can have what they need. Pure; called by `pair_review`.

Each pool's own need is the smallest number that meets its goals for the work that it was measured to get, so where both
can be had, no other pair of sizes is smaller. Where `max` or the nodes leave too little, the pools share: chosen is
the pair with the fewest GPUs that meets both goals with some of the work moved, and else the one that makes the larger
of both used shares smallest.

No pool gets fewer replicas here. Spare ones of a pool that is alike change their role (`role_flip`), and count as room;
one that its pool needs has nothing to gain, because it does the other pool's work where it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stoker.operator.domain.autoscaling.moved_work import PairWork

MOST_TRIED = 32
"""Sizes of the prefill pool that are tried at once; between those of larger pools the best is looked for again."""


@dataclass(frozen=True)
class Bounds:
    """One pool's sizes."""

    present: int
    most: int
    need: int
    """For its own work."""
    gpus: int = 1
    """Of a replica."""


@dataclass(frozen=True)
class PairRoom:
    """What two pools can have at once."""

    prefill: Bounds
    decode: Bounds
    beside: Sequence[int] | None = None
    """By the number of further prefill replicas: how many further decode replicas have room, too. None: not known;
    negative: so many of the present replicas wait for room."""
    flips: bool = False
    """Whether a replica can change its role."""

    @property
    def suffices(self) -> bool:
        """Whether both pools can have what they need."""
        return self.prefill.need <= self.prefill.most and self.decode.need <= self.most_decode(self.prefill.need)

    def most_decode(self, prefill: int) -> int:
        """The most decode replicas beside so many prefill replicas; negative where those have no room."""
        if self.beside is None:
            return self.decode.most
        return min(self.decode.most, self.decode.present + self._left(prefill - self.prefill.present))

    def _left(self, more: int) -> int:
        """Further decode replicas beside `more` prefill replicas; spare ones of either pool may change their role."""
        assert self.beside is not None
        if self.flips:
            return max(self.beside[0], 0) - more
        return max(self.beside[max(more, 0)], 0) if more < len(self.beside) else -self.decode.present - 1


@dataclass(frozen=True)
class PairSizes:
    """The chosen sizes."""

    prefill: int
    decode: int
    used: float
    """The larger of both pools' used shares."""
    asks: tuple[int, int] = (0, 0)
    """Of each pool the replica without room for which a node autoscaler may add a node; one of both at most."""


def choose_sizes(work: PairWork, room: PairRoom, share: float) -> PairSizes:
    """Choose the sizes, none below the present one.

    Args:
        share: of the goals, that the pools may use.
    """
    sizes = _best(work, replace(room, flips=False), share)
    return replace(sizes, asks=_asking(work, room, sizes))


def _asking(work: PairWork, room: PairRoom, sizes: PairSizes) -> tuple[int, int]:
    """The short pool that one more replica serves better; none where room is not known, or one waits for it already."""
    if room.beside is None or room.beside[0] < 0:
        return 0, 0
    pools = ((1, 0), room.prefill, sizes.prefill), ((0, 1), room.decode, sizes.decode)
    return min(
        (one for one, bounds, size in pools if size < min(bounds.need, bounds.most)),
        key=lambda one: work.used(sizes.prefill + one[0], sizes.decode + one[1]),
        default=(0, 0),
    )


def _best(work: PairWork, room: PairRoom, share: float) -> PairSizes:
    """The best sizes, by at most `MOST_TRIED` sizes of the prefill pool at a time."""
    tried = range(room.prefill.present, max(room.prefill.most, room.prefill.present) + 1)
    while True:
        stride = -(-len(tried) // MOST_TRIED)
        found = min(_candidates(work, room, share, tried[::stride]), key=lambda one: _cost(one, room, share))
        if stride == 1:
            return found
        place = tried.index(found.prefill)
        tried = tried[max(place - stride, 0) : place + stride + 1]


def _candidates(work: PairWork, room: PairRoom, share: float, sizes: Sequence[int]) -> Iterator[PairSizes]:
    """For each size of the prefill pool the fewest decode replicas that do as much for the goals as the most would."""
    present = room.decode.present
    for number, prefill in enumerate(sizes):
        most = room.most_decode(prefill)
        if most < present and number:
            return
        counts = range(present, max(most, present) + 1)
        chosen = _fewest_decode(work, max(share, work.used(prefill, counts[-1])), prefill, counts)
        yield PairSizes(prefill, chosen, work.used(prefill, chosen))


def _fewest_decode(work: PairWork, share: float, prefill: int, counts: range) -> int:
    """The first of the counts that uses no more than this share of the goals."""
    return counts[bisect_left(counts[:-1], True, key=lambda count: work.used(prefill, count) <= share)]


def _cost(found: PairSizes, room: PairRoom, share: float) -> tuple[float, int]:
    """What is met is met; then the fewest GPUs."""
    return max(found.used, share), found.prefill * room.prefill.gpus + found.decode * room.decode.gpus
