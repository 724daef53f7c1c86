"""The store that engines of a deployment share: blocks on several volumes, each on as many as there are replicas.

A block's volumes follow from its digest (rendezvous hashing), so that every engine writes and reads at the same places
without asking anyone; where one of them is down the next takes its part. A read goes on at the next volume that has the
block; when the block is in the host tier again, the volumes that lack it get it (repair). A volume that is full, fails
or hangs is left out for a while (`disk_tier`). The store's end is a miss, never a failed request.

Called by `cold_traffic` in the core's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Any

from blake3 import blake3

from stoker.engine.core.blocks import BlockContent
from stoker.engine.core.disk.cold_tier import ReadEnd
from stoker.engine.core.disk.disk_tier import DiskTier
from stoker.engine.core.host_index import HostEntry
from stoker.engine.core.stats import ColdTierStats


@dataclass
class _Read:
    """Where a block was looked for."""

    volume: str
    tried: set[str] = field(default_factory=set)


class StoreTier:
    """Volumes by name. The names are those of all engines that share them."""

    name = "store"

    def __init__(self, volumes: Mapping[str, DiskTier], replicas: int) -> None:
        assert 1 <= replicas <= len(volumes), "the configuration is checked"
        self.volumes, self.replicas = dict(volumes), replicas
        self._reads: dict[HostEntry, _Read] = {}
        self._writes: Counter[HostEntry] = Counter()
        """Replicas that are being written."""
        self.num_saved = self.num_loaded = 0

    @property
    def readable(self) -> bool:
        return any(volume.readable for volume in self.volumes.values())

    def holds(self, content: BlockContent) -> bool:
        return self._next(content, set()) is not None

    def lists(self, content: BlockContent) -> bool:
        """Whether some volume has it by its listing, whichever would be read."""
        return any(volume.holds(content) for volume in self.volumes.values())

    def room(self) -> int:
        return max(volume.room() for volume in self.volumes.values())

    def write(self, entry: HostEntry) -> bool:
        """Begin to write a block to those of its volumes that lack it."""
        working = [name for name in ranked(entry.content.digest, self.volumes) if self.volumes[name].room()]
        for name in working[: self.replicas]:
            self._writes[entry] += self.volumes[name].write(entry)
        if self._writes[entry]:
            return True
        del self._writes[entry]
        return False

    def read(self, entry: HostEntry) -> None:
        name = self._next(entry.content, set())
        assert name is not None, "it holds the block"
        self._reads[entry] = _Read(name)
        self.volumes[name].read(entry)

    def poll(self) -> tuple[list[HostEntry], list[ReadEnd]]:
        """Take up what has ended at any volume. A block counts as written when no volume writes it any more."""
        written: list[HostEntry] = []
        ended: list[ReadEnd] = []
        for volume in self.volumes.values():
            entries, reads = volume.poll()
            written += [entry for entry in entries if self._end_write(entry)]
            ended += [end for end in reads if self._end_read(end)]
        return written, ended

    @property
    def busy(self) -> bool:
        return any(volume.busy for volume in self.volumes.values())

    def pending(self) -> Sequence[Future[Any]]:
        return [future for volume in self.volumes.values() for future in volume.pending()]

    def faults(self) -> Iterator[str]:
        for volume in self.volumes.values():
            yield from volume.faults()

    def stats(self) -> ColdTierStats:
        """Sums over the volumes; the state names those with a trouble."""
        parts = {name: volume.stats() for name, volume in self.volumes.items()}
        first = next(iter(parts.values()))
        sums = {
            one.name: sum(getattr(part, one.name) for part in parts.values())
            for one in fields(ColdTierStats)
            if one.name not in ("state", "write_bytes_per_s", "read_bytes_per_s")
        }
        troubles = [f"{name}: {part.state}" for name, part in parts.items() if part.state != "ok"]
        return replace(first, **sums, state="; ".join(troubles) or "ok")

    def close(self) -> None:
        for volume in self.volumes.values():
            volume.close()

    def _next(self, content: BlockContent, tried: set[str]) -> str | None:
        """The first volume that has a block, of those that can be read and were not tried."""
        for name in ranked(content.digest, self.volumes):
            volume = self.volumes[name]
            if name not in tried and volume.holds(content) and volume.readable:
                return name
        return None

    def _end_write(self, entry: HostEntry) -> bool:
        self._writes[entry] -= 1
        if self._writes[entry]:
            return False
        del self._writes[entry]
        return True

    def _end_read(self, end: ReadEnd) -> bool:
        """Whether a read has ended: it was sound, or no further volume has the block."""
        read = self._reads[end.entry]
        read.tried.add(read.volume)
        name = self._next(end.entry.content, read.tried) if end.sum is None else None
        if name is not None:
            read.volume = name
            self.volumes[name].read(end.entry)
            return False
        del self._reads[end.entry]
        return True


def ranked(digest: bytes, names: Mapping[str, object]) -> list[str]:
    """Volumes of a block, the preferred one first (highest random weight: Thaler and Ravishankar, 1998). Pure."""
    return sorted(names, key=lambda name: blake3(name.encode() + b"\0" + digest).digest(), reverse=True)
