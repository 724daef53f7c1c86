"""Admission: check and complete an object as the API server does before it stores it, from the same generated CRDs.

Pure: no webhook, no cluster.

Called by the local supervisor and by `stoker train`; on Kubernetes the API server does this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from stoker.operator.admission.cel_rules import Rules
from stoker.operator.admission.defaults import with_defaults
from stoker.operator.admission.status_cause import InvalidObject, StatusCause, object_name, status_cause
from stoker.operator.admission.structure import Structure
from stoker.operator.admission.unknown import unknown_fields

Object = dict[str, Any]


class _Kind:
    """Compiled schema of one kind."""

    def __init__(self, crd: Mapping[str, Any]) -> None:
        spec = crd["spec"]
        version = next(one for one in spec["versions"] if one["storage"])
        self.name: str = spec["names"]["kind"]
        self.api_version = f"{spec['group']}/{version['name']}"
        self.schema: Mapping[str, Any] = version["schema"]["openAPIV3Schema"]
        self.structure = Structure(self.schema)
        self.rules = Rules(self.schema)


class Admission:
    """Checks and completes objects of the kinds of its CRDs; objects of other kinds pass unchanged."""

    def __init__(self, crds: Iterable[Mapping[str, Any]]) -> None:
        self._kinds = {kind.name: kind for kind in map(_Kind, crds)}

    @classmethod
    def from_folder(cls, folder: Path) -> Admission:
        """Read the CRD files of a folder.

        Raises:
            ValueError: the folder has none, or a rule of one does not compile.
        """
        paths = sorted(folder.glob("*.yaml"))
        if not paths:
            raise ValueError(f"{folder}: the folder has no CRD files (*.yaml)")
        return cls(yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER) for path in paths)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(self._kinds)

    def admit(self, new: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> Object:
        """Return the object as it would be stored, with defaults; neither argument is changed.

        Args:
            new: the whole object after the write (a patch or a subresource is merged by the caller).
            old: the stored object on an update; None on a create.

        Raises:
            InvalidObject: names every wrong field. As on the API server, rules run only where the structure is right.
        """
        kind = self._kinds.get(str(new.get("kind", "")))
        if kind is None:
            return dict(new)
        if refused := _wrong_version(new, kind) or list(unknown_fields(_without_metadata(new), kind.schema)):
            raise InvalidObject(kind.name, object_name(new), refused)
        found: Object = with_defaults(dict(new), kind.schema)
        before = None if old is None else with_defaults(dict(old), kind.schema)  # as an API server reads what it stored
        refused = kind.structure.causes(found) or list(kind.rules.causes(found, before))
        if refused:
            raise InvalidObject(kind.name, object_name(new), refused)
        return found


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _wrong_version(new: Mapping[str, Any], kind: _Kind) -> list[StatusCause]:
    given = new.get("apiVersion")
    if given == kind.api_version:
        return []
    return [status_cause("apiVersion", "FieldValueInvalid", f'"{given}"', f"must be {kind.api_version}")]


def _without_metadata(found: Mapping[str, Any]) -> Object:
    """Return the object without metadata, whose fields are Kubernetes' own and not in the CRD."""
    return {name: value for name, value in found.items() if name != "metadata"}
