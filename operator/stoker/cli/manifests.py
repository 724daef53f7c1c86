"""Reading manifests: files, folders and standard input, YAML or JSON, several documents each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

SUFFIXES = (".yaml", ".yml", ".json")
FIRST = ("PersistentVolumeClaim", "ConfigMap", "Secret")
"""Applied before whatever may mount them."""


class ManifestError(ValueError):
    """A file cannot be read as manifests; the message names it."""


def read_manifests(paths: Sequence[Path], namespace: str | None = None) -> list[dict[str, Any]]:
    """All objects, those that others mount first. `-` is standard input; a folder gives its manifests in the order of their names.

    Raises:
        ManifestError.
    """
    found = [document for path in paths for document in _documents(path)]
    if not found:
        raise ManifestError(f"no manifest in {', '.join(map(str, paths))}")
    placed = [_placed(document, namespace) for document in found]
    return sorted(placed, key=lambda document: document.get("kind") not in FIRST)


def claim_manifest(name: str, folder: Path, namespace: str) -> dict[str, Any]:
    """A PersistentVolumeClaim that stands for a folder of this machine."""
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
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        for file in files:
            yield from _documents(file)
        return
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: {error}") from error
    yield from _parsed(str(path), content)


def _parsed(where: str, content: str) -> Iterator[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        documents = list(yaml.load_all(content, Loader=loader))
    except yaml.YAMLError as error:
        raise ManifestError(f"{where}: {error}") from error
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
            raise ManifestError(f"{where}: a manifest needs apiVersion, kind and metadata")
        if document.get("kind") == "List":
            yield from document.get("items") or ()
        else:
            yield document


def _placed(document: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    metadata = document["metadata"]
    return {**document, "metadata": {**metadata, "namespace": metadata.get("namespace") or namespace or "default"}}
