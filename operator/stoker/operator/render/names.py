"""Names of children: deterministic, unique by the owner's uid, short enough for a host name.

Pure. Called by every reconciler and renderer.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

LONGEST_STEM = 40


def short_hash(text: str, length: int = 5) -> str:
    """Return the first hex digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def stem(name: str, uid: str) -> str:
    """Return `<name>-<hash5>`, so that owners of the same name, one after the other, have different children."""
    return f"{name[:LONGEST_STEM].rstrip('-.')}-{short_hash(uid)}"


def trainer_pod_name(job: str, uid: str, attempt: int, node_rank: int) -> str:
    return f"{stem(job, uid)}-a{attempt}-{node_rank}"


def attempt_config_name(job: str, uid: str, attempt: int) -> str:
    return f"{stem(job, uid)}-a{attempt}"


def pod_address(pod_name: str, service: str, namespace: str) -> str:
    """Return the DNS name of a pod behind the headless Service of its `subdomain`."""
    return f"{pod_name}.{service}.{namespace}.svc"


def digest_of(value: Any, length: int = 10) -> str:
    """Return a hash of plain JSON data, for revisions and applied objects."""
    return short_hash(json.dumps(value, sort_keys=True, separators=(",", ":")), length)
