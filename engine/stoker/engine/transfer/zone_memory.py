"""A landing zone with its memory, for links that write from threads of this process."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from stoker.engine.transfer.landing_zone import BlockRefused, Grant, LandingZone


class LockedZone:
    """The states of slots under one lock. Take `lock` around every use of `zone`."""

    def __init__(self, num_slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.zone = LandingZone(num_slots)
        self.lock = threading.Lock()
        self.clock = clock

    @property
    def num_slots(self) -> int:
        return self.zone.num_slots

    def bury(self, peer: str) -> None:
        with self.lock:
            self.zone.bury(peer)

    def detach(self, peer: str, seconds: float) -> None:
        """A writer is gone, but copies that it has begun may still arrive for `seconds`."""
        with self.lock:
            self.zone.detach(peer, self.clock() + seconds)


class SharedZone(LockedZone):
    """Slots and their bytes. `DeviceZone` has them in a device's memory, too.

    The memory itself needs no lock: the states say who may touch a slot.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, clock: Callable[[], float] = time.monotonic, named: bool = False
    ) -> None:
        """`named`: in a memory file (`fd`), which another process of this host can map."""
        super().__init__(num_slots, clock)
        self.slot_bytes = slot_bytes
        size = max(num_slots * slot_bytes, 1)
        self.fd: int | None = None
        if named:
            self.fd = os.memfd_create("stoker-landing-zone", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd if self.fd is not None else -1, size)
        self.memory_SN = np.frombuffer(self._map, dtype=np.uint8, count=num_slots * slot_bytes).reshape(num_slots, -1)

    def begin_write(self, grant: Grant, peer: str, cell: int = 0) -> bool:
        """Whether this peer may write the slot now; if so, `end_write` must follow. A refusal is counted."""
        with self.lock:
            try:
                self.zone.begin_write(grant, peer, self.clock(), cell)
            except BlockRefused:
                return False
        return True

    def checked(self, peer: str, cells: Iterable[tuple[Grant, int]]) -> list[Grant]:
        """Those slots, or cells of them, that this peer may write by itself. A refusal is counted."""
        written = []
        with self.lock:
            now_s = self.clock()
            for grant, cell in cells:
                try:
                    self.zone.check_write(grant, peer, now_s, cell)
                except BlockRefused:
                    continue
                written.append(grant)
        return written

    def end_write(self, slot: int, cell: int = 0) -> None:
        with self.lock:
            self.zone.end_write(slot, cell)

    def cell_memory(self, slot: int, cell: int, cells: int) -> memoryview:
        """`slot_bytes / cells` bytes: the place of one of the slot's cells, which lie one after the other."""
        return memoryview(self.memory_SN[slot].reshape(cells, -1)[cell])

    def fill(self, slot: int, cell: int, cells: int) -> None:
        """A port has written one of the slot's cells into `memory_SN`. Called between `begin_write` and `end_write`."""

    def close(self) -> None:
        """Release the memory. May be called twice."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.memory_SN = np.zeros((0, 0), dtype=np.uint8)
        with suppress(BufferError):  # a view is left: its end gives the memory back
            self._map.close()
