"""Paths of an InferenceDeployment's model that its engines' pods cannot have: out of a volume, or in an empty folder.

A path below no mount may be part of the image (on the embedded cluster: of this machine), so it is left alone. The CRD
has no room for these rules.

Pure; called by `reconcile/intent`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from stoker.operator.domain.pod_paths import SCRATCH, mounts_of

Section = Mapping[str, Any]


def misplaced_model(spec: Section) -> list[str]:
    """Return one line per problem of `model.uri`, with its value and what is allowed.

    Args:
        spec: of an InferenceDeployment as stored, camelCase, with or without defaults.
    """
    uri = (spec.get("model") or {}).get("uri") or ""
    scheme, _, path = uri.partition("://")
    if scheme not in ("file", "pvc"):
        return []
    if ".." in path.split("/"):
        return [f"spec.model.uri {uri} leaves its volume by ..; allowed: a path without .."]
    return list(_in_empty_folders(uri, path, spec)) if scheme == "file" else []


def _in_empty_folders(uri: str, path: str, spec: Section) -> Iterator[str]:
    """Yield a line for each pool whose pods have nothing at the path when they start."""
    place = PurePosixPath("/" + path.lstrip("/"))
    for pool in spec.get("pools") or ():
        around = [mount for mount in (*mounts_of(pool), *SCRATCH) if place.is_relative_to(mount)]
        nearest = max(around, key=len, default="")
        if nearest in SCRATCH and nearest not in mounts_of(pool):
            yield (
                f"spec.model.uri {uri}: {nearest} is an empty folder of each pod (pool {pool['name']}); allowed: a "
                "path in a volume of volumeMounts, or pvc://CLAIM/PATH"
            )
