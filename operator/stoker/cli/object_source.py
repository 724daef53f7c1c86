"""Objects of a cluster as the verbs that print them ask for them: an API server, or the supervisor of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from stoker.cli.exit_status import FAILED
from stoker.cli.near_match import did_you_mean
from stoker.cli.targets import Target, fail
from stoker.operator.cluster.kinds import Kind


class Missing(NamedTuple):
    """Why a named object was not found."""

    reason: str


class ObjectSource(Protocol):
    """The objects of one namespace, or of all. A call that fails ends the command."""

    @property
    def place(self) -> str:
        """Name where it looks, for messages: `namespace default`."""

    def listed(self, kind: Kind, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """List the objects of a kind that have these labels."""

    def find(self, target: Target) -> dict[str, Any] | Missing:
        """Find the object that a target names."""


def named(source: ObjectSource, target: Target) -> dict[str, Any]:
    """The object that a target names; ends the command where there is none, with a name that is near."""
    found = source.find(target)
    if isinstance(found, Missing):
        fail(missing_text(source, target, found), FAILED)
    return found


def missing_text(source: ObjectSource, target: Target, missing: Missing) -> str:
    """Say that an object does not exist, and which one was probably meant."""
    names = [item["metadata"]["name"] for item in source.listed(target.kind, {})]
    return f"{missing.reason}{did_you_mean(target.name or '', names)}"


def typed(kind: Kind, item: Mapping[str, Any]) -> dict[str, Any]:
    """A listed object with its type, which an API server leaves out of lists of its own kinds."""
    return {"apiVersion": kind.api_version, "kind": kind.name, **item}
