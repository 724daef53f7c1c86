"""Whether the tiers below the engines' caches work: the store that they share, and their disks. Pure.

A tier that fails costs time and no answer, so it is told and changes nothing else. Called by `status`.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import is_ready
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView

STORE_UNAVAILABLE = "StoreUnavailable"
"""Condition while a ready engine cannot use its store or its disk tier."""
TIERS = {"store": "StoreFailed", "disk_tier": "DiskTierFailed"}
"""Field of an engine's `/status`, and the condition's reason."""
WORKING = ("ok", "opening")
"""States without trouble; a store of several volumes names those that are not `ok`."""


def store_condition(view: DeploymentView) -> Condition:
    """`StoreUnavailable`: true with the first engine's words, absent when there is nothing to say."""
    for pod in sorted(filter(is_ready, view.engines), key=lambda found: str(found["metadata"]["name"])):
        for tier, reason in TIERS.items():
            troubles = [part for part in _state(view, pod, tier).split("; ") if not part.endswith(WORKING)]
            if troubles:
                name = pod["metadata"]["name"]
                text = f"{name} computes what it would load: {tier}.state is {'; '.join(troubles)}"
                return Condition(STORE_UNAVAILABLE, True, reason, shortened(text))
    return Condition(STORE_UNAVAILABLE, None, "Working")


def _state(view: DeploymentView, pod: Object, tier: str) -> str:
    """What the engine says of a tier; `ok` where it has none or has not reported."""
    report = view.seen.reports.get(pod["metadata"]["uid"]) or {}
    found = report.get(tier)
    return str(found.get("state", "ok")) if isinstance(found, Mapping) else "ok"
