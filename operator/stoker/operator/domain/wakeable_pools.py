"""Pools of an InferenceDeployment that go to zero: a request that a router holds wakes them, so routers must hold one.

The CRD has the rule for `holdSeconds`, and no room for this one. Pure; called by `reconcile/intent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pools_without_wake(spec: Mapping[str, Any]) -> list[str]:
    """Return one line per pool that no request could wake, with the value and what is allowed.

    Args:
        spec: of an InferenceDeployment as stored, camelCase, with or without defaults.
    """
    if (spec.get("router") or {}).get("maxHeldRequests", 1) > 0:
        return []
    return [
        f"spec.router.maxHeldRequests 0 holds no request that wakes pool {pool['name']}; allowed: 1 or more, or "
        "autoscaling.min above 0"
        for pool in spec.get("pools") or ()
        if _goes_to_zero(pool.get("autoscaling") or {})
    ]


def _goes_to_zero(autoscaling: Mapping[str, Any]) -> bool:
    return autoscaling.get("min", 1) == 0 and autoscaling.get("mode", "slo") in ("slo", "load")
