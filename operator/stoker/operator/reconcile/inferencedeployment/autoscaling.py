"""Fields of `pools[].autoscaling` that have no effect, so that they are never ignored in silence. Pure."""

from __future__ import annotations

from stoker.operator.api.pool import Autoscaling, Pool
from stoker.operator.domain.conditions import Condition
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, pool_object_name

AUTOSCALING_LIMITED = "AutoscalingLimited"
"""Condition while an external scaler sets the replicas of a pool: the pool's bounds and goals are not enforced."""


def autoscaling_condition(view: DeploymentView) -> Condition:
    """`AutoscalingLimited`, true with the fields and values that have no effect, absent when there are none."""
    lines = [
        _fields_without_effect(view, pool, pool.autoscaling)
        for pool in view.deployment.spec.pools
        if pool.autoscaling is not None and pool.autoscaling.mode == "external"
    ]
    return Condition(AUTOSCALING_LIMITED, True if lines else None, "ExternalScaler", "; ".join(lines))


def _fields_without_effect(view: DeploymentView, pool: Pool, wanted: Autoscaling) -> str:
    values = {
        "min": wanted.min,
        "max": wanted.max,
        "ttftMs": wanted.ttft_ms,
        "itlMs": wanted.itl_ms,
        "scaleDownAfterSeconds": wanted.scale_down_after_seconds,
    }
    named = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    scaler = f"the scaler that writes /scale of EnginePool {pool_object_name(view.deployment, pool)}"
    return f"spec.pools[{pool.name}].autoscaling: {named} have no effect with mode external: configure them in {scaler}"
