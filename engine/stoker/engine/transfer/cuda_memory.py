"""A CUDA device as `DeviceMemory`: allocations by the driver, order by PyTorch's streams and events."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.engine.transfer.cuda_driver import CudaDriver, active_nvlinks
from stoker.engine.transfer.device_memory import CellCopy, Copy, DeviceError, Mark, merged

log = logging.getLogger("stoker.engine")

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


class StreamQueue:
    """Copies on a stream of their own."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

    def post(self, copies: Sequence[Copy], cells: Sequence[CellCopy] = ()) -> EventMark:
        self._memory.enter()
        self._memory.driver.copy(merged(copies), self._stream.cuda_stream)
        self._memory.driver.copy_cells(cells, self._stream.cuda_stream)
        return EventMark(self._stream)

    def close(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"the device has failed: {error}") from error


class CudaMemory:
    """The device of this process's tensors."""

    def __init__(self, device: torch.device, host_id: str) -> None:
        """Raises DeviceError: no driver."""
        self.device, self.host_id = device, host_id
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
            torch.cuda.synchronize(self.device)
            self.queue().post([Copy(address, address + 32, 8), Copy(address + 16, address + 48, 8)]).wait()
        except DeviceError as error:
            log.warning("copies to other GPUs are posted one by one: %s", error)
            self.driver.batch = None

    def enter(self) -> None:
        """Let this thread use the device."""
        self.driver.enter(self._context)

    def queue(self) -> StreamQueue:
        return StreamQueue(self)

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

    def read(self, blocks: Sequence[int]) -> Iterator[np.ndarray]:
        """The bytes of blocks, by way of pinned memory, into which the next ones are copied meanwhile."""
        queue = self._memory.queue()
        marks: list[Mark] = []
        pinned_SN = torch.empty(STAGED_BLOCKS, self.block_bytes, dtype=torch.uint8, pin_memory=True)
        for place in range(len(blocks)):
            for ahead in range(len(marks), min(place + STAGED_BLOCKS, len(blocks))):
                target = pinned_SN[ahead % STAGED_BLOCKS].data_ptr()
                copy = Copy(self.address + blocks[ahead] * self.block_bytes, target, self.block_bytes)
                marks.append(queue.post([copy]))
            marks[place].wait()
            yield pinned_SN[place % STAGED_BLOCKS].numpy()
