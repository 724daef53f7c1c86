"""What a volume that several engines write to is known to hold: the last listing, and what this engine changed since.

It may be wrong for a while. A block that another engine removed is a miss when it is read; one that another wrote is
found with the next listing. Room is made by the volume's sweeper (`shared_home`), so nothing is evicted here. Pure.

Changed by `disk_tier` alone, in the core's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stoker.engine.core.disk.block_folder import Stored
from stoker.engine.transfer.block_part import Parts


class SharedIndex:
    """Blocks of one size, by digest."""

    owned = False
    num_evicted = 0

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._stored: dict[bytes, Parts] = {}
        self._writing: set[bytes] = set()
        self._changed: dict[bytes, Parts | None] = {}
        """Blocks that this engine wrote, or removed (None), since the listing began that is to come."""

    @property
    def num_used(self) -> int:
        return len(self._stored) + len(self._writing)

    @property
    def num_stored(self) -> int:
        return len(self._stored)

    def has(self, digest: bytes) -> bool:
        return digest in self._stored

    def parts(self, digest: bytes) -> Parts:
        """The parts in which a block is there."""
        return self._stored[digest]

    def begin_scan(self) -> None:
        """A listing begins; what changes from now on may not be in it."""
        self._changed.clear()

    def adopt(self, blocks: Iterable[Stored]) -> None:
        """Take the listing, with what this engine changed since it began."""
        self._stored = dict(blocks)
        for digest, parts in self._changed.items():
            self._stored.pop(digest, None)
            if parts is not None:
                self._stored[digest] = parts

    def make_room(self, num_blocks: int = 1) -> list[Stored]:  # noqa: ARG002 - the sweeper's task
        return []

    def begin_write(self, digest: bytes) -> bool:
        """Whether to write a block: it is neither there nor on its way, and the volume is not full."""
        if digest in self._stored or digest in self._writing or self.num_used >= self.max_blocks:
            return False
        self._writing.add(digest)
        return True

    def end_write(self, digest: bytes, parts: Parts | None) -> None:
        self._writing.remove(digest)
        if parts is not None:
            self._stored[digest] = self._changed[digest] = parts

    def pin(self, digest: bytes) -> None:
        """An open file stays readable when its name is removed."""

    def unpin(self, digest: bytes) -> None:
        """Nothing was kept."""

    def drop(self, digest: bytes) -> bool:
        """Forget a block that could not be read. Whether its file is to be removed."""
        self._changed[digest] = None
        if digest not in self._stored:
            return False
        del self._stored[digest]
        return True

    def removed(self, digest: bytes) -> None:
        """Its room is counted with the next listing."""

    def faults(self) -> Iterator[str]:
        """None can be told from what other engines do."""
        return iter(())
