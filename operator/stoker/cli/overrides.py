"""`--set PATH=VALUE`: changes of manifests on the command line. Pure.

PATH is dotted, with list items by number: `spec.training.totalSteps`, `spec.pools[0].replicas`. Where the manifests
have several objects with a `spec`, KIND/NAME: stands before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from stoker.cli.manifest_yaml import documents
from stoker.cli.manifests import wrong_place
from stoker.operator.cluster.kinds import KINDS, find_kind

_FORM = re.compile(r"(?:(?P<kind>[A-Za-z]+)/(?P<name>[a-z0-9.-]+):)?(?P<path>[^=:/]+)=(?P<value>.*)", re.DOTALL)
_STEP = re.compile(r"\.?([A-Za-z_][\w/-]*)|\[(\d+)\]")


class WrongOverride(ValueError):
    """An override cannot be parsed, or does not fit the manifests; the message names it."""


@dataclass(frozen=True)
class Override:
    """One value that replaces what a manifest has."""

    text: str
    kind: str | None
    name: str | None
    path: tuple[str | int, ...]
    value: Any


def parse_override(text: str) -> Override:
    """Parse `[KIND/NAME:]PATH=VALUE`; the value is YAML, so `2` is a number and `"2"` is not.

    Raises:
        WrongOverride.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise WrongOverride(f"--set {text}: [KIND/NAME:]PATH=VALUE is needed, such as spec.training.totalSteps=200")
    try:
        kind = find_kind(found["kind"]).name if found["kind"] else None
        values = documents(found["value"]) or [None]
    except (ValueError, yaml.YAMLError) as error:
        raise WrongOverride(f"--set {text}: {error}") from error
    return Override(text, kind, found["name"], _path(text, found["path"]), values[0])


def override(objects: Sequence[dict[str, Any]], overrides: Sequence[Override]) -> list[dict[str, Any]]:
    """The manifests with each override in the one object that it is for.

    Raises:
        WrongOverride: it is for none or several, or leaves the object no name.
    """
    changed = list(objects)
    for one in overrides:
        index = _object_of(changed, one)
        changed[index] = _with(changed[index], one.path, one)
        if wrong := wrong_place(changed[index]["metadata"]):
            raise WrongOverride(f"--set {one.text}: {wrong}")
    return changed


def _path(text: str, path: str) -> tuple[str | int, ...]:
    steps: list[str | int] = []
    at = 0
    while at < len(path):
        found = _STEP.match(path, at)
        if found is None:
            raise WrongOverride(f"--set {text}: {path!r} is no path such as spec.pools[0].replicas")
        steps.append(int(found[2]) if found[2] else found[1])
        at = found.end()
    if steps[0] not in ("spec", "metadata", "data"):
        raise WrongOverride(f"--set {text}: a path begins with spec, metadata or data, not {steps[0]}")
    return tuple(steps)


def _object_of(objects: Sequence[dict[str, Any]], one: Override) -> int:
    """The index of the object that an override is for: the named one, else the only one of Stoker's kinds."""
    ours = [index for index, found in enumerate(objects) if found["kind"] in KINDS and KINDS[found["kind"]].ours]
    fitting = [
        index
        for index in (ours if one.kind is None else range(len(objects)))
        if one.kind is None or (objects[index]["kind"], objects[index]["metadata"]["name"]) == (one.kind, one.name)
    ]
    if len(fitting) != 1:
        there = ", ".join(f"{objects[i]['kind'].lower()}/{objects[i]['metadata']['name']}" for i in ours)
        what = "no object of that name" if not fitting else f"{len(fitting)} objects; write KIND/NAME: before the path"
        raise WrongOverride(f"--set {one.text}: the manifests have {what} (there are {there or 'none of Stoker'})")
    return fitting[0]


def _with(found: Any, path: Sequence[str | int], one: Override) -> Any:
    """A copy of a value in which the value at a path is replaced; absent mappings on the way are made."""
    if not path:
        return one.value
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        if not isinstance(found, list) or step >= len(found):
            what = f"a list of {len(found)}" if isinstance(found, list) else "no list"
            raise WrongOverride(f"--set {one.text}: there is no item {step}: the value is {what}")
        return [_with(item, rest, one) if index == step else item for index, item in enumerate(found)]
    if found is not None and not isinstance(found, dict):
        raise WrongOverride(f"--set {one.text}: {step} is no field of {found!r}")
    return {**(found or {}), step: _with((found or {}).get(step), rest, one)}
