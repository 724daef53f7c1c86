"""InferenceDeployment: which checkpoint is served, in which revision, behind which routers. Pure.

It owns revisions, the rollout, the EnginePools and the routers; how many engine pods exist and which one goes is the EnginePool's own affair.
"""

from __future__ import annotations

from datetime import datetime

from stoker.operator.api.inferencedeployment import PoolSummary
from stoker.operator.api.pool import Pool
from stoker.operator.domain.conditions import Condition, Health, summary
from stoker.operator.domain.plan import Observed, Plan
from stoker.operator.domain.pods import ended, exit_of
from stoker.operator.domain.settings import Settings
from stoker.operator.domain.unsupported import unsupported
from stoker.operator.domain.waiting import waiting
from stoker.operator.reconcile.enginepool.view import FAILURES_TO_STALL
from stoker.operator.reconcile.inferencedeployment.backends import router_calls, snapshot, with_snapshot
from stoker.operator.reconcile.inferencedeployment.model_choice import ModelChoice, NoModel, choose_model
from stoker.operator.reconcile.inferencedeployment.rollout import Rollout, overdue, plan_rollout, until_deadline_s
from stoker.operator.reconcile.inferencedeployment.routers import step_routers
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, look, settle

ROUTER_RETRY_S = 1.0


def reconcile_inferencedeployment(seen: Observed, settings: Settings, now: datetime) -> Plan:
    """What should change next; a converged deployment gives an empty plan."""
    view = look(seen, settings, now)
    if view.deployment.deleting:
        return settle(view, {}, ())  # everything goes with its owner
    refused = unsupported("InferenceDeployment", seen.resource["spec"])
    if refused:
        text = "; ".join(refused)
        return settle(view, {"message": text}, summary(Health.STALLED, "NotSupported", text))
    choice = choose_model(view)
    rollout = plan_rollout(view, choice)
    return _report(view, choice, rollout)


def _report(view: DeploymentView, choice: ModelChoice | NoModel, rollout: Rollout) -> Plan:
    wanted = snapshot(view)
    routers = step_routers(view, wanted)
    calls = router_calls(view, wanted)
    router = with_snapshot(routers.status, wanted)
    serving = next((found for found in rollout.revisions if found.name == rollout.current), None)
    pools = tuple(_pool_summary(view, pool) for pool in view.deployment.spec.pools)
    health, phase, message = _judge(view, choice, rollout, router.ready, pools)
    total = sum(pool.replicas for pool in pools)
    changes = {
        "phase": phase,
        "message": message,
        "endpoint": _endpoint(view),
        "models": tuple(view.deployment.spec.model.names or (view.deployment.metadata.name,)),
        "current_checkpoint": serving.checkpoint if serving else None,
        "current_revision": rollout.current,
        "revisions": rollout.revisions,
        "rollout": rollout.status,
        "pools": pools,
        "router": router,
        "ready": f"{sum(pool.ready for pool in pools)}/{total}",
    }
    waits = (ROUTER_RETRY_S if calls else None, routers.requeue_after_s, until_deadline_s(view, rollout))
    plan = Plan(
        create=(*rollout.create, *routers.create),
        apply=(*rollout.apply, *routers.apply),
        scale=rollout.scale,
        delete=(*rollout.delete, *routers.delete),
        calls=calls,
        events=rollout.events,
        requeue_after_s=min((wait for wait in waits if wait is not None), default=None),
    )
    conditions = (*summary(health, phase, message or ""), *_own_conditions(choice, router.ready))
    return settle(view, changes, conditions, plan)


def _judge(
    view: DeploymentView,
    choice: ModelChoice | NoModel,
    rollout: Rollout,
    ready_routers: int,
    pools: tuple[PoolSummary, ...],
) -> tuple[Health, str, str | None]:
    """Health, phase and the one line."""
    if rollout.target is None:
        assert isinstance(choice, NoModel)
        health = Health.STALLED if choice.stalled else Health.PROGRESSING
        return health, "WaitingForCheckpoint" if not choice.stalled else "Failed", choice.message
    ready = sum(pool.ready for pool in pools)
    why = next((pool.message for pool in pools if pool.message), None)
    if rollout.status is not None and rollout.status.phase != "Completed":
        if overdue(view, rollout.status):
            return (
                Health.STALLED,
                "Degraded" if ready else "Failed",
                f"the rollout makes no progress: {why or ''}"[:1024],
            )
        failed = [live for live in view.pools if live.status.failures and not live.status.ready_replicas]
        if failed and not ready:
            given_up = any(live.status.failures >= FAILURES_TO_STALL for live in failed)
            return (Health.STALLED if given_up else Health.PROGRESSING), "Failed", why
        phase = "Updating" if rollout.status.from_revision else "Starting"
        return Health.PROGRESSING, phase, why or "engines start"
    if ready_routers == 0:
        phase = "Starting" if not view.router_status.ready else "Degraded"
        return Health.PROGRESSING, phase, _no_router(view)
    if any(pool.ready < pool.replicas for pool in pools):
        return Health.PROGRESSING, "Degraded" if ready else "Starting", why
    if isinstance(choice, NoModel):
        return (Health.STALLED if choice.stalled else Health.READY), "Serving", choice.message
    return Health.READY, "Serving", None


def _no_router(view: DeploymentView) -> str:
    """What one waits for, else how one ended."""
    held = [known.line for pod in view.routers if not ended(pod) and (known := waiting(pod)) is not None]
    failed = [exit_of(pod) for pod in view.routers if ended(pod)]
    why = [*held, *(f"{exit_.cause}: {exit_.detail}".rstrip(": ") for exit_ in failed)]
    return f"no router is ready: {why[0]}"[:1024] if why else "no router is ready"


def _pool_summary(view: DeploymentView, pool: Pool) -> PoolSummary:
    live = view.engine_pool(pool)
    if live is None:
        return PoolSummary(name=pool.name, role=pool.role, replicas=pool.replicas)
    status = live.status
    return PoolSummary(
        name=pool.name,
        role=pool.role,
        engine_pool=live.metadata.name,
        replicas=live.spec.replicas,
        ready=status.ready_replicas,
        updated=status.updated_replicas,
        message=status.message,
    )


def _own_conditions(choice: ModelChoice | NoModel, ready_routers: int) -> tuple[Condition, ...]:
    if isinstance(choice, NoModel):
        resolved = Condition("ModelResolved", False, choice.reason, choice.message)
    else:
        name = choice.checkpoint.name if choice.checkpoint else choice.source.path
        resolved = Condition("ModelResolved", True, "Resolved", name)
    return resolved, Condition("RouterReady", ready_routers > 0, "RoutersReady", f"{ready_routers} routers are ready")


def _endpoint(view: DeploymentView) -> str:
    metadata = view.deployment.metadata
    port = view.deployment.spec.router.service.port
    return f"http://{metadata.name}.{metadata.namespace}.svc:{port}"
