"""A histogram with geometric buckets that programs report and the operator subtracts and adds up.

Bucket k counts values in (1.1^(k-1), 1.1^k], so a quantile is known within 10 %, whatever the unit. Only buckets with
counts are stored and sent. Counters only grow: the difference of two reports is what happened between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

RATIO = 1.1
_LOG = math.log(RATIO)
SMALLEST = 1e-6
"""Smaller values, and zero, count as this."""


@dataclass
class Histogram:
    """Counts by bucket."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self.put(bucket_of(value), count)

    def put(self, bucket: int, count: int = 1) -> None:
        """Count `count` values of one bucket."""
        self.counts[bucket] = self.counts.get(bucket, 0) + count

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """The upper bound of the bucket with the `share` quantile; None of an empty histogram."""
        left = share * self.total
        for bucket, count in sorted(self.counts.items()):
            left -= count
            if left <= 0:
                return RATIO**bucket
        return None

    def share_within(self, value: float) -> float:
        """Share of values up to `value`, those of its own bucket in proportion; 1 of an empty histogram."""
        place = math.log(max(value, SMALLEST)) / _LOG
        within = sum(count * min(max(place - (bucket - 1), 0.0), 1.0) for bucket, count in self.counts.items())
        return within / self.total if self.counts else 1.0

    def moment(self, power: int = 1) -> float:
        """Mean of the values to a power, each taken as the middle of its bucket; 0 of an empty histogram."""
        total = self.total
        weighted = sum(count * _middle(bucket) ** power for bucket, count in self.counts.items())
        return weighted / total if total else 0.0

    def since(self, earlier: Histogram) -> Histogram:
        """What was counted after `earlier`."""
        return Histogram(
            {k: n - earlier.counts.get(k, 0) for k, n in self.counts.items() if n > earlier.counts.get(k, 0)}
        )

    def to_wire(self) -> dict[str, int]:
        """The form of a report: bucket -> count."""
        return {str(bucket): count for bucket, count in sorted(self.counts.items())}

    @classmethod
    def from_wire(cls, wire: Mapping[str, int]) -> Histogram:
        """Read `to_wire`.

        Raises:
            ValueError, TypeError: a key or a count is no integer.
        """
        return cls({int(bucket): int(count) for bucket, count in wire.items()})


def bucket_of(value: float) -> int:
    """The bucket that counts a value."""
    return math.ceil(math.log(max(value, SMALLEST)) / _LOG - 1e-9)


def merged(parts: Iterable[Histogram]) -> Histogram:
    """The sum of histograms."""
    counts: dict[int, int] = {}
    for part in parts:
        for bucket, count in part.counts.items():
            counts[bucket] = counts.get(bucket, 0) + count
    return Histogram(counts)


def _middle(bucket: int) -> float:
    return float(RATIO ** (bucket - 0.5))
