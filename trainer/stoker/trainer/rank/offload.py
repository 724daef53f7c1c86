"""Optimizer state in host memory: the update streams it through a few windows on the device, in pieces.

Three lanes work at the same time: one piece arrives, one is updated, one is written back. The update runs beside the
next forward pass, which waits for each bucket at its first use. Nothing is delayed by a step, and the kernel is the one
of state on the device, so the bits are the same (Ren et al., ZeRO-Offload, 2021, computes on the host instead).

On a CPU the same pieces take the same way through the same windows, by plain copies. Masters of an fp32 run are its
weights: they stay on the device. `build` makes `OffloadedAdam`; `zero` owns the host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from stoker.pod.plan.memory import OFFLOAD_WINDOWS
from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.communicator import DONE, Pending
from stoker.trainer.rank.optimizer import Adam, HeldState, HostCopy, UpdateNumbers
from stoker.trainer.rank.pinned import pinned_memory


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
    free: torch.cuda.Event | None = None
    """When its last piece has left."""


class Lanes(Protocol):
    """The order of copies and updates on one kind of device."""

    def updating(self, scale: Tensor) -> AbstractContextManager[object]:
        """Kernels inside are queued where updates run. `scale`: a tensor that they read."""
        ...

    def load(self, window: Window, host: tuple[Tensor, ...], copied: HostCopy) -> None:
        """Copy a piece to the device before the next update."""
        ...

    def store(self, window: Window, host: tuple[Tensor, ...], copied: HostCopy) -> None:
        """Copy a piece back after the last update."""
        ...


class CpuLanes:
    """One thing after another."""

    def updating(self, scale: Tensor) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def load(self, window: Window, host: tuple[Tensor, ...], copied: HostCopy) -> None:  # noqa: ARG002
        for place, values in zip(window.tensors, host, strict=True):
            place[: values.numel()].copy_(values)

    def store(self, window: Window, host: tuple[Tensor, ...], copied: HostCopy) -> None:  # noqa: ARG002
        for place, values in zip(window.tensors, host, strict=True):
            values.copy_(place[: values.numel()])


class CudaLanes:
    """A stream for each lane."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arriving, self._updates, self._leaving = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]

    @contextmanager
    def updating(self, scale: Tensor) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._updates.wait_stream(current)
        self._arriving.wait_stream(current)
        scale.record_stream(self._updates)
        with torch.cuda.stream(self._updates):
            yield

    def load(self, window: Window, host: tuple[Tensor, ...], copied: HostCopy) -> None:
        for event in (window.free, copied.event):
            if event is not None:
                self._arriving.wait_event(event)
        with torch.cuda.stream(self._arriving):
            for place, values in zip(window.tensors, host, strict=True):
                place[: values.numel()].copy_(values, non_blocking=True)
        self._updates.wait_event(self._arriving.record_event())

    def store(self, window: Window, host: tuple[Tensor, ...], copied: HostCopy) -> None:
        self._leaving.wait_event(self._updates.record_event())
        with torch.cuda.stream(self._leaving):
            for place, values in zip(window.tensors, host, strict=True):
                values.copy_(place[: values.numel()], non_blocking=True)
        window.free = copied.event = self._leaving.record_event()


class OffloadedAdam:
    """Adam and AdamW on state in host memory."""

    def __init__(self, inner: Adam, device: torch.device, piece: int) -> None:
        """`piece`: elements that are copied and updated at once; a multiple of a line."""
        self._inner, self._device, self._piece = inner, device, piece
        self._lanes: Lanes = CudaLanes(device) if device.type == "cuda" else CpuLanes()
        self._windows: list[Window] = []
        self._turn = 0

    def update(self, states: Iterable[HeldState], numbers: UpdateNumbers, updated: Callable[[Bucket], None]) -> None:
        """See `Optimizer`. The host memory holds the result when the state's `HostCopy` has ended."""
        with self._lanes.updating(numbers.scale):
            for state in states:
                for piece in pieces_of(state, self._piece):
                    self.update_piece(piece, numbers)
                updated(state.bucket)

    def update_piece(self, piece: HeldState, numbers: UpdateNumbers) -> None:
        """Queue the update of one piece, which is in host memory."""
        host, copied = offloaded(piece), piece.copied
        assert copied is not None, "the state is in host memory"
        window = self._next_window(len(host))
        self._lanes.load(window, host, copied)
        *masters, exp_avg, exp_avg_sq = (place[: piece.master.numel()] for place in window.tensors)
        master = masters[0] if masters else piece.master
        held = replace(piece, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        self._inner.update_state(held, numbers)
        self._lanes.store(window, host, copied)

    def _next_window(self, tensors: int) -> Window:
        if not self._windows:
            shape = OFFLOAD_WINDOWS, tensors, self._piece
            memory = torch.empty(shape, dtype=torch.float32, device=self._device)
            self._windows = [Window(tuple(window.unbind(0))) for window in memory]
        self._turn = (self._turn + 1) % len(self._windows)
        return self._windows[self._turn]


def offloaded(state: HeldState) -> tuple[Tensor, ...]:
    """What of the state is in host memory: moments, and masters that are not the weights themselves."""
    moments = state.exp_avg, state.exp_avg_sq
    return moments if state.parameters is None else (state.master, *moments)


def pieces_of(state: HeldState, size: int) -> Iterator[HeldState]:
    """Yield runs of at most `size` elements."""
    for begin in range(0, state.master.numel(), size):
        own = slice(begin, begin + size)
        yield replace(
            state,
            start=state.start + begin,
            master=state.master[own],
            gradient=state.gradient[own],
            exp_avg=state.exp_avg[own],
            exp_avg_sq=state.exp_avg_sq[own],
            parameters=None if state.parameters is None else state.parameters[own],
        )
