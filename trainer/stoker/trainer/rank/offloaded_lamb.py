"""LAMB on state in host memory or in a file: two passes over its pieces, as `offload` and `disk_update` stream them.

The first pass updates the moments and notes the squares of each line of weights and direction. From these come the
norms of whole tensors, in the order of state on the device, so the bits are the same. The second pass makes the
direction again and applies it. `build` makes `OffloadedLamb`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.communicator import Pending
from stoker.trainer.rank.copy_queues import Queues
from stoker.trainer.rank.lamb import Lamb
from stoker.trainer.rank.offload import OffloadedUpdate
from stoker.trainer.rank.optimizer import EarlyPiece, HeldState, UpdateNumbers

Lines = dict[int, list[list[Tensor]]]
"""Id of a bucket -> squares of the lines of each of its tensors, in pieces."""
Pass = Callable[[HeldState, UpdateNumbers], None]


class CurrentPass:
    """What the streams do with each piece."""

    def __init__(self) -> None:
        self.run: Pass = no_pass

    def update_state(self, piece: HeldState, numbers: UpdateNumbers) -> None:
        self.run(piece, numbers)


class Streams(Protocol):
    """Streams the pieces of all state through a `CurrentPass`."""

    def update(self, states: Iterable[HeldState], numbers: UpdateNumbers, updated: Callable[[Bucket], None]) -> None:
        """See `Optimizer`."""
        ...


class OffloadedLamb:
    """LAMB on state that is not on the device."""

    def __init__(self, inner: Lamb, current: CurrentPass, streams: Streams, queues: Queues) -> None:
        """`streams` were made for `current` and `queues`."""
        self._inner, self._current, self._streams, self._queues = inner, current, streams, queues

    def read_ahead(self, state: HeldState, spare: Sequence[Tensor], free: Pending) -> Sequence[EarlyPiece]:
        """See `OffloadedUpdate`. From a file nothing is read into spare memory."""
        return self._streams.read_ahead(state, spare, free) if isinstance(self._streams, OffloadedUpdate) else ()

    def update(self, states: Iterable[HeldState], numbers: UpdateNumbers, updated: Callable[[Bucket], None]) -> None:
        """See `Optimizer`. What is on the way when it returns goes on beside the next passes."""
        held = list(states)
        cells = self._update_moments(held, numbers)
        rates = self._inner.rates(held, cells, numbers)
        self._apply([replace(state, early=()) for state in held], rates, numbers, updated)

    def _update_moments(self, held: Sequence[HeldState], numbers: UpdateNumbers) -> list[Tensor]:
        """Run the first pass; return the partial sums, which what is queued from now on may read."""
        device = numbers.scale.device
        sizes = [self._inner.num_cells(state.bucket) for state in held]
        cells = torch.zeros(sum(sizes), 2, dtype=torch.float64, device=device)
        lines: Lines = {}
        self._current.run = partial(self._note_lines, lines)
        self._streams.update(held, numbers, lambda _bucket: None)
        with self._queues.inside(self._queues.updates):
            cells.copy_(torch.cat([self._inner.cells(state, lines[id(state.bucket)]) for state in held]))
            done = self._queues.mark()
        self._queues.wait(done)
        return list(torch.split(cells, sizes))

    def _note_lines(self, lines: Lines, piece: HeldState, numbers: UpdateNumbers) -> None:
        found = self._inner.update_moments(piece, numbers)
        of_bucket = lines.setdefault(id(piece.bucket), [[] for _ in found])
        for tensor, own in zip(of_bucket, found, strict=True):
            tensor.append(own)

    def _apply(
        self,
        held: Sequence[HeldState],
        rates: Sequence[Tensor],
        numbers: UpdateNumbers,
        updated: Callable[[Bucket], None],
    ) -> None:
        """Run the second pass. As its `scale` the rates live until the streams have read them."""
        whole = torch.cat(list(rates))
        parts = torch.split(whole, [len(own) for own in rates])
        self._current.run = partial(
            self._apply_piece, {id(state.bucket): own for state, own in zip(held, parts, strict=True)}
        )
        self._streams.update(held, replace(numbers, scale=whole), updated)

    def _apply_piece(self, rates: Mapping[int, Tensor], piece: HeldState, numbers: UpdateNumbers) -> None:
        self._inner.apply(piece, rates[id(piece.bucket)], numbers)


def no_pass(_piece: HeldState, _numbers: UpdateNumbers) -> None:
    raise AssertionError("no pass has begun")
