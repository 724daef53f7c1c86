"""A landing zone in a device's memory, for writers that map it, with the same slots in main memory for all others.

The device's part is one allocation of its own, exported once. Main memory is taken as slots of it are first used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stoker.engine.transfer.device_memory import Copy, DeviceMemory
from stoker.engine.transfer.ticket import TransferError
from stoker.engine.transfer.zone_memory import SharedZone


class DeviceZone(SharedZone):
    """Slots on a device. `fill` brings what came by way of main memory there."""

    def __init__(
        self, num_slots: int, slot_bytes: int, device: DeviceMemory, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises DeviceError: the device has no such memory, or it cannot be mapped by others."""
        super().__init__(num_slots, slot_bytes, clock=clock, named=True)
        self.device = device
        self._staged: int | None = None
        """Address of the pinned main memory; None before its first use."""
        self._filling = threading.Lock()
        self._closed = False
        try:
            self.address = device.allocate(num_slots * slot_bytes)
        except BaseException:
            super().close()
            raise
        try:
            self.handle = device.export(self.address)
        except BaseException:
            self.close()
            raise
        self._queue = device.queue()

    def fill(self, slot: int, cell: int, cells: int) -> None:
        with self._filling:
            if self._closed:
                raise TransferError("the landing zone is closed")
            if self._staged is None:
                staged = self.memory_SN.ctypes.data
                self.device.pin(staged, self.memory_SN.nbytes)
                self._staged = staged
            size = self.slot_bytes // cells
            begin = slot * self.slot_bytes + cell * size
            copy = Copy(self._staged + begin, self.address + begin, size)
            self._queue.post([copy]).wait()

    def close(self) -> None:
        with self._filling:
            if self._closed:
                return
            self._closed = True
            if self._staged is not None:
                self.device.unpin(self._staged)
            self.device.free(self.address)
        super().close()
