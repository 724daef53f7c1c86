"""One pass over an EnginePool: keep the wanted replicas and report on them. Pure.

Called by the loop's workers through `service/reconcilers`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from stoker.operator.domain.conditions import Health
from stoker.operator.domain.plan import Observed, Plan
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.enginepool.bind import bind
from stoker.operator.reconcile.enginepool.failures import count_failures
from stoker.operator.reconcile.enginepool.outcome import PoolOutcome
from stoker.operator.reconcile.enginepool.phase import pool_state
from stoker.operator.reconcile.enginepool.replicas import plan_replicas
from stoker.operator.reconcile.enginepool.status import derive_status
from stoker.operator.reconcile.enginepool.view import PoolView, pool_view


def reconcile_enginepool(seen: Observed, settings: Settings, now: datetime) -> Plan:
    """The next changes; a converged pool gives an empty plan."""
    view = pool_view(seen, settings, now)
    if view.pool.deleting:
        return derive_status(view, PoolOutcome())  # the garbage collector removes the pods with their owner
    return derive_status(view, _reject_spec(view) if view.intent.never_accepted else _keep_replicas(view))


def _reject_spec(view: PoolView) -> PoolOutcome:
    """Nothing is made of a spec that was never accepted."""
    return PoolOutcome(health=Health.STALLED, reason="NotSupported", message=view.intent.text)


def _keep_replicas(view: PoolView) -> PoolOutcome:
    failures, events = count_failures(view)
    binding = bind(view)
    state = pool_state(view, failures, binding.waiting)
    return PoolOutcome(
        health=state.health,
        phase=state.phase,
        reason=state.reason or state.phase,
        message=state.message,
        explanation=state.message or f"{view.pool.spec.bounded_replicas} replicas are ready",
        failures=failures,
        conditions=binding.conditions,
        plan=replace(plan_replicas(view, binding), events=(*events, *binding.events)),
    )
