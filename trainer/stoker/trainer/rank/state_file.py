"""One rank's optimizer state in a scratch file on a fast volume: pieces are read and written by a few threads.

The file has no name: it ends with the process, however that ends, and nothing has to be cleaned up. Checkpoints are the
truth. Blocks are read and written past the page cache (`O_DIRECT`) where the file system allows it.

Owned by `zero`, which gives each bucket a `DiskState`; `disk_update` streams the pieces.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from stoker.model.pinned import pinned_memory
from stoker.pod.plan.memory import DISK_THREADS
from stoker.trainer.errors import StorageFailed

T = TypeVar("T")
Transfer = Callable[..., int]
BLOCK = 4096
"""Bytes: offsets, sizes and addresses are multiples of it."""
FLOAT = 4


class StateFile:
    """A file without a name. Its reads and writes run in the order of their submission as far as they depend on it."""

    def __init__(self, folder: str, rank: int, preadv: Transfer = os.preadv, pwritev: Transfer = os.pwritev) -> None:
        """Make the folder where it is missing. `preadv` and `pwritev`: the system's calls.

        Raises:
            StorageFailed: it cannot be used.
        """
        self._place = f"memory.nvmeOffload.path {folder}"
        self._preadv, self._pwritev = preadv, pwritev
        self.size = 0
        """Bytes of all that was reserved."""
        path = Path(folder) / f".stoker-optimizer-{rank:05d}-{uuid4().hex}"
        self._descriptor = self._checked("cannot be used", lambda: _open_unnamed(path))
        self._threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="nvme")

    def reserve(self, size: int) -> int:
        """Return the offset of `size` new bytes, for which the volume has room.

        Raises:
            StorageFailed: it has none.
        """
        offset = self.size
        if size:
            what = f"has no room for {(offset + size) / 2**30:.3f} GiB of optimizer state on this rank"
            self._checked(what, lambda: os.posix_fallocate(self._descriptor, offset, size))
        self.size += size
        return offset

    def submit(self, action: Callable[[], None]) -> Future[None]:
        """Run an action beside the caller."""
        return self._threads.submit(action)

    def read(self, offset: int, memory: Tensor) -> None:
        """Fill host memory from the file. Raises StorageFailed."""
        self._transfer("cannot be read", self._preadv, offset, memory)

    def write(self, offset: int, memory: Tensor) -> None:
        """Write host memory to the file. Raises StorageFailed."""
        self._transfer("cannot be written", self._pwritev, offset, memory)

    def close(self) -> None:
        """Wait for what is in flight; the file's space is free afterwards."""
        self._threads.shutdown(wait=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _transfer(self, what: str, call: Transfer, offset: int, memory: Tensor) -> None:
        values: Any = memory.numpy()
        view = memoryview(values).cast("B")
        done = 0
        while done < len(view):
            count = self._checked(what, lambda: call(self._descriptor, [view[done:]], offset + done))  # noqa: B023
            if count == 0:
                raise StorageFailed(f"{self._place}: {what}: the file ends after {offset + done} bytes")
            done += count

    def _checked(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except OSError as error:
            raise StorageFailed(f"{self._place}: {what}: {error.strerror}") from error


def _open_unnamed(path: Path) -> int:
    """Open a new file and take its name away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)  # a file system may make the file before it refuses the flag
        if error.errno != errno.EINVAL:  # which says: no O_DIRECT there
            raise
        descriptor = os.open(path, flags, 0o600)
    path.unlink()
    return descriptor


def aligned_memory(numel: int, *, pinned: bool) -> Tensor:
    """Return fp32 host memory at the address of a block, zero; page-locked where a GPU copies it."""
    room = numel + BLOCK // FLOAT
    memory = pinned_memory(room) if pinned else torch.zeros(room)
    begin = -memory.data_ptr() % BLOCK // FLOAT
    return memory[begin : begin + numel]


class DiskState:
    """The state of one bucket: R rows (masters, moments) of N elements, cut into pieces of all rows.

    There are two copies' room. An update writes where it reads, but not over what a save still reads: then it writes to
    the other copy, which is the state from then on. So a save needs no memory and never makes a step wait.
    """

    def __init__(self, file: StateFile, rows: int, numel: int, piece: int) -> None:
        """`piece`: elements of a row that are read and written at once; a multiple of a line, as `numel` is."""
        self.rows, self.numel, self._piece, self._file = rows, numel, piece, file
        size = rows * numel * FLOAT
        self._copies = file.reserve(size), file.reserve(size)
        self._current, self._target = 0, 0
        self._held: int | None = None
        self._written: dict[tuple[int, int], Future[None]] = {}
        """By copy and first element: the last write."""
        self.version = 0
        """Changes with `fill`."""

    @property
    def starts(self) -> range:
        """The first elements of the pieces."""
        return range(0, self.numel, self._piece)

    def length(self, start: int) -> int:
        """Elements of a row of the piece that begins at `start`."""
        return min(self._piece, self.numel - start)

    def load(self, start: int, memory: Tensor) -> None:
        """Read the current piece into memory [R, length]; runs in a thread of the file."""
        self._load(self._current, start, memory)

    def begin_update(self) -> None:
        """Choose where the pieces of this update go."""
        self._target = 1 - self._current if self._held == self._current else self._current

    def store(self, start: int, memory: Tensor, ready: Callable[[], None]) -> Future[None]:
        """Start to write a piece as soon as `ready` returns and the write before it has ended.

        The memory is free when the result is there.
        """
        offset, before = self._offset(self._target, start), self._written.get((self._target, start))

        def write() -> None:
            ready()
            if before is not None:
                before.result()  # it has a thread already: the file's threads take writes in their order
            self._file.write(offset, memory)

        self._written[self._target, start] = written = self._file.submit(write)
        return written

    def end_update(self) -> None:
        """The pieces that were stored are the state."""
        self._current = self._target

    def wait_written(self) -> None:
        """Block until every write has ended. Raises StorageFailed."""
        for written in self._written.values():
            written.result()

    def hold(self) -> Callable[[], Tensor]:
        """Keep the state of now until the next `hold`. The result reads it, [R, N], in any thread."""
        held = self._held = self._current
        return lambda: self._read(held)

    def read(self) -> Tensor:
        """Return the state of now, [R, N]."""
        return self._read(self._current)

    def fill(self, rows: Tensor) -> None:
        """Replace the state by `rows` [R, N]."""
        self.version += 1
        self.wait_written()
        for start in self.starts:
            memory = aligned_memory(self.rows * self.length(start), pinned=False)
            memory.view(self.rows, -1).copy_(rows[:, start : start + self.length(start)])
            self._file.write(self._offset(self._current, start), memory)

    def _read(self, copy: int) -> Tensor:
        found = torch.empty(self.rows, self.numel)
        for start in self.starts:
            memory = aligned_memory(self.rows * self.length(start), pinned=False)
            self._load(copy, start, memory)
            found[:, start : start + self.length(start)] = memory.view(self.rows, -1)
        return found

    def _load(self, copy: int, start: int, memory: Tensor) -> None:
        if (written := self._written.get((copy, start))) is not None:
            written.result()
        self._file.read(self._offset(copy, start), memory)

    def _offset(self, copy: int, start: int) -> int:
        return self._copies[copy] + start * self.rows * FLOAT
