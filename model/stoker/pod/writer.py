"""The writer of checkpoint folders: 8 hex digits that name one attempt of one job.

The operator names writers. The trainer computes those of earlier attempts, whose unfinished saves it removes. Pure.
"""

from __future__ import annotations

import hashlib


def writer_of(uid: str, attempt: int) -> str:
    """Return 8 hex digits of job uid and attempt, the suffix of every checkpoint folder of this attempt."""
    return hashlib.sha256(f"{uid}/{attempt}".encode()).hexdigest()[:8]


def writers_until(uid: str, attempt: int) -> list[str]:
    """Return the writers of an attempt and of all before it."""
    return [writer_of(uid, number) for number in range(attempt + 1)]
