"""The seam to a device's memory: what links between GPUs need of it. Implemented by `cuda_memory`.

Addresses are those of the device. What is posted runs in order on a queue of its own, beside all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stoker.engine.transfer.ticket import TransferError


class DeviceError(TransferError):
    """The device or its driver refused. Names the call and the driver's word for it."""


class Copy(NamedTuple):
    """One run of bytes."""

    source: int
    target: int
    num_bytes: int


class CellCopy(NamedTuple):
    """Rows of equal length at equal distances, in planes at equal distances. In the target a plane's rows follow one
    another."""

    source: int
    target: int
    row_bytes: int
    rows: int = 1
    """Of a plane."""
    row_pitch: int = 0
    """Bytes from one row of the source to the next."""
    planes: int = 1
    plane_pitch: int = 0
    """Bytes from one plane of the source to the next: a multiple of `row_pitch`, or of the row where there is one."""
    target_pitch: int = 0
    """Bytes from one plane of the target to the next: a multiple of the row; 0: they follow one another."""

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * self.rows * self.planes


class Mark(Protocol):
    """A place in the order of work of a device."""

    def reached(self) -> bool:
        """Whether all work before it is done. Does not wait."""
        ...

    def wait(self) -> None:
        """Wait until all work before it is done. Raises DeviceError."""
        ...


class CopyQueue(Protocol):
    """Copies in order, beside the computation. One thread posts; others may wait for the marks."""

    def post(self, copies: Sequence[Copy], cells: Sequence[CellCopy] = ()) -> Mark:
        """Begin copies; returns the mark of their end. Raises DeviceError."""
        ...

    def close(self) -> None:
        """Wait for what was posted. Raises DeviceError."""
        ...


class DeviceMemory(Protocol):
    """One device of this process. May be used by several threads."""

    index: int
    """Its number in this process."""
    host_id: str
    """The same for all processes that could map each other's memory."""
    nvlinks: int
    """Active NVLinks of the device."""

    def queue(self) -> CopyQueue: ...

    def allocate(self, num_bytes: int) -> int:
        """Take memory that other processes can map; never a part of a pool. Raises DeviceError."""
        ...

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """A handle with which another process of this host maps the memory. Raises DeviceError."""
        ...

    def open(self, handle: bytes) -> int:
        """Map the memory of another process. Raises DeviceError."""
        ...

    def close(self, address: int) -> None:
        """Unmap it. Works after the death of its owner, too, and gives its memory back then."""
        ...

    def pin(self, address: int, num_bytes: int) -> None:
        """Make main memory directly readable by the device. Raises DeviceError."""
        ...

    def unpin(self, address: int) -> None: ...


def merged(copies: Sequence[Copy]) -> list[Copy]:
    """The same bytes with neighbours joined: what follows in source and target at once is one copy."""
    runs: list[Copy] = []
    source = target = size = 0
    for copy in copies:
        if size and copy.source == source + size and copy.target == target + size:
            size += copy.num_bytes
            continue
        if size:
            runs.append(Copy(source, target, size))
        source, target, size = copy
    return [*runs, Copy(source, target, size)] if size else runs
