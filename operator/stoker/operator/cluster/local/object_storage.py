"""The seam below the object store: what survives the process, and what was lost. `StateFolder` is the one on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker.operator.cluster.interface import ServerError
from stoker.operator.cluster.local.merge import Intent
from stoker.operator.domain.plan import Key, Object


@dataclass(frozen=True)
class StoredObject:
    """One object as the storage has it."""

    resource: Object
    intents: Mapping[str, Intent]
    """Manager -> what it applied last."""


@dataclass(frozen=True)
class LostObject:
    """An object that existed, and whose file is damaged or missing."""

    key: Key
    uid: str
    """Empty where it is not known any more."""
    problem: str
    """The file, and what is wrong with it."""


@dataclass(frozen=True)
class LoadedObjects:
    """Everything that a storage holds."""

    objects: Sequence[StoredObject] = ()
    lost: Sequence[LostObject] = ()
    problems: Sequence[str] = ()
    """Damage that belongs to no object."""


class ObjectStorage(Protocol):
    """The storage in which objects survive the process.

    A write is durable when it returns; an OSError means that nothing changed.
    """

    def load(self) -> LoadedObjects: ...

    def save(self, resource: Object, intents: Mapping[str, Intent]) -> None: ...

    def drop(self, key: Key) -> None: ...

    def probe(self) -> None: ...


class MemoryOnly:
    """A storage that stores nothing."""

    def load(self) -> LoadedObjects:
        return LoadedObjects()

    def save(self, resource: Object, intents: Mapping[str, Intent]) -> None:
        """Do nothing."""

    def drop(self, key: Key) -> None:
        """Do nothing."""

    def probe(self) -> None:
        """Do nothing."""


class StateFolderError(ServerError):
    """The state folder cannot be written (full disk, lost mount): the write did not happen, and may succeed later."""
