"""Optimizer state in host memory: the update streams it through windows on the device, in pieces.

Three streams work at the same time: one piece arrives, one is updated, one is written back. Pieces are read before the
update may begin: as many as there are windows, and those for which a bucket has spare memory. That is the part of its
gradient's sum that belongs to other ranks, which nothing reads once it is reduced. Those pieces arrive beside backward,
and leave last, beside the next passes, whose backward needs that memory again. The update itself runs beside the next
forward pass, which waits for each bucket at its first use. Nothing is delayed by a step, and the kernel is the one of
state on the device, so the bits are the same (Ren et al., ZeRO-Offload, 2021, computes on the host instead).

On a CPU the same pieces take the same way through the same windows, by plain copies. Masters of an fp32 run are its
weights: they stay on the device. `build` makes `OffloadedUpdate`; `zero` owns the host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.model.pinned import pinned_memory
from stoker.pod.plan.memory import OFFLOAD_WINDOWS
from stoker.trainer.rank.bucket import LINE, Bucket
from stoker.trainer.rank.communicator import DONE, Pending
from stoker.trainer.rank.copy_queues import Queues, queues_of
from stoker.trainer.rank.optimizer import EarlyPiece, HeldState, HostCopy, UpdateNumbers


def host_memory(values: Tensor) -> Tensor:
    """Return a copy in host memory, page-locked where a GPU copies it."""
    return pinned_memory(values.numel(), values.dtype).copy_(values) if values.is_cuda else values.clone()


def updated_here(device: torch.device) -> Pending:
    """What is queued in the current stream; waiting for it makes the stream that is then current wait."""
    if device.type != "cuda":
        return DONE
    event = torch.cuda.current_stream(device).record_event()
    return Pending(lambda: torch.cuda.current_stream(device).wait_event(event))


@dataclass(eq=False)
class Window:
    """Device memory for one piece of masters and moments."""

    tensors: tuple[Tensor, ...]
    free: Any = None
    """The event of the last copy out of it."""


@dataclass(frozen=True, eq=False)
class Leaving:
    """A piece that was updated in spare memory, before its way back."""

    tensors: tuple[Tensor, ...]
    host: tuple[Tensor, ...]
    copied: HostCopy


class PieceRule(Protocol):
    """What is done with a piece on the device."""

    def update_state(self, state: HeldState, numbers: UpdateNumbers) -> None:
        """Update any whole lines of a bucket's state."""
        ...


class OffloadedUpdate:
    """The update of state in host memory, piece by piece on the device."""

    def __init__(self, inner: PieceRule, device: torch.device, piece: int, queues: Queues | None = None) -> None:
        """`inner`: Adam's rule, or one pass of LAMB's. `piece`: elements that are copied and updated at once, a
        multiple of a line."""
        self._inner, self._device, self._piece = inner, device, piece
        self._queues = queues or queues_of(device)
        self._windows: list[Window] = []
        self._turn = 0

    def read_ahead(self, state: HeldState, spare: Sequence[Tensor], free: Pending) -> Sequence[EarlyPiece]:
        """Queue the read of a bucket's first pieces into spare memory.

        The memory must stay as it is until the state's `HostCopy` has ended, which is after the next update.

        Args:
            state: nothing of it is changed; the gradient need not be there yet.
            spare: fp32 runs of any length.
            free: makes the stream that is then current wait until the memory may be written.
        """
        rows, found, begin = len(offloaded(state)), [], 0
        for tensors in spare_windows(spare, rows, state.master.numel(), self._piece):
            own = slice(begin, begin + tensors[0].numel())
            found.append((tensors, tuple(values[own] for values in offloaded(state))))
            begin = own.stop
        if not found:
            return ()
        copied = state.copied
        assert copied is not None, "the state is in host memory"
        with self._queues.inside(self._queues.arriving):
            free.wait()
            self._queues.wait(copied.event)
        early = [EarlyPiece(tensors, self._load(tensors, host)) for tensors, host in found]
        copied.event = early[-1].arrived
        return early

    @contextmanager
    def updating(self, scale: Tensor) -> Iterator[None]:
        """Kernels inside are queued where updates run. `scale`: a tensor that they read."""
        with self._queues.update_after_current(scale):
            yield

    def update(self, states: Iterable[HeldState], numbers: UpdateNumbers, updated: Callable[[Bucket], None]) -> None:
        """See `Optimizer`. The host memory holds the result when the state's `HostCopy` has ended."""
        leaving: list[Leaving] = []
        with self.updating(numbers.scale):
            for state in states:
                leaving += self._update_bucket(state, numbers)
                updated(state.bucket)
        for item in reversed(leaving):  # backward needs the memory of the last bucket first
            item.copied.event = self._store(item.tensors, item.host)

    def _update_bucket(self, state: HeldState, numbers: UpdateNumbers) -> list[Leaving]:
        copied = state.copied
        assert copied is not None, "the state is in host memory"
        before, begin, leaving = copied.event, 0, []
        for early in state.early:
            piece = piece_of(state, begin, early.tensors[0].numel())
            begin += early.tensors[0].numel()
            self._queues.wait(early.arrived)
            self._update_there(piece, early.tensors, numbers)
            leaving.append(Leaving(early.tensors, offloaded(piece), copied))
        for piece in pieces_of(state, self._piece, begin):
            self._through_window(piece, numbers, before)
        return leaving

    def update_piece(self, piece: HeldState, numbers: UpdateNumbers) -> None:
        """Queue the update of one piece in host memory, inside of `updating`."""
        assert piece.copied is not None, "the state is in host memory"
        self._through_window(piece, numbers, piece.copied.event)

    def _through_window(self, piece: HeldState, numbers: UpdateNumbers, before: Any) -> None:
        """`before`: the event after which the host memory may be read: not that of this update's other pieces."""
        host = offloaded(piece)
        window = self._next_window(len(host))
        tensors = tuple(place[: piece.master.numel()] for place in window.tensors)
        with self._queues.inside(self._queues.arriving):
            self._queues.wait(window.free)
            self._queues.wait(before)
        self._queues.wait(self._load(tensors, host))
        self._update_there(piece, tensors, numbers)
        assert piece.copied is not None
        window.free = piece.copied.event = self._store(tensors, host)

    def _update_there(self, piece: HeldState, tensors: tuple[Tensor, ...], numbers: UpdateNumbers) -> None:
        *masters, exp_avg, exp_avg_sq = tensors
        master = masters[0] if masters else piece.master
        self._inner.update_state(replace(piece, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq), numbers)

    def _load(self, tensors: tuple[Tensor, ...], host: tuple[Tensor, ...]) -> Any:
        """Queue the copy of a piece to the device; return its event."""
        with self._queues.inside(self._queues.arriving):
            for place, values in zip(tensors, host, strict=True):
                self._queues.copy(place, values)
            return self._queues.mark()

    def _store(self, tensors: tuple[Tensor, ...], host: tuple[Tensor, ...]) -> Any:
        """Queue the copy of a piece back behind the updates so far; return its event."""
        with self._queues.inside(self._queues.updates):
            updated = self._queues.mark()
        with self._queues.inside(self._queues.leaving):
            self._queues.wait(updated)
            for place, values in zip(tensors, host, strict=True):
                self._queues.copy(values, place)
            return self._queues.mark()

    def _next_window(self, tensors: int) -> Window:
        if not self._windows:
            shape = OFFLOAD_WINDOWS, tensors, self._piece
            memory = torch.empty(shape, dtype=torch.float32, device=self._device)
            made = self._queues.mark()
            self._windows = [Window(tuple(window.unbind(0)), made) for window in memory]
        self._turn = (self._turn + 1) % len(self._windows)
        return self._windows[self._turn]


def spare_windows(spare: Sequence[Tensor], rows: int, numel: int, piece: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield windows of `rows` tensors in spare memory, whole lines of at most `piece` elements, `numel` in sum."""
    for memory in spare:
        length = min(memory.numel() // rows // LINE * LINE, numel)
        numel -= length
        for begin in range(0, length, piece):
            size = min(piece, length - begin)
            yield memory[rows * begin : rows * (begin + size)].view(rows, size).unbind(0)


def offloaded(state: HeldState) -> tuple[Tensor, ...]:
    """What of the state is in host memory: moments, and masters that are not the weights themselves."""
    moments = state.exp_avg, state.exp_avg_sq
    return moments if state.parameters is None else (state.master, *moments)


def pieces_of(state: HeldState, size: int, begin: int = 0) -> Iterator[HeldState]:
    """Yield runs of at most `size` elements, from element `begin` on."""
    for first in range(begin, state.master.numel(), size):
        yield piece_of(state, first, size)


def piece_of(state: HeldState, begin: int, size: int) -> HeldState:
    """Return the run of at most `size` elements from `begin` on."""
    own = slice(begin, begin + size)
    return replace(
        state,
        start=state.start + begin,
        master=state.master[own],
        gradient=state.gradient[own],
        exp_avg=state.exp_avg[own],
        exp_avg_sq=state.exp_avg_sq[own],
        parameters=None if state.parameters is None else state.parameters[own],
        early=(),
    )
