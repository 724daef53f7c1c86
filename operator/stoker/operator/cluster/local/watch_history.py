"""The newest changes of an object store, from which watches begin."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from stoker.operator.cluster.interface import Gone
from stoker.operator.domain.plan import Object

HISTORY = 5000
"""Number of changes that a new watch can begin before."""


@dataclass(frozen=True)
class Record:
    """One change in the history."""

    version: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object


class WatchHistory:
    """The last changes, up to a number of them."""

    def __init__(self, most: int) -> None:
        self._records: deque[Record] = deque(maxlen=most)

    def add(self, record: Record) -> None:
        self._records.append(record)

    def clear(self) -> None:
        self._records.clear()

    def since(self, version: int, current: int) -> list[Record]:
        """List the changes after `version`, oldest first; `current` is the version of the store.

        Raises:
            Gone: the history does not reach so far back.
        """
        oldest = self._records[0].version - 1 if self._records else current
        if version < oldest:
            raise Gone(f"version {version} is too old, the oldest is {oldest}")
        return [record for record in self._records if record.version > version]
