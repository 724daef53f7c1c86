"""What a user's `podTemplate` may carry: labels, annotations and a spec. What is Stoker's own is refused by name.

Labels decide which gang, replica or revision a pod belongs to. Given by a user they would make the operator drain,
count or delete the wrong pods.

Pure; called by `unsupported`, and by the rendering of pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stoker.operator.domain.labels import PREFIX

_SECTIONS = ("metadata", "spec")
_METADATA = ("labels", "annotations")
_LISTS = ("containers", "volumes")
_QUEUES = ("kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-name")
"""Labels by which Kueue takes single pods of a gang that it does not know as one."""


def refused_templates(kind: str, spec: Mapping[str, Any]) -> list[str]:
    """One line for each member of a `podTemplate` that has no effect, or would mislead operator or queue."""
    return [line for path, template in _templates(spec, "spec") for line in _refused(kind, path, template)]


def own_metadata(template: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a pod: the user's labels and annotations below those of the operator."""
    merged = dict(own)
    for name in _METADATA:
        wanted = _mapping(_mapping(template, "metadata"), name)
        allowed = {key: value for key, value in wanted.items() if not is_reserved(key) and value is not None}
        if allowed:
            merged[name] = {**allowed, **(own.get(name) or {})}
    return merged


def is_reserved(key: str) -> bool:
    """Whether a label or annotation is Stoker's own."""
    return key.partition("/")[0] == PREFIX


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A member that should be an object; empty where it is none."""
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def _templates(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _templates(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "podTemplate":
                yield from _templates(inner, f"{path}.{name}")
            elif isinstance(inner, Mapping):
                yield f"{path}.{name}", inner


def _refused(kind: str, path: str, template: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(template.keys() - set(_SECTIONS)):
        yield f"{path}.{name} is no part of a pod's template; allowed: {', '.join(_SECTIONS)}"
    for name in _SECTIONS:
        if not isinstance(template.get(name, {}), Mapping):
            yield f"{path}.{name} {template[name]!r} is no object"
    yield from _refused_spec(f"{path}.spec", _mapping(template, "spec"))
    yield from _refused_metadata(kind, f"{path}.metadata", _mapping(template, "metadata"))


def _refused_spec(path: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """What would take the operator's own container, volumes or recovery away."""
    for name in _LISTS:
        items = spec.get(name, ())
        if not isinstance(items, list | tuple) or not all(
            isinstance(item, Mapping) and "name" in item for item in items
        ):
            yield f"{path}.{name} needs a list of objects with a name: it is merged by name"
    if spec.get("restartPolicy", "Never") != "Never":
        yield f"{path}.restartPolicy {spec['restartPolicy']} is not allowed: Stoker starts ended pods again itself"


def _refused_metadata(kind: str, path: str, metadata: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(metadata.keys() - set(_METADATA)):
        yield f"{path}.{name} is set by Stoker; allowed: {', '.join(_METADATA)}"
    for section in _METADATA:
        for key in sorted(_mapping(metadata, section)):
            if is_reserved(key):
                yield f"{path}.{section} {key} is set by Stoker: use a name without {PREFIX}/"
            elif section == "labels" and kind == "TrainingJob" and key in _QUEUES:
                yield f"{path}.labels {key} splits the gang: use scheduling.backend kueue with queueName"
