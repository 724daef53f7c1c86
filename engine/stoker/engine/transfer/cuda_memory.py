"""A CUDA device as `DeviceMemory`: allocations by the driver, order by PyTorch's streams and events."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.engine.transfer.cuda_driver import CudaDriver, active_nvlinks
from stoker.engine.transfer.device_memory import Copy, DeviceError, Mark, dealt, merged

log = logging.getLogger("stoker.engine")

LANES = 4
"""Streams of a queue of copies: one copy engine does not fill the links between two GPUs."""
STAGED_BLOCKS = 4
"""Blocks of pinned memory through which a cache is read for peers that cannot map the device's memory."""


class EventMark:
    """An event of a stream."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool = False) -> None:
        self.event: torch.cuda.Event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"the device has failed: {error}") from error


class EventMarks:
    """Events of several streams."""

    def __init__(self, marks: Sequence[EventMark]) -> None:
        self.marks = marks

    def reached(self) -> bool:
        return all(mark.reached() for mark in self.marks)

    def wait(self) -> None:
        for mark in self.marks:
            mark.wait()


class StreamQueue:
    """Copies on streams of their own, each of which one copy engine serves."""

    def __init__(self, memory: CudaMemory, lanes: int) -> None:
        self._memory = memory
        self._streams: list[torch.cuda.Stream] = [
            torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
            for _ in range(lanes)
        ]

    def post(self, copies: Sequence[Copy], after: Mark | None) -> EventMarks:
        self._memory.enter()
        parts = dealt(merged(copies), len(self._streams))
        return EventMarks([self._post(part, stream, after) for part, stream in zip(parts, self._streams, strict=False)])

    def _post(self, copies: Sequence[Copy], stream: torch.cuda.Stream, after: Mark | None) -> EventMark:
        if after is not None:
            assert isinstance(after, EventMark), "a mark of this device"
            stream.wait_event(after.event)
        self._memory.driver.copy(copies, stream.cuda_stream)
        return EventMark(stream)

    def close(self) -> None:
        try:
            for stream in self._streams:
                stream.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"the device has failed: {error}") from error


class CudaMemory:
    """The device of this process's tensors."""

    def __init__(self, device: torch.device, host_id: str, lanes: int = LANES) -> None:
        """`lanes`: copies of one write that run at the same time. Raises DeviceError: no driver."""
        self.device, self.host_id, self.lanes = device, host_id, lanes
        self.index = device.index or 0
        self.driver = CudaDriver()
        torch.zeros(1, device=device)  # makes PyTorch's context
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            self._context = self.driver.context()
            self.nvlinks = active_nvlinks(self.driver.bus_id())
        self._try_batch()

    def _try_batch(self) -> None:
        """Post copies one by one where this driver does not take them together."""
        probe_N = torch.arange(64, dtype=torch.uint8, device=self.device)
        address = probe_N.data_ptr()
        try:
            queue = self.queue()
            queue.post([Copy(address, address + 32, 8), Copy(address + 16, address + 48, 8)], self.mark()).wait()
        except DeviceError as error:
            log.warning("copies to other GPUs are posted one by one: %s", error)
            self.driver.batch = None

    def enter(self) -> None:
        """Let this thread use the device."""
        self.driver.enter(self._context)

    def mark(self) -> EventMark:
        return EventMark(torch.cuda.current_stream(self.device))

    def queue(self) -> StreamQueue:
        return StreamQueue(self, self.lanes)

    def allocate(self, num_bytes: int) -> int:
        self.enter()
        try:
            return self.driver.allocate(num_bytes)
        except DeviceError:
            torch.cuda.empty_cache()  # PyTorch may keep what nothing uses
            return self.driver.allocate(num_bytes)

    def free(self, address: int) -> None:
        self.enter()
        self.driver.free(address)

    def export(self, address: int) -> bytes:
        self.enter()
        return self.driver.export(address)

    def open(self, handle: bytes) -> int:
        self.enter()
        return self.driver.open(handle)

    def close(self, address: int) -> None:
        self.enter()
        self.driver.close(address)

    def pin(self, address: int, num_bytes: int) -> None:
        self.enter()
        self.driver.pin(address, num_bytes)

    def unpin(self, address: int) -> None:
        self.enter()
        self.driver.unpin(address)

    def tensor(self, address: int, rows: int, row_bytes: int) -> Tensor:
        """[rows, row_bytes] uint8: a view of memory that was allocated here. Its owner frees it."""
        view: Tensor = torch.as_tensor(_Array(address, (rows, row_bytes)), device=self.device)
        return view


class _Array:
    """Memory in the form that array libraries exchange."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (address, False), "version": 3}


class DeviceBlocks:
    """A cache in a device's memory, as links read it."""

    def __init__(self, cache_BN: Tensor, memory: CudaMemory) -> None:
        """`cache_BN`: [blocks, block_bytes] uint8."""
        self.count, self.block_bytes = cache_BN.shape
        self.address = cache_BN.data_ptr()
        self._cache_BN, self._memory = cache_BN, memory

    def mark(self) -> Mark:
        return self._memory.mark()

    def read(self, blocks: Sequence[int], after: Mark | None) -> Iterator[np.ndarray]:
        """The bytes of blocks, by way of pinned memory, into which the next ones are copied meanwhile."""
        queue = self._memory.queue()
        marks: list[Mark] = []
        pinned_SN = torch.empty(STAGED_BLOCKS, self.block_bytes, dtype=torch.uint8, pin_memory=True)
        for place in range(len(blocks)):
            for ahead in range(len(marks), min(place + STAGED_BLOCKS, len(blocks))):
                target = pinned_SN[ahead % STAGED_BLOCKS].data_ptr()
                copy = Copy(self.address + blocks[ahead] * self.block_bytes, target, self.block_bytes)
                marks.append(queue.post([copy], None if ahead else after))
            marks[place].wait()
            yield pinned_SN[place % STAGED_BLOCKS].numpy()
