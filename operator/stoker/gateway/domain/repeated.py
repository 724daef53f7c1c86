"""Whether a request asks for what a stored resource was made for. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FIXED = ("model", "modelFrom", "training", "optimization", "data")
"""Sections of a TrainingJob that cannot change, so that they show what the first request asked for."""


DIGEST = "stoker.dev/request-digest"
"""Annotation of a resource that was made with an Idempotency-Key: what its request asked for."""


RESUMED = "stoker.dev/resume-request"
"""Annotation of a suspended job that went on: `KEY.VALUES`, digests of the newest such request with a key."""


def request_digest(asked: Any) -> str:
    """Digest of a request's values; equal for equal values, whatever their order."""
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def is_repeated_resume(job: Mapping[str, Any], note: str) -> bool | None:
    """Whether a job went on for the request that would leave `note`; None when its key asked for something else."""
    known = str((job["metadata"].get("annotations") or {}).get(RESUMED) or "")
    if known.partition(".")[0] != note.partition(".")[0]:
        return False
    return True if known == note else None


def difference(asked: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """What a resource was made for that the one of a repeated request is not; empty when it is the same.

    Args:
        asked: the resource that the request would make, with its digest.
        stored: the resource that has its name.
    """
    wanted, made = asked.get("spec") or {}, stored.get("spec") or {}
    section = next((name for name in FIXED if not is_part_of(wanted.get(name), made.get(name))), "")
    digests = [(one["metadata"].get("annotations") or {}).get(DIGEST) for one in (asked, stored)]
    if digests[1] is None:  # made by a release that noted none
        return section
    return "" if digests[0] == digests[1] else section or "body"


def is_part_of(asked: Any, stored: Any) -> bool:
    """Whether the stored value is the asked one with defaults added. What was not asked for fits everything."""
    if asked is None:
        return True
    if isinstance(asked, Mapping):
        return isinstance(stored, Mapping) and all(is_part_of(value, stored.get(name)) for name, value in asked.items())
    if isinstance(asked, list):
        return isinstance(stored, list) and len(asked) == len(stored) and all(map(is_part_of, asked, stored))
    return bool(asked == stored)
