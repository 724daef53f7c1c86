"""One rank's slots of a landing zone whose states the engine's leader keeps.

The leader grants a slot on all ranks at once, and knows who may write it until when. A rank sees the generations of
writes: a write that is older than one it has seen is refused. What this lets through by mistake, such as a late write
into a slot that was granted anew and not yet written, fails the checksum, as over links that map the memory.
"""

from __future__ import annotations

import threading

from stoker.engine.transfer.device_memory import DeviceMemory
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.zone_memory import SharedZone


class SeenGenerations:
    """The newest generation of each slot, and what is being written. Used under the zone's lock."""

    def __init__(self, num_slots: int) -> None:
        self._newest = [0] * num_slots
        self._writing: set[tuple[int, int]] = set()

    def begin(self, grant: Grant, cell: int) -> bool:
        slot, generation = grant
        if not 0 <= slot < len(self._newest) or generation < self._newest[slot] or (slot, cell) in self._writing:
            return False
        self._newest[slot] = generation
        self._writing.add((slot, cell))
        return True

    def end(self, slot: int, cell: int) -> None:
        self._writing.discard((slot, cell))


class RankWrites:
    """The writes into slots of a zone whose states the leader keeps."""

    lock: threading.Lock
    seen: SeenGenerations

    def begin_write(self, grant: Grant, peer: str, cell: int = 0) -> bool:  # noqa: ARG002 - the leader knows the owner
        with self.lock:
            return self.seen.begin(grant, cell)

    def end_write(self, slot: int, cell: int = 0) -> None:
        with self.lock:
            self.seen.end(slot, cell)


class RankZone(RankWrites, SharedZone):
    """Slots of one of several ranks in main memory."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes, named=True)
        self.seen = SeenGenerations(num_slots)


class DeviceRankZone(RankWrites, DeviceZone):
    """Slots of one of several ranks in a device's memory."""

    def __init__(self, num_slots: int, slot_bytes: int, device: DeviceMemory) -> None:
        """Raises DeviceError: the device has no such memory, or it cannot be mapped by others."""
        self.seen = SeenGenerations(num_slots)
        super().__init__(num_slots, slot_bytes, device)
