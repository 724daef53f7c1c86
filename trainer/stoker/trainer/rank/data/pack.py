"""Packing of documents into sequences of equal length: pure arithmetic on document lengths; no token is read.

A document of n tokens trains n - 1 positions (token i predicts token i + 1). A sequence holds spans of positions of
several documents, or of one document when packing is off; the rest is padding.

Called by `corpus` and the loader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """`length` consecutive positions of one document, from position `start` on. Its targets reach one token further."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Packing:
    """All spans, sequence by sequence: sequence i holds the spans `first[i]` to `first[i + 1] - 1`."""

    spans: Indices
    """[spans, 3]: document, start, length."""
    first: Indices
    """[sequences + 1]"""

    def __len__(self) -> int:
        return len(self.first) - 1

    def sequence(self, index: int) -> list[Span]:
        rows = self.spans[self.first[index] : self.first[index + 1]]
        return [Span(int(document), int(start), int(length)) for document, start, length in rows]


def pack(document_tokens: ArrayLike, whole: ArrayLike, sequence_length: int, *, several: bool) -> Packing:
    """Lay documents (given by their token counts) into sequences of `sequence_length` positions.

    With `several`, each span goes into the sequence that it fills best, longest spans first (best-fit decreasing: above
    99 % full on natural text); else every span gets a sequence of its own. A longer document is cut into spans of
    `sequence_length`; one that is marked in `whole` keeps only its first span. The result depends on the arguments
    alone.
    """
    spans = _spans(np.asarray(document_tokens, dtype=np.int64), np.asarray(whole, dtype=bool), sequence_length)
    if not several:
        return Packing(spans, np.arange(len(spans) + 1, dtype=np.int64))
    order = np.argsort(-spans[:, 2], kind="stable")
    sequences = _best_fit(spans[order, 2], sequence_length)
    first = np.concatenate([[0], np.cumsum(np.bincount(sequences))]).astype(np.int64)
    return Packing(spans[order[np.argsort(sequences, kind="stable")]], first)


def _spans(tokens: Indices, whole: NDArray[np.bool_], sequence_length: int) -> Indices:
    """[spans, 3]; documents in order, each from its beginning."""
    positions = np.maximum(tokens - 1, 0)
    counts = -(-positions // sequence_length)
    counts = np.where(whole, np.minimum(counts, 1), counts)
    document = np.repeat(np.arange(len(tokens)), counts)
    place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = place * sequence_length
    length = np.minimum(sequence_length, positions[document] - start)
    return np.stack([document, start, length], axis=1)


def _best_fit(lengths: Indices, sequence_length: int) -> Indices:
    """Sequence of each span;

    `lengths` fall. `rooms` has bit r set while an open sequence has exactly r positions left.
    """
    sequences = np.empty(len(lengths), dtype=np.int64)
    count = int((lengths == sequence_length).sum())  # these fill a sequence each
    sequences[:count] = np.arange(count)
    open_with: dict[int, list[int]] = {}
    rooms = 0
    for index in range(count, len(lengths)):
        length = int(lengths[index])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = open_with[room].pop()
            if not open_with[room]:
                rooms &= ~(1 << room)
        else:
            room, sequence, count = sequence_length, count, count + 1
        sequences[index] = sequence
        if room > length:
            open_with.setdefault(room - length, []).append(sequence)
            rooms |= 1 << (room - length)
    return sequences
