"""Admission of an object's metadata, with the API server's rules for names, labels, finalizers and owners.

Pure checks, called by the object store (`objects`) before it stores an object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.operator.cluster.interface import Invalid

MAX_ANNOTATION_BYTES = 256 * 1024
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_KEY_FORM = "an optional lower-case DNS name and /, then at most 63 letters, digits, '-', '_' and '.'"
_OWNER_FIELDS = ("apiVersion", "kind", "name", "uid")
_TEXTS = ("uid", "resourceVersion", "generateName", "creationTimestamp", "deletionTimestamp", "selfLink")
_STANDARD_FINALIZERS = ("orphan", "foregroundDeletion", "kubernetes")
_FIELDS = frozenset({
    *_TEXTS, "name", "namespace", "labels", "annotations", "finalizers", "ownerReferences", "generation",
    "deletionGracePeriodSeconds", "managedFields",
})  # fmt: skip


def check_metadata(metadata: Any) -> None:
    """Check the metadata of an object. Raises Invalid, naming the field, the value and what is allowed."""
    if not isinstance(metadata, Mapping):
        raise Invalid(f"metadata: a map is needed, got {metadata!r}")
    for problem in _problems(metadata):
        raise Invalid(f"metadata.{problem}")


def _problems(metadata: Mapping[str, Any]) -> Iterator[str]:
    for name in metadata:
        if name not in _FIELDS:
            yield f"{name}: unknown field, known are {', '.join(sorted(_FIELDS))}"
    if not _matches(_NAME, metadata.get("name")):
        yield f"name: a lower-case DNS name of at most 253 characters is needed, got {_shown(metadata.get('name'))}"
    if not _matches(_NAMESPACE, metadata.get("namespace")):
        wrong = _shown(metadata.get("namespace"))
        yield f"namespace: at most 63 lower-case letters, digits and '-' are needed, got {wrong}"
    for name in _TEXTS:
        if not isinstance(metadata.get(name, ""), str | None):
            yield f"{name}: a string is needed, got {_shown(metadata[name])}"
    yield from _label_problems(metadata.get("labels"))
    yield from _annotation_problems(metadata.get("annotations"))
    yield from _finalizer_problems(metadata.get("finalizers"))
    yield from _owner_problems(metadata.get("ownerReferences"))


def _label_problems(labels: Any) -> Iterator[str]:
    yield from _text_problems("labels", labels)
    for name, value in (labels or {}).items():
        if not _matches(_LABEL_VALUE, value):
            form = "at most 63 letters, digits, '-', '_' and '.', the first and last a letter or digit"
            yield f"labels.{name}: {form}, are needed, got {_shown(value)}"


def _annotation_problems(annotations: Any) -> Iterator[str]:
    yield from _text_problems("annotations", annotations)
    size = sum(len(name.encode()) + len(value.encode()) for name, value in (annotations or {}).items())
    if size > MAX_ANNOTATION_BYTES:
        yield f"annotations: at most {MAX_ANNOTATION_BYTES} bytes are allowed, got {size}"


def _text_problems(field: str, texts: Any) -> Iterator[str]:
    """What is wrong with a map of strings by qualified names."""
    if not isinstance(texts, Mapping | None):
        yield f"{field}: a map of strings is needed, got {_shown(texts)}"
    for name, value in (texts or {}).items():
        if not _matches(_KEY, name):
            yield f"{field}: a key is {_KEY_FORM}, got {_shown(name)}"
        if not isinstance(value, str):
            yield f"{field}.{name}: a string is needed, got {_shown(value)}"


def _finalizer_problems(finalizers: Any) -> Iterator[str]:
    if not isinstance(finalizers, list | tuple | None):
        yield f"finalizers: a list of names is needed, got {_shown(finalizers)}"
    for index, name in enumerate(finalizers or ()):
        if not _matches(_KEY, name) or ("/" not in name and name not in _STANDARD_FINALIZERS):
            yield f"finalizers[{index}]: a name as example.com/name is needed, got {_shown(name)}"


def _owner_problems(owners: Any) -> Iterator[str]:
    if not isinstance(owners, list | tuple | None):
        yield f"ownerReferences: a list is needed, got {_shown(owners)}"
    for index, owner in enumerate(owners or ()):
        given = owner if isinstance(owner, Mapping) else {}
        for name in _OWNER_FIELDS:
            if not isinstance(given.get(name), str) or not given[name]:
                yield f"ownerReferences[{index}].{name}: a string is needed, got {_shown(given.get(name))}"


def _matches(form: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and form.fullmatch(value) is not None


def _shown(value: Any) -> str:
    """The value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
