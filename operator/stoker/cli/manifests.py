"""Read manifests from files, folders and standard input: YAML or JSON, several documents each.

No state. Called by `local` and `train`; the server checks what the objects contain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from stoker.cli.exit_status import WRONG_INPUT
from stoker.cli.manifest_yaml import documents, first_lines
from stoker.cli.targets import fail

SUFFIXES = (".yaml", ".yml", ".json")
FIRST = ("PersistentVolumeClaim", "ConfigMap", "Secret")
"""Kinds that are applied first, because others mount them."""


class ManifestError(ValueError):
    """A file cannot be read as manifests; the message names it."""


def read_manifests(paths: Sequence[Path], namespace: str | None = None) -> list[dict[str, Any]]:
    """Read all objects, those that others mount first. `-` is standard input; a folder is read in the order of its file
    names.

    Raises:
        ManifestError.
    """
    found = [document for path in paths for document in _documents(path)]
    if not found:
        raise ManifestError(f"no manifest in {', '.join(map(str, paths))}")
    placed = [placed_in(document, namespace) for document in found]
    return sorted(placed, key=lambda document: document.get("kind") not in FIRST)


def manifests_or_end(paths: Sequence[Path], namespace: str | None = None) -> list[dict[str, Any]]:
    """Read all objects; ends the command where a file cannot be read."""
    try:
        return read_manifests(paths, namespace)
    except ManifestError as error:
        fail(str(error), WRONG_INPUT)


def placed_in(document: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    """The manifest in its own namespace; in `namespace`, else in `default`, where it has none."""
    metadata = document["metadata"]
    return {**document, "metadata": {**metadata, "namespace": metadata.get("namespace") or namespace or "default"}}


def claim_manifest(name: str, folder: Path, namespace: str) -> dict[str, Any]:
    """Build a PersistentVolumeClaim that stands for a folder of this machine."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": {"stoker.dev/local-folder": str(folder.expanduser().resolve())},
        },
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    if str(path) == "-":
        yield from _parsed("standard input", sys.stdin.read())
        return
    try:
        files = [file for file in path.iterdir() if file.suffix in SUFFIXES] if path.is_dir() else None
        content = path.read_text(encoding="utf-8") if files is None else ""
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not a text in UTF-8: {error}") from error
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from error
    if files is None:
        yield from _parsed(str(path), content)
    for file in sorted(files or ()):
        yield from _documents(file)


def _parsed(where: str, content: str) -> Iterator[dict[str, Any]]:
    try:
        found, lines = documents(content), first_lines(content)
    except yaml.MarkedYAMLError as error:
        raise ManifestError(f"{where}{_place(error)}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ManifestError(f"{where}: {error}") from error
    for document, line in zip(found, lines, strict=True):
        if document is not None:
            yield from _objects(f"{where}:{line}", document)


def _place(error: yaml.MarkedYAMLError) -> str:
    """Format the position as `:LINE:COLUMN`, which editors understand."""
    mark = error.problem_mark or error.context_mark
    return f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""


def _objects(where: str, document: Any) -> Iterator[dict[str, Any]]:
    """Yield the object of a document, or the items of a List."""
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise ManifestError(f"{where}: a manifest needs apiVersion, kind and metadata.name")
    if document["kind"] == "List":
        items = document.get("items") or ()
        if not isinstance(items, list | tuple):
            raise ManifestError(f"{where}: List: items: a list of objects is needed, got {items!r}")
        for item in items:
            yield from _objects(where, item)
        return
    if wrong := wrong_place(document.get("metadata")):
        raise ManifestError(f"{where}: {document['kind']}: {wrong}")
    yield document


def wrong_place(metadata: Any) -> str:
    """Say what is wrong about the name or the namespace of a manifest; empty where both are texts, or none is given."""
    name, namespace = (metadata.get("name"), metadata.get("namespace")) if isinstance(metadata, dict) else (None, None)
    if not isinstance(name, str) or not name:
        wrong = "" if name is None else f", a text, not {name!r} (write it in quotes)"
        return f"metadata.name is needed{wrong}"
    if namespace is not None and not isinstance(namespace, str):
        return f"metadata.namespace is a text, not {namespace!r} (write it in quotes)"
    return ""
