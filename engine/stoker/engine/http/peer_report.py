"""What an engine reports of itself as a peer of others: in `GET /load` to routers, in `/status` to the operator.

Computed from the core's newest report on other engines.
"""

from __future__ import annotations

from typing import Any

from stoker.engine.core.stats import TransferStats

TRANSFER_FAILURES = ("unreachable", "lost", "silent", "incompatible", "transport", "damaged", "late")
"""Reasons of fall-backs that tell of a link or a peer that fails, not of one that is busy or has nothing to do."""


def peer_of(transfer: TransferStats | None) -> dict[str, Any] | None:
    """What routers, and the operator, know of an engine as a peer of others; None without hand-over."""
    if transfer is None:
        return None
    fastest = max(transfer.rates.values(), default=None)
    return {
        "endpoint": transfer.endpoint,
        "epoch": transfer.epoch,
        "fingerprint": transfer.fingerprint,
        "block_size": transfer.block_size,
        "block_bytes": transfer.block_bytes,
        "transports": list(transfer.transports),
        "host_id": transfer.host_id,
        "zone_slots": transfer.zone_slots,
        "free_slots": transfer.free_slots,
        "handover_s": transfer.handover_s,
        "link_bytes_per_s": fastest,
        "receiving": transfer.receiving,
        "helping": transfer.helping,
        **({"copies": [copy._asdict() for copy in transfer.copies]} if transfer.copies else {}),
    }


def split_counts(transfer: TransferStats | None) -> dict[str, int]:
    """The requests whose prompt another engine was to compute, since the start, and those whose transfer failed."""
    if transfer is None:
        return {"splits": 0, "failed_splits": 0}
    failed = sum(transfer.fallbacks.get(reason, 0) for reason in TRANSFER_FAILURES)
    return {"splits": sum(transfer.outcomes.values()), "failed_splits": failed}


def transfer_status(transfer: TransferStats | None) -> dict[str, Any] | None:
    """The `transfer` field of `/status`: the peer, with the transport in use, what was lost and what was refused."""
    peer = peer_of(transfer)
    if transfer is None or peer is None:
        return None
    used = max(transfer.bytes, key=lambda name: transfer.bytes[name], default=None)
    return peer | {
        "transport": used if used is not None and transfer.bytes[used] else None,
        "bytes_per_s": dict(transfer.rates),
        "unmet": transfer.unmet,
        "facts": dict(transfer.facts),
        "avoided": dict(transfer.avoided),
        "outcomes": dict(transfer.outcomes),
        "fallbacks": {reason: count for reason, count in transfer.fallbacks.items() if count},
        "helps": dict(transfer.helps),
        "refused_blocks": dict(transfer.refused),
    }
