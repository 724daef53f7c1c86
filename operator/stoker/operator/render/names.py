"""Names of children: deterministic, told apart by the owner's uid, short enough for a host name."""

from __future__ import annotations

import hashlib
import json
from typing import Any

LONGEST_STEM = 40


def short_hash(text: str, length: int = 5) -> str:
    """The first hex digits of a SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def stem(name: str, uid: str) -> str:
    """`<name>-<hash5>`: one namesake after another gets other children."""
    return f"{name[:LONGEST_STEM].rstrip('-.')}-{short_hash(uid)}"


def trainer_pod_name(job: str, uid: str, attempt: int, node_rank: int) -> str:
    return f"{stem(job, uid)}-a{attempt}-{node_rank}"


def attempt_config_name(job: str, uid: str, attempt: int) -> str:
    return f"{stem(job, uid)}-a{attempt}"


def writer_of(uid: str, attempt: int) -> str:
    """8 hex digits of job uid and attempt: the suffix of every checkpoint folder that this attempt writes."""
    return short_hash(f"{uid}/{attempt}", 8)


def pod_address(pod_name: str, service: str, namespace: str) -> str:
    """DNS name of a pod behind a headless Service whose `subdomain` it carries."""
    return f"{pod_name}.{service}.{namespace}.svc"


def digest_of(value: Any, length: int = 10) -> str:
    """Hash of plain JSON data, for revisions and applied objects."""
    return short_hash(json.dumps(value, sort_keys=True, separators=(",", ":")), length)
