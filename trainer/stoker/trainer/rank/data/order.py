"""The order of samples: a pure function of seed and index, so that no layout and no restart can change it.

Each source is walked epoch by epoch through a keyed permutation that is computed, not stored: any sample is found
without the earlier ones. The arithmetic is our own, not a library's generator, because a run must find the same order
after an upgrade.

Called by the loader.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 8


@dataclass(frozen=True)
class Sample:
    """One sample of the run: a sequence of one source."""

    source: int
    sequence: int


@dataclass(frozen=True)
class Order:
    """The endless sequence of samples. `sizes` counts the sequences of each source, `weights` are their shares."""

    seed: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    def samples(self, first: int, last: int) -> list[Sample]:
        """The samples `first` to `last - 1`, counted from the start of the run."""
        sources, ranks = mix(np.arange(first, last, dtype=np.int64), self.weights)
        sequences = np.zeros_like(ranks)
        for source, size in enumerate(self.sizes):
            chosen = sources == source
            sequences[chosen] = self._sequences(source, size, ranks[chosen])
        return [Sample(int(source), int(sequence)) for source, sequence in zip(sources, sequences, strict=True)]

    def drawn(self, samples: int) -> tuple[int, ...]:
        """The number of samples of each source among the first `samples` of the run."""
        left, found = samples, []
        shares = [Fraction(repr(weight)) for weight in self.weights]
        for source, weight in enumerate(shares):
            taken = math.floor(left * weight / sum(shares[source:], Fraction(0)))
            found.append(taken)
            left -= taken
        return tuple(found)

    def _sequences(self, source: int, size: int, ranks: Indices) -> Indices:
        found = np.empty_like(ranks)
        for epoch in np.unique(ranks // size):
            chosen = ranks // size == epoch
            key = f"{self.seed}/{self.names[source]}/{epoch}"
            found[chosen] = permute(ranks[chosen] % size, size, key)
        return found


def mix(samples: Indices, weights: Sequence[float]) -> tuple[Indices, Indices]:
    """The source of each sample, and the number of earlier samples of that source.

    Every stretch of the run holds each source's share: the first source takes sample n when `floor((n + 1) * share)`
    exceeds `floor(n * share)`, the others share the rest in the same way. Exact (rational numbers), so sample 10**12 is
    as right as sample 0.
    """
    sources = np.empty_like(samples)
    ranks = np.empty_like(samples)
    waiting = np.arange(len(samples))
    left = [int(sample) for sample in samples]
    shares = [Fraction(repr(weight)) for weight in weights]
    for source, weight in enumerate(shares):
        share = weight / sum(shares[source:], Fraction(0))
        before = [number * share.numerator // share.denominator for number in left]
        after = [(number + 1) * share.numerator // share.denominator for number in left]
        taken = np.array([low < high for low, high in zip(before, after, strict=True)], dtype=bool)
        sources[waiting[taken]] = source
        ranks[waiting[taken]] = np.array(before, dtype=np.int64)[taken]
        waiting = waiting[~taken]
        left = [n - b for n, b, done in zip(left, before, taken, strict=True) if not done]
    return sources, ranks


def permute(indices: Indices, size: int, key: str) -> Indices:
    """The image of each index under a keyed permutation of `0 .. size - 1`.

    A Feistel network on the next even power of two, repeated for results that fall outside (Black and Rogaway's cycle
    walking).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    values = _feistel(indices.astype(np.uint64), half_bits, keys)
    outside = values >= np.uint64(size)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _feistel(values: Words, half_bits: int, keys: Words) -> Words:
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    return (left << shift) | right


def _scramble(values: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(key: str) -> Words:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
