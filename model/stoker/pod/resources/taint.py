"""Taints of nodes and devices, and the tolerations that let pods pass. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_REPELLING = frozenset({"NoSchedule", "NoExecute"})


def repels(taints: Iterable[Mapping[str, Any]], tolerations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the first taint, of a node or of a device, that keeps pods away and is not tolerated."""
    keeping = (taint for taint in taints if taint.get("effect") in _REPELLING)
    return next((taint for taint in keeping if not any(_tolerates(found, taint) for found in tolerations)), None)


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key")
    if toleration.get("operator", "Equal") == "Exists":
        return key in (None, "", taint.get("key"))
    return bool(key == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or ""))
