"""Names of new resources, the same for the same idempotency key. Pure."""

from __future__ import annotations

import hashlib
import re

MAX_JOB_NAME = 40
MAX_CHECKPOINT_NAME = 63
"""The longest names that the definitions of the kinds allow."""
KEY_DIGITS = 10
CONTINUED = "-go"
CONTINUATION = re.compile(rf"{CONTINUED}-[0-9a-f]{{{KEY_DIGITS}}}$")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def keyed_name(base: str, *parts: str, longest: int, suffix: str = "") -> str:
    """`base-DIGITS`, or with a suffix `base-suffix-DIGITS`; the digits depend on base, suffix and parts alone.

    A base that leaves no room within `longest` characters is cut; its digits are those of the whole.
    """
    digits = hashlib.sha256("\0".join((base + suffix, *parts)).encode()).hexdigest()[:KEY_DIGITS]
    room = longest - len(suffix) - KEY_DIGITS - 1
    return f"{base[:room].rstrip('-')}{suffix}-{digits}"


def continued_name(job: str, *parts: str) -> str:
    """The name of a job that goes on from another; that of one that went on itself does not grow."""
    return keyed_name(CONTINUATION.sub("", job), *parts, longest=MAX_JOB_NAME, suffix=CONTINUED)


def is_uid(text: str) -> bool:
    """Whether a job_id or checkpoint_id has the form of a UUID; else it is a name."""
    return UUID.fullmatch(text) is not None
