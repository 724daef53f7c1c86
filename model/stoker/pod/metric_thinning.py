"""Fewer points of a long history, with its extremes: what a picture of all points would show.

Steps fall into buckets of equal width. A bucket keeps the samples with the smallest and the largest value of each
column; the first and the last sample of all are kept beside them. The width doubles while more are kept than allowed.
The extremes of two buckets together are among the extremes of each, so a stream gives what the whole gives at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stoker.pod.metric_log import COLUMNS, Sample

FEWEST = 2 * len(COLUMNS) + 2
"""Points that a history is never thinned below."""
LAZY = 2
"""A bucket is cut to its extremes when it has so many times as many samples as it may keep."""

Values = dict[str, float]


@dataclass
class Thinner:
    """Keeps at most `most` points of what is added, in any order, each step once."""

    most: int
    width: int = 1
    buckets: dict[int, dict[int, Values]] = field(default_factory=dict)
    """Place of a bucket -> step -> values."""
    ends: dict[int, Values] = field(default_factory=dict)
    """The first and the last step."""
    kept: int = 0

    def __post_init__(self) -> None:
        if self.most < FEWEST:
            raise ValueError(f"max_points: at least {FEWEST} are needed, got {self.most}")

    def add(self, sample: Sample) -> None:
        """Add a sample. Raises ValueError for a negative step."""
        if sample.step < 0:
            raise ValueError(f"step: 0 or more is needed, got {sample.step}")
        self._add_end(sample)
        place = sample.step // self.width
        bucket = self.buckets.setdefault(place, {})
        bucket[sample.step] = sample.values
        self.kept += 1
        if self.width > 1 and len(bucket) > LAZY * FEWEST:
            self.kept -= len(bucket)
            self.buckets[place] = extremes(bucket)
            self.kept += len(self.buckets[place])
        if self.kept > (self.most if self.width == 1 else self.most - 2):  # at width 1 the ends are among them
            self._regroup(self.width)
            while self.kept > max(self.most // 4 * 3, FEWEST - 2):  # so that the next time is far away
                self._regroup(2 * self.width)

    def points(self) -> list[Sample]:
        """The kept points in the order of their steps."""
        found: dict[int, Values] = {}
        for bucket in self.buckets.values():
            for step, values in (bucket if self.width == 1 else extremes(bucket)).items():
                found[step] = values
        found |= self.ends
        return [Sample(step, found[step]) for step in sorted(found)]

    def _add_end(self, sample: Sample) -> None:
        steps = (*self.ends, sample.step)
        if sample.step in (min(steps), max(steps)):
            self.ends[sample.step] = sample.values
            self.ends = {step: self.ends[step] for step in (min(steps), max(steps))}

    def _regroup(self, width: int) -> None:
        """Put the samples into buckets of another width, each with its extremes alone."""
        found: dict[int, dict[int, Values]] = {}
        for bucket in self.buckets.values():
            for step, values in bucket.items():
                found.setdefault(step // width, {})[step] = values
        self.width = width
        self.buckets = found if width == 1 else {place: extremes(bucket) for place, bucket in found.items()}
        self.kept = sum(map(len, self.buckets.values()))


def extremes(bucket: Mapping[int, Values]) -> dict[int, Values]:
    """The samples with the smallest and the largest value of each column; of equal values the earlier step."""
    chosen: set[int] = set()
    for column in COLUMNS:
        having = sorted(step for step, values in bucket.items() if column in values)
        if having:
            chosen.add(min(having, key=lambda step: bucket[step][column]))
            chosen.add(max(having, key=lambda step: bucket[step][column]))
    return {step: bucket[step] for step in chosen}


def thinned(samples: Iterable[Sample], most: int) -> list[Sample]:
    """At most `most` points of the samples, which may come in any order.

    Raises:
        ValueError: `most` is below FEWEST.
    """
    thinner = Thinner(most)
    for sample in samples:
        thinner.add(sample)
    return thinner.points()
