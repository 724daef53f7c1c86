"""Names of new resources, the same for the same idempotency key. Pure."""

from __future__ import annotations

import hashlib
import re

MAX_NAME = 63
KEY_DIGITS = 10
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def keyed_name(base: str, *parts: str) -> str:
    """`base-DIGITS`: the digits depend on base and parts alone. At most 63 characters."""
    joined = "\0".join((base, *parts))
    digits = hashlib.sha256(joined.encode()).hexdigest()[:KEY_DIGITS]
    return f"{base[: MAX_NAME - KEY_DIGITS - 1].rstrip('-')}-{digits}"


def is_uid(text: str) -> bool:
    """Whether a job_id or checkpoint_id has the form of a UUID; else it is a name."""
    return UUID.fullmatch(text) is not None
