"""Adam on state in a file: pieces arrive in host memory ahead of their update, and leave behind it.

From there a piece takes the way of state in host memory (`offload`), so the kernel and the bits are the same. The first
pieces of the next update are read beside the passes, and the last ones of this update are written beside them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stoker.pod.plan.memory import DISK_BUFFERS
from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.copy_queues import Queues
from stoker.trainer.rank.offload import OffloadedUpdate, PieceRule, pieces_of
from stoker.trainer.rank.optimizer import HeldState, HostCopy, UpdateNumbers
from stoker.trainer.rank.state_file import DiskState, StateFile, aligned_memory


@dataclass(eq=False)
class Buffer:
    """Host memory for one piece."""

    memory: Tensor
    copied: HostCopy
    written: Future[None] | None = None


@dataclass(frozen=True, eq=False)
class Arriving:
    """A piece on its way from the file."""

    disk: DiskState
    start: int
    version: int
    buffer: Buffer
    read: Future[None]

    @property
    def values(self) -> Tensor:
        """[R, length]: rows of the piece, once it has been read."""
        rows, length = self.disk.rows, self.disk.length(self.start)
        return self.buffer.memory[: rows * length].view(rows, length)


class DiskUpdate:
    """Adam and AdamW on state in a file."""

    def __init__(
        self, inner: PieceRule, device: torch.device, piece: int, file: StateFile, queues: Queues | None = None
    ) -> None:
        """`piece`: elements that are read, updated and written at once; a multiple of a line."""
        self._lanes = OffloadedUpdate(inner, device, piece, queues)
        self._pinned, self._piece, self._file = device.type == "cuda", piece, file
        self._buffers: deque[Buffer] = deque()
        self._ahead: deque[Arriving] = deque()

    def update(self, states: Iterable[HeldState], numbers: UpdateNumbers, updated: Callable[[Bucket], None]) -> None:
        """See `Optimizer`. Raises StorageFailed where the file cannot be read or written."""
        held = list(states)
        order = [(disk, start) for disk in map(_disk_of, held) for start in disk.starts]
        coming = iter(self._check_ahead(order))
        self._read_ahead(coming)
        with self._lanes.updating(numbers.scale):
            for state in held:
                self._update_bucket(state, numbers, coming)
                updated(state.bucket)
        self._read_ahead(iter(order))  # for the next update, beside the passes

    def _update_bucket(self, state: HeldState, numbers: UpdateNumbers, coming: Iterator[tuple[DiskState, int]]) -> None:
        disk = _disk_of(state)
        disk.begin_update()
        for piece in pieces_of(state, self._piece):
            arrived = self._ahead.popleft()
            arrived.read.result()
            buffer = arrived.buffer
            *masters, exp_avg, exp_avg_sq = arrived.values.unbind(0)
            master = masters[0] if masters else piece.master
            moved = replace(piece, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, copied=buffer.copied)
            self._lanes.update_piece(moved, numbers)
            buffer.written = disk.store(arrived.start, arrived.values.view(-1), buffer.copied.wait)
            self._buffers.append(buffer)
            self._read_ahead(coming)
        disk.end_update()

    def _check_ahead(self, order: list[tuple[DiskState, int]]) -> list[tuple[DiskState, int]]:
        """Drop what was read before the state was replaced; return what is still to be read."""
        if any(item.version != item.disk.version for item in self._ahead):
            for item in self._ahead:
                item.read.result()
            self._buffers.extend(item.buffer for item in self._ahead)
            self._ahead.clear()
        return order[len(self._ahead) :]

    def _read_ahead(self, coming: Iterator[tuple[DiskState, int]]) -> None:
        """Start to read pieces, as many as there are buffers to wait in."""
        while len(self._ahead) < DISK_BUFFERS - 1 and (following := next(coming, None)) is not None:
            disk, start = following
            self._ahead.append(self._read(disk, start, self._next_buffer(disk)))

    def _read(self, disk: DiskState, start: int, buffer: Buffer) -> Arriving:
        written, memory = buffer.written, buffer.memory[: disk.rows * disk.length(start)]

        def read() -> None:
            if written is not None:
                written.result()  # what was in the buffer has left; submitted before, so that no thread waits for it
            disk.load(start, memory)

        return Arriving(disk, start, disk.version, buffer, self._file.submit(read))

    def _next_buffer(self, disk: DiskState) -> Buffer:
        if not self._buffers:
            made = [aligned_memory(disk.rows * self._piece, pinned=self._pinned) for _ in range(DISK_BUFFERS)]
            self._buffers.extend(Buffer(memory, HostCopy()) for memory in made)
        return self._buffers.popleft()


def _disk_of(state: HeldState) -> DiskState:
    assert state.disk is not None, "the state is in a file"
    return state.disk
