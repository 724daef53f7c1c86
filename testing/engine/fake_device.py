"""A device without a GPU: its memory is files that other processes map, its copies happen as late as they may.

What is freed or unmapped is unmapped for real, so that a copy into it would end the process.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from stoker.engine.transfer.device_memory import CellCopy, Copy, DeviceError
from stoker.engine.transfer.local_blocks import HostBlocks


class FakeMark:
    """Reached when the copies up to it have happened, which waiting brings about."""

    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue
        self.done = False

    def reached(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.queue.run(self)


class FakeQueue:
    """Copies in the order of posting, at the last moment."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.posted: deque[tuple[Sequence[Copy], FakeMark]] = deque()

    def post(self, copies: Sequence[Copy], cells: Sequence[CellCopy] = ()) -> FakeMark:
        self.device.check("post")
        mark = FakeMark(self)
        self.posted.append(([*copies, *(row for cell in cells for row in rows_of(cell))], mark))
        return mark

    def run(self, mark: FakeMark) -> None:
        self.device.check("wait")
        while not mark.done:
            copies, own = self.posted.popleft()
            for copy in copies:
                self.device.move(copy)
            own.done = True

    def close(self) -> None:
        while self.posted:
            self.run(self.posted[-1][1])


def rows_of(cell: CellCopy) -> Iterator[Copy]:
    """The rows of a cell as the driver copies them. It refuses rows that overlap and planes that begin within a row."""
    row_pitch, plane = cell.row_pitch or cell.row_bytes, cell.target_pitch or cell.rows * cell.row_bytes
    assert row_pitch >= cell.row_bytes
    assert cell.plane_pitch % row_pitch == plane % cell.row_bytes == 0
    assert cell.planes == 1 or cell.plane_pitch >= (cell.rows - 1) * row_pitch + cell.row_bytes
    for number, row in itertools.product(range(cell.planes), range(cell.rows)):
        source = cell.source + number * cell.plane_pitch + row * row_pitch
        yield Copy(source, cell.target + number * plane + row * cell.row_bytes, cell.row_bytes)


class FakeDevice:
    """Memory in files of a folder."""

    index = 0

    def __init__(self, folder: Path, host_id: str = "host", nvlinks: int = 0) -> None:
        self.folder, self.host_id, self.nvlinks = folder, host_id, nvlinks
        self.fails: Callable[[str], bool] = lambda call: False
        """Whether a call (allocate, export, open, pin, post, wait) fails now."""
        self.copied: list[Copy] = []
        self.pinned: set[int] = set()
        self._numbers = itertools.count()
        self._files: dict[int, Path] = {}
        """By address: what was allocated here."""
        self._maps: dict[int, tuple[mmap.mmap, np.ndarray]] = {}
        self._lock = threading.Lock()

    def check(self, call: str) -> None:
        if self.fails(call):
            raise DeviceError(f"{call}: made to fail")

    @property
    def num_mapped(self) -> int:
        """Allocations and mappings that are left."""
        return len(self._maps)

    def queue(self) -> FakeQueue:
        return FakeQueue(self)

    def allocate(self, num_bytes: int) -> int:
        self.check("allocate")
        path = self.folder / f"device-{os.getpid()}-{id(self)}-{next(self._numbers)}"
        path.write_bytes(bytes(num_bytes))
        address = self._map(path)
        self._files[address] = path
        return address

    def free(self, address: int) -> None:
        self._files.pop(address).unlink()
        self.close(address)

    def export(self, address: int) -> bytes:
        self.check("export")
        return os.fsencode(self._files[address])

    def open(self, handle: bytes) -> int:
        self.check("open")
        try:
            return self._map(Path(os.fsdecode(handle)))
        except OSError as error:
            raise DeviceError(f"open: {error}") from error

    def close(self, address: int) -> None:
        with self._lock:
            mapped, view = self._maps.pop(address)
        del view
        mapped.close()

    def pin(self, address: int, num_bytes: int) -> None:
        self.check("pin")
        assert address not in self.pinned, "pinned twice"
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def bytes_at(self, address: int, rows: int, row_bytes: int) -> np.ndarray:
        """[rows, row_bytes] uint8: a view of an allocation."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * (rows * row_bytes)).from_address(address)).reshape(rows, -1)

    def move(self, copy: Copy) -> None:
        self.copied.append(copy)
        self.move_bytes(copy)

    @staticmethod
    def move_bytes(copy: Copy) -> None:
        ctypes.memmove(copy.target, copy.source, copy.num_bytes)

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        view = np.frombuffer(mapped, dtype=np.uint8)
        address = int(view.ctypes.data)
        with self._lock:
            self._maps[address] = mapped, view
        return address


class FakeBlocks(HostBlocks):
    """Blocks that a fake device can read by address."""

    def __init__(self, blocks_BN: np.ndarray) -> None:
        super().__init__(blocks_BN)
        self.address = int(blocks_BN.ctypes.data)
        assert blocks_BN.flags.c_contiguous
