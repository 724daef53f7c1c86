"""Which objects and warnings belong to those that a command follows, in a namespace that others use too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from stoker.cli.targets import belongs_to

Object = Mapping[str, Any]
_BY_PATH = "pvc://"


class Name(NamedTuple):
    kind: str
    namespace: str
    name: str


def name_of(found: Object) -> Name:
    return Name(found["kind"], found["metadata"]["namespace"], found["metadata"]["name"])


def belongs(found: Object, wanted: Collection[Name]) -> bool:
    """Whether an object is one of the wanted ones, or a checkpoint of a wanted job."""
    name = name_of(found)
    if name in wanted:
        return True
    source = (found.get("spec") or {}).get("source") or {}
    job = source.get("jobRef") or (source.get("save") or {}).get("jobRef") or {}
    return name.kind == "Checkpoint" and Name("TrainingJob", name.namespace, job.get("name", "")) in wanted


class EventScope:
    """Decides which events are about the followed objects: by uid, never by a name that begins alike.

    Args:
        read: reads an object by kind, namespace and name; None where it cannot be read any more. Called once for each
            object of which an event is told.
    """

    def __init__(self, read: Callable[[str, str, str], Object | None]) -> None:
        self._read = read
        self._subjects: dict[str, Object | None] = {}
        """What events were about, by uid; their owners may be shown later."""

    def covers(self, event: Object, shown: Mapping[Name, Object]) -> bool:
        """Whether an event is about a shown object, about one that belongs to it, or about a claim that it names."""
        about = event["involvedObject"]
        name = Name(about["kind"], about.get("namespace", ""), about["name"])
        uid = about.get("uid", "")
        if uid in {found["metadata"]["uid"] for found in shown.values()}:
            return True
        if name.kind == "PersistentVolumeClaim":
            return any(name.namespace == one.namespace and name.name in claims_of(shown[one]) for one in shown)
        if uid not in self._subjects:
            self._subjects[uid] = self._read(*name)
        found = self._subjects[uid]
        if found is None or found["metadata"]["uid"] != uid:
            return False
        return any(belongs_to(one["metadata"]["uid"], found) for one in shown.values())


def claims_of(found: Object) -> set[str]:
    """Return the names of the PersistentVolumeClaims that an object's spec mounts, or reads by `pvc://CLAIM/PATH`."""
    return set(_claim_names(found.get("spec")))


def _claim_names(part: Any) -> Iterator[str]:
    if isinstance(part, str) and part.startswith(_BY_PATH):
        yield part.removeprefix(_BY_PATH).partition("/")[0]
    elif isinstance(part, Mapping):
        if isinstance(part.get("claimName"), str):
            yield part["claimName"]
        for inner in part.values():
            yield from _claim_names(inner)
    elif isinstance(part, (list, tuple)):
        for inner in part:
            yield from _claim_names(inner)
