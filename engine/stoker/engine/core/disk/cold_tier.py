"""What the host tier needs of a tier below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from stoker.engine.core.blocks import BlockContent
from stoker.engine.core.host_index import HostEntry
from stoker.engine.core.stats import ColdTierStats


class ReadEnd(NamedTuple):
    """A read that has ended."""

    entry: HostEntry
    sum: int | None
    """Seeded sum of a block that is sound; None: it could not be read."""


class ColdTier(Protocol):
    """A tier below main memory. No method waits, and no failure of the tier reaches its caller."""

    name: str

    @property
    def readable(self) -> bool:
        """Whether reads may be begun now."""
        ...

    def holds(self, content: BlockContent) -> bool:
        """Whether a read could find it."""
        ...

    def room(self) -> int:
        """Writes that may be begun now."""
        ...

    def write(self, entry: HostEntry) -> bool:
        """Begin to write a block of the host tier, which stays where it is until then. False: it is not written."""
        ...

    def read(self, entry: HostEntry) -> None:
        """Begin to read a block into the entry's slot of the host tier."""
        ...

    def poll(self) -> tuple[list[HostEntry], list[ReadEnd]]:
        """Take up what has ended: blocks whose write has ended, well or not, and reads."""
        ...

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        ...

    def pending(self) -> Sequence[Future[Any]]:
        """Reads under way."""
        ...

    def faults(self) -> Iterator[str]:
        """Findings of an audit."""
        ...

    def stats(self) -> ColdTierStats: ...

    def close(self) -> None:
        """End. Does not wait for what hangs."""
        ...
