"""Laying documents into sequences of equal length: pure arithmetic on document lengths, no token is read here.

A document of n tokens trains n - 1 positions (token i predicts token i + 1). A sequence holds spans of positions of several documents,
or of one document when packing is off; what no span fills is padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Span:
    """`length` consecutive positions of one document, from position `start` on. Its targets reach one token further."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Packing:
    """All spans, sequence by sequence: sequence i holds the spans `first[i]` to `first[i + 1] - 1`."""

    spans: NDArray[np.int64]
    """[spans, 3]: document, start, length."""
    first: NDArray[np.int64]
    """[sequences + 1]"""

    def __len__(self) -> int:
        return len(self.first) - 1

    def sequence(self, index: int) -> list[Span]:
        rows = self.spans[self.first[index] : self.first[index + 1]]
        return [Span(int(document), int(start), int(length)) for document, start, length in rows]


def pack(document_tokens: Iterable[int], whole: Iterable[int], sequence_length: int, *, several: bool) -> Packing:
    """Lay documents (given by their token counts) into sequences of `sequence_length` positions.

    With `several`, each span goes into the sequence that it fills best, longest spans first (best-fit decreasing: above 99 % full on
    natural text); else every span gets a sequence of its own. A longer document is cut into spans of `sequence_length`; one that is
    marked in `whole` keeps only its first span. The result depends on the arguments alone.
    """
    spans = list(_spans(document_tokens, whole, sequence_length))
    sequences = _best_fit(spans, sequence_length) if several else [[index] for index in range(len(spans))]
    rows = [spans[index] for sequence in sequences for index in sequence]
    first = np.cumsum([0, *(len(sequence) for sequence in sequences)], dtype=np.int64)
    return Packing(np.array(rows, dtype=np.int64).reshape(-1, 3), first)


def _spans(
    document_tokens: Iterable[int], whole: Iterable[int], sequence_length: int
) -> Iterator[tuple[int, int, int]]:
    for document, (tokens, only_first) in enumerate(zip(document_tokens, whole, strict=True)):
        for start in range(0, tokens - 1, sequence_length):
            yield document, start, min(sequence_length, tokens - 1 - start)
            if only_first:
                break


def _best_fit(spans: list[tuple[int, int, int]], sequence_length: int) -> list[list[int]]:
    """Span indices per sequence. `rooms` has bit r set while an open sequence has exactly r positions left."""
    sequences: list[list[int]] = []
    open_with: dict[int, list[int]] = {}
    rooms = 0
    for index in sorted(range(len(spans)), key=lambda i: (-spans[i][2], i)):
        length = spans[index][2]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = open_with[room].pop()
            if not open_with[room]:
                rooms &= ~(1 << room)
            sequences[sequence].append(index)
        else:
            room, sequence = sequence_length, len(sequences)
            sequences.append([index])
        if room > length:
            open_with.setdefault(room - length, []).append(sequence)
            rooms |= 1 << (room - length)
    return sequences
