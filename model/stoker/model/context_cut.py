"""The cut of a micro-batch over the ranks of a context-parallel group, and the runs of attention that follow from it.

Tokens are cut into two pieces for each rank. Rank r of C has piece r and piece 2 C - 1 - r (head and tail): with causal
attention the first pieces cost least and the last ones most, so the ranks have equal work whatever the documents'
lengths are over the whole (Llama 3, arXiv 2407.21783, section 3.3.2). Documents are cut where a piece ends.

Pure; used by the trainer's data and by `context_attend`. T tokens of all ranks, C ranks.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.model.kernels.runs import Run


class Documents:
    """The bounds of packed documents, from 0 to T."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    def within(self, tokens: range) -> Iterator[tuple[int, range]]:
        """Yield (number, its tokens in the range) of each document that has some there, in order."""
        document = bisect.bisect_right(self.bounds, tokens.start) - 1
        while document + 1 < len(self.bounds) and self.bounds[document] < tokens.stop:
            begin, end = self.bounds[document : document + 2]
            held = range(max(begin, tokens.start), min(end, tokens.stop))
            if held:
                yield document, held
            document += 1


class SeenKeys(NamedTuple):
    """A run of queries with the tokens whose keys it needs."""

    run: Run
    tokens: range


@dataclass(frozen=True)
class ContextCut:
    """Raises ValueError with the arithmetic where the tokens cannot be shared equally."""

    num_tokens: int
    ranks: int

    def __post_init__(self) -> None:
        if self.num_tokens % self.ranks:
            raise ValueError(
                f"context: {self.num_tokens} tokens cannot be cut over {self.ranks} ranks: {self.num_tokens} % "
                f"{self.ranks} = {self.num_tokens % self.ranks}"
            )

    @property
    def tokens_per_rank(self) -> int:
        return self.num_tokens // self.ranks

    def pieces(self, rank: int) -> tuple[range, range]:
        """Return the tokens of a rank: head, then tail."""
        head = -(-self.tokens_per_rank // 2)
        tail = self.tokens_per_rank - head
        begin = self.num_tokens - (rank + 1) * tail
        return range(rank * head, (rank + 1) * head), range(begin, begin + tail)

    def tokens(self, rank: int) -> list[int]:
        """Return the tokens of a rank in its order."""
        return [token for piece in self.pieces(rank) for token in piece]

    def places(self) -> Tensor:
        """Return int64 [T]: where each token stands among the ranks' tokens laid end to end."""
        return places_of(self)

    def order(self) -> Tensor:
        """Return int64 [T]: the tokens in the order of the ranks; the inverse of `places`."""
        return order_of(self)

    def seen_keys(self, documents: Documents, rank: int, window: int | None) -> list[SeenKeys]:
        """Return the runs of a rank's queries, each with all keys that it sees, where every rank's keys are at hand."""
        found = []
        for piece in self.pieces(rank):
            for document, queries in documents.within(piece):
                first = documents.bounds[document]
                if window is not None:
                    first = max(first, queries.start - window + 1)
                run = Run(len(queries), queries.stop - first, queries.start - first)
                found.append(SeenKeys(run, range(first, queries.stop)))
        return found


def runs_between(documents: Documents, queries: range, keys: range) -> list[Run]:
    """Return the runs of a piece's queries over another piece's keys, or the same one's: one for each document.

    A document that only one of the pieces has is a run without queries or without keys.
    """
    asked, held = dict(documents.within(queries)), dict(documents.within(keys))
    found = []
    for document in sorted({*asked, *held}):
        q, k = asked.get(document, range(0)), held.get(document, range(0))
        found.append(Run(len(q), len(k), q.start - k.start if q and k else 0))
    return found


@lru_cache(maxsize=8)
def order_of(cut: ContextCut) -> Tensor:
    return torch.tensor([token for rank in range(cut.ranks) for token in cut.tokens(rank)])


@lru_cache(maxsize=8)
def places_of(cut: ContextCut) -> Tensor:
    order = cut.order()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places
