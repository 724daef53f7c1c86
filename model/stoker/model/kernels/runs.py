"""Runs of queries that each attend to a run of keys: attention where a rank has a part of the tokens.

T queries, L keys, R runs. Made once per pass by `context_cut`; read by the attention kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.model.kernels.sequences import upload


class Run(NamedTuple):
    """Query i of the run stands `distance + i` tokens behind the run's first key, and sees no key behind itself."""

    queries: int
    keys: int
    distance: int


@dataclass(frozen=True)
class AttentionRuns:
    """All runs of one pass: their queries lie one after another, and so do their keys."""

    runs: tuple[Run, ...]
    query_start: Tensor
    """int32 [R + 1] on the device: where the queries of each run begin, and the end."""
    key_start: Tensor
    """int32 [R + 1]: the same of the keys."""
    distances: Tensor
    """int32 [R]."""

    @property
    def num_queries(self) -> int:
        return sum(run.queries for run in self.runs)

    @property
    def num_keys(self) -> int:
        return sum(run.keys for run in self.runs)

    def slices(self) -> Iterator[tuple[slice, slice, int]]:
        """Yield the queries, the keys and the distance of each run that has both."""
        query = key = 0
        for run in self.runs:
            if run.queries and run.keys:
                yield slice(query, query + run.queries), slice(key, key + run.keys), run.distance
            query, key = query + run.queries, key + run.keys


def pack_runs(runs: Sequence[Run], device: torch.device | str | None = None) -> AttentionRuns:
    """Bring the numbers of the runs to the device, without a wait."""

    def tensor(numbers: Iterator[int]) -> Tensor:
        return upload(torch.tensor(list(numbers), dtype=torch.int32), device)

    return AttentionRuns(
        tuple(runs),
        tensor(itertools.accumulate((run.queries for run in runs), initial=0)),
        tensor(itertools.accumulate((run.keys for run in runs), initial=0)),
        tensor(run.distance for run in runs),
    )
