"""Which objects and warnings belong to those that a command follows, in a namespace that others use too. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

Object = Mapping[str, Any]


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


def is_about(event: Object, shown: Collection[Name]) -> bool:
    """Whether an event is about a shown object, or about what carries its name, as its pods and claims do."""
    about = event["involvedObject"]
    named = [one.name for one in shown]
    own = (about["kind"], about["name"]) in {(one.kind, one.name) for one in shown}
    return own or any(str(about["name"]).startswith(f"{name}-") for name in named)
