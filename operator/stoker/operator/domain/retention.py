"""The Checkpoints among which `checkpoint.maxToKeep` of a job chooses. Pure.

On objects as stored: each save that waits for its verification looks at all others of its job, in each pass.
"""

from __future__ import annotations

from stoker.operator.domain.labels import EXPIRED
from stoker.operator.domain.plan import Object

_LOST = ("Failed", "Corrupt", "Deleting", "Deleted")
"""Phases of Checkpoints whose data is of no use, or is about to go."""


def takes_place(found: Object) -> bool:
    """Whether a Checkpoint takes one of the places, once it is verified.

    Pinned, used and imported ones stay anyway. Those that are being deleted, or were given up, are gone soon.
    """
    status, metadata = found.get("status") or {}, found["metadata"]
    leaving = metadata.get("deletionTimestamp") or EXPIRED in (metadata.get("labels") or {})
    return not (stays_anyway(found) or leaving or status.get("phase") in _LOST)


def stays_anyway(found: Object) -> bool:
    """Whether a Checkpoint is kept whatever `maxToKeep` allows."""
    spec, status = found["spec"], found.get("status") or {}
    return bool(spec.get("pinned") or status.get("inUseBy") or (spec.get("source") or {}).get("import"))
