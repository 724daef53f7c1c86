"""The label that remembers what was applied, so that a converged child costs no API call.

Pure. The reconcilers compare, and the executor sets the label.
"""

from __future__ import annotations

import hashlib
import json

from stoker.operator.domain.labels import APPLIED_HASH
from stoker.operator.domain.plan import Object


def applied_hash(body: Object) -> str:
    """16 hex digits over the whole intent, without the label itself."""
    metadata = dict(body["metadata"])
    metadata["labels"] = {name: value for name, value in (metadata.get("labels") or {}).items() if name != APPLIED_HASH}
    canonical = json.dumps({**body, "metadata": metadata}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def with_applied_hash(body: Object) -> Object:
    """The same intent with its label; one that has the label already is returned as it is."""
    labels = body["metadata"].get("labels") or {}
    if APPLIED_HASH in labels:
        return body
    labelled = {**labels, APPLIED_HASH: applied_hash(body)}
    return {**body, "metadata": {**body["metadata"], "labels": labelled}}


def is_applied(body: Object, live: Object | None) -> bool:
    """Whether `live` carries the hash of `body` and is not on its way out."""
    if live is None or live["metadata"].get("deletionTimestamp"):
        return False
    wanted = with_applied_hash(body)["metadata"]["labels"][APPLIED_HASH]
    return bool((live["metadata"].get("labels") or {}).get(APPLIED_HASH) == wanted)
