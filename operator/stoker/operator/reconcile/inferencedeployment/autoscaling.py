"""The autoscaler's decisions about the pools of a deployment: replicas, status, conditions, events. Pure.

The decisions come with the observation (`Observed.scaling`), made by the rule in `domain/autoscaling`. This is the one
writer of `/scale` in the modes in which Stoker scales; with `external` it never writes, and the EnginePool keeps its
pods within the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.operator.api.enginepool import EnginePool, ReplicaBounds
from stoker.operator.api.inferencedeployment import PoolSummary, ScalingDecision
from stoker.operator.api.pool import Autoscaling, Pool
from stoker.operator.domain.autoscaling.fixed import FixedPool, fixed_replicas
from stoker.operator.domain.autoscaling.record import BLOCKING, KEPT, DatedDecision
from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.plan import Event
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.inferencedeployment.role_flips import fresh_decision
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView

AUTOSCALING_LIMITED = "AutoscalingLimited"
"""Condition while a pool does not get what its scaler or its goals ask for: by a bound, or because of what the
autoscaler does not know or cannot reach."""


def wanted_replicas(view: DeploymentView, pool: Pool, live: EnginePool) -> int:
    """The replicas that `/scale` of a pool should have: the spec's without autoscaling, else as decided.

    Replicas that change their role need no write, so what is left of the change is written.
    """
    if pool.autoscaling is None:
        return pool.replicas
    if pool.autoscaling.mode == "fixed":
        return _fixed(view, pool, pool.autoscaling, live)
    newest = fresh_decision(view, pool)
    if pool.autoscaling.mode == "external" or newest is None:
        return live.spec.replicas
    return max(live.spec.replicas + newest.after - newest.before - newest.flips, 0)


def external_bounds(pool: Pool) -> ReplicaBounds | None:
    """The bounds of what an external scaler writes; None where Stoker scales."""
    settings = pool.autoscaling
    if settings is None or settings.mode != "external":
        return None
    return ReplicaBounds(min=settings.min, max=settings.max)


def _fixed(view: DeploymentView, pool: Pool, settings: Autoscaling, live: EnginePool) -> int:
    """A constant number, or that which follows from the decode pool's."""
    decode = next((found for found in view.deployment.spec.pools if found.role == "decode"), None)
    beside = None
    if pool.role == "prefill" and decode is not None and (other := view.engine_pool(decode)) is not None:
        bounds = decode.autoscaling
        follows = bounds is not None and bounds.mode == "fixed"
        lowest, most = (bounds.min, bounds.max) if bounds is not None and follows else (0, other.spec.bounded_replicas)
        beside = FixedPool("decode", decode.replicas, lowest, most, other.spec.bounded_replicas)
    return fixed_replicas(FixedPool(pool.role, pool.replicas, settings.min, settings.max, live.spec.replicas), beside)


def pool_decisions(view: DeploymentView, pool: Pool) -> tuple[ScalingDecision, ...]:
    """The last decisions for the status, with those that the status has from before a restart of the operator."""
    known = _known(view, pool)
    scaling = view.seen.scaling.get(pool.name)
    if pool.autoscaling is None or scaling is None:
        return known if pool.autoscaling is not None else ()
    fresh = [_written(found) for found in scaling.log]
    return (*(old for old in known if old not in fresh), *fresh)[-KEPT:]


def scaling_events(view: DeploymentView) -> tuple[Event, ...]:
    """An Event for each decision that the status does not have yet."""
    return tuple(
        Event("Warning" if found.reason in BLOCKING else "Normal", found.reason, _sentence(pool.name, found))
        for pool in view.deployment.spec.pools
        for found in pool_decisions(view, pool)
        if found not in _known(view, pool)
    )


def autoscaling_condition(view: DeploymentView) -> Condition:
    """`AutoscalingLimited`: true with what does not hold or is not reached, absent when there is nothing."""
    found = [(pool, pool.autoscaling) for pool in view.deployment.spec.pools if pool.autoscaling is not None]
    limits = [limit for pool, settings in found if (limit := _limit(view, pool, settings)) is not None]
    reason = limits[0][0] if limits else "Enforced"
    return Condition(AUTOSCALING_LIMITED, True if limits else None, reason, "; ".join(text for _, text in limits))


def _limit(view: DeploymentView, pool: Pool, settings: Autoscaling) -> tuple[str, str] | None:
    """Reason and line of one pool."""
    if settings.mode == "external":
        return _out_of_bounds(view, pool, settings)
    scaling = view.seen.scaling.get(pool.name)
    if scaling is None:
        return None
    newest = scaling.newest
    if newest.infeasible is not None:
        return "InfeasibleGoal", f"spec.pools[{pool.name}].autoscaling: {newest.infeasible}"
    if newest.reason in BLOCKING:
        live = view.engine_pool(pool)
        queued = live is not None and live.status.queued_replicas > 0
        return newest.reason, f"spec.pools[{pool.name}].autoscaling: {_steady(newest.reason, settings, queued=queued)}"
    return None


def _steady(reason: str, settings: Autoscaling, *, queued: bool) -> str:
    """A line that does not change with each figure: the figures are in the decision."""
    room = "WaitingForGPUs: the goals need more replicas than there is room for"
    steady = {
        "AtMax": f"the goals need more replicas than max {settings.max}",
        "WaitingForRoom": "Queued: the goals need more replicas than their queue admits" if queued else room,
    }
    return steady.get(reason, "the load of an engine is not known, so the replicas stay")


def _known(view: DeploymentView, pool: Pool) -> tuple[ScalingDecision, ...]:
    summaries: Sequence[PoolSummary] = view.deployment.status.pools
    return next((found.decisions for found in summaries if found.name == pool.name), ())


def _written(found: DatedDecision) -> ScalingDecision:
    decision = found.decision
    return ScalingDecision(
        time=found.time,
        before=decision.before,
        after=decision.after,
        reason=decision.reason,
        message=shortened(decision.message) or None,
        inputs=dict(decision.inputs),
    )


def _sentence(pool: str, found: ScalingDecision) -> str:
    change = f"{found.before} -> {found.after} replicas" if found.before != found.after else f"{found.before} replicas"
    return f"pool {pool}: {change}: {found.message}"


def _out_of_bounds(view: DeploymentView, pool: Pool, settings: Autoscaling) -> tuple[str, str] | None:
    """The bound that holds against an external scaler."""
    live = view.engine_pool(pool)
    if live is None or live.spec.replicas == live.spec.bounded_replicas:
        return None
    bound = f"max {settings.max}" if live.spec.replicas > settings.max else f"min {settings.min}"
    asked = f"/scale of EnginePool {live.metadata.name} has {live.spec.replicas} replicas"
    return "OutOfBounds", f"spec.pools[{pool.name}].autoscaling: {asked}, {bound} holds"
