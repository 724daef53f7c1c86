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


RESUME_VALUES = "stoker.dev/resume-values"
"""Annotation of a job that went on or began by a resume with a key: the values that were asked for, as JSON."""


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


def resume_values(asked: Mapping[str, Any]) -> str:
    """The values of a resume for the annotation; fields that were left out are left out."""
    return json.dumps({name: value for name, value in asked.items() if value is not None}, sort_keys=True)


def changed_resume(asked: Mapping[str, Any], job: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field of a resume that differs from the one that a job remembers: (field, before, now).

    None: no field does, or the job was made by a release that noted none.
    """
    noted = (job["metadata"].get("annotations") or {}).get(RESUME_VALUES)
    before = json.loads(noted) if noted is not None else dict(asked)
    return next(((name, before.get(name), now) for name, now in asked.items() if before.get(name) != now), None)


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
