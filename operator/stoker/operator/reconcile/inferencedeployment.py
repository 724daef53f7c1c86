"""InferenceDeployment: which checkpoint is served, in which revision, behind which routers. Pure.

It owns revisions, the rollout, the EnginePools and the routers; how many engine pods exist and which one goes is the EnginePool's own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from stoker.operator.api.enginepool import EnginePool, Revision
from stoker.operator.api.inferencedeployment import PoolSummary, RevisionStatus, RolloutStatus
from stoker.operator.api.pool import Pool
from stoker.operator.conditions import Condition, Health, summary
from stoker.operator.plan import Event, Object, Observed, Plan, Ref, Scale
from stoker.operator.reconcile.backends import router_calls, snapshot, with_snapshot
from stoker.operator.reconcile.deployment_view import DeploymentView, look, pool_object_name, settle
from stoker.operator.reconcile.model_choice import ModelChoice, NoModel, choose_model
from stoker.operator.reconcile.pool_view import FAILURES_TO_STALL
from stoker.operator.reconcile.routers import step_routers
from stoker.operator.render.engine import engine_template
from stoker.operator.render.names import digest_of
from stoker.operator.render.pod import metadata_of
from stoker.operator.render.router import deployment_labels
from stoker.operator.settings import Settings
from stoker.operator.unsupported import unsupported

ROUTER_RETRY_S = 1.0
MAX_REVISIONS = 24
_POOL_ONLY = {"replicas", "autoscaling", "maxSurge", "maxUnavailable"}
"""Fields of a pool that do not make a new revision."""


def reconcile_inferencedeployment(seen: Observed, settings: Settings, now: datetime) -> Plan:
    """What should change next; a converged deployment gives an empty plan."""
    view = look(seen, settings, now)
    if view.deployment.deleting:
        return Plan()  # everything goes with its owner
    refused = unsupported("InferenceDeployment", seen.resource["spec"])
    if refused:
        text = "; ".join(refused)
        return settle(view, {"message": text}, summary(Health.STALLED, "NotSupported", text))
    choice = choose_model(view)
    rollout = _plan_rollout(view, choice)
    return _report(view, choice, rollout)


@dataclass(frozen=True)
class _Rollout:
    """The revisions and how far the move between them is."""

    revisions: tuple[RevisionStatus, ...]
    current: str | None
    target: str | None
    status: RolloutStatus | None
    create: tuple[Object, ...] = ()
    apply: tuple[Object, ...] = ()
    scale: tuple[Scale, ...] = ()
    delete: tuple[Ref, ...] = ()
    events: tuple[Event, ...] = ()


# Revisions and pools


def _plan_rollout(view: DeploymentView, choice: ModelChoice | NoModel) -> _Rollout:
    status = view.deployment.status
    revisions = status.revisions
    old = status.rollout or RolloutStatus()
    target = old.to_revision or status.current_revision
    events: tuple[Event, ...] = ()
    if isinstance(choice, ModelChoice):
        wanted = _revision_of(view, choice)
        if wanted.name != target and not (view.deployment.spec.rollout.paused and target is not None):
            target = wanted.name
            events = (Event("Normal", "RevisionChosen", _what(wanted)),)
        if view.revision(wanted.name) is None:
            revisions = (wanted, *revisions)[:MAX_REVISIONS]
    if target is None:
        return _Rollout(revisions, None, None, None)
    done = _all_updated(view, target) and not _obsolete_pools(view)
    current = target if done or status.current_revision is None else status.current_revision
    create, apply, scale = _pools(view, choice, target, current)
    return _Rollout(
        revisions=_kept(view, _shares(revisions, current), current, target),
        current=current,
        target=target,
        status=_rollout_status(view, old, current, target, done=done),
        create=create,
        apply=apply,
        scale=scale,
        delete=_obsolete_pools(view),
        events=events,
    )


def _revision_of(view: DeploymentView, choice: ModelChoice) -> RevisionStatus:
    """The revision of the user's intent and the chosen checkpoint. Its name is a hash of both: the operator's version is not in it."""
    wire = view.deployment.spec.to_wire()
    model = {
        name: value for name, value in wire["model"].items() if name not in {"checkpointRef", "checkpointSelector"}
    }
    pools = [{name: value for name, value in pool.items() if name not in _POOL_ONLY} for pool in wire["pools"]]
    checkpoint = {"uid": choice.checkpoint.uid, "digest": choice.checkpoint.digest} if choice.checkpoint else None
    intent = digest_of({"model": model, "engine": wire["engine"], "pools": pools, "checkpoint": checkpoint}, 10)
    return RevisionStatus(
        name=f"r{intent}",
        intent=intent,
        generation=view.deployment.metadata.generation,
        created_at=view.time,
        checkpoint=choice.checkpoint,
    )


def _pools(
    view: DeploymentView, choice: ModelChoice | NoModel, target: str, current: str | None
) -> tuple[tuple[Object, ...], tuple[Object, ...], tuple[Scale, ...]]:
    """EnginePools to make, to give another set of revisions, to scale."""
    create: list[Object] = []
    apply: list[Object] = []
    scale: list[Scale] = []
    for pool in view.deployment.spec.pools:
        live = view.engine_pool(pool)
        revisions = _pool_revisions(view, pool, live, choice, target, current)
        if revisions is None:
            continue
        wanted = _pool_object(view, pool, revisions)
        if live is None:
            create.append({**wanted, "spec": {**wanted["spec"], "replicas": pool.replicas}})
            continue
        if not _same(live, wanted):
            apply.append(wanted)
        if pool.autoscaling is None and live.spec.replicas != pool.replicas:
            scale.append(Scale(_pool_ref(live), pool.replicas))
    return tuple(create), tuple(apply), tuple(scale)


def _pool_revisions(
    view: DeploymentView,
    pool: Pool,
    live: EnginePool | None,
    choice: ModelChoice | NoModel,
    target: str,
    current: str | None,
) -> list[dict[str, Any]] | None:
    """The target with all of the share; the one before it stays, without a share, until the last of its pods is gone.

    A template that the pool holds already is frozen. None: the target's template cannot be rendered now.
    """
    frozen = {revision.name: revision for revision in live.spec.revisions} if live else {}
    if target in frozen:
        template = frozen[target].template.to_wire()
    elif isinstance(choice, ModelChoice) and _revision_of(view, choice).name == target:
        template = engine_template(view.deployment, pool, choice.source, view.settings)
    else:
        return None
    kept = [frozen[name] for name in (current,) if name is not None and name in frozen and name != target]
    kept += [found for found in frozen.values() if found.name not in {target, current} and _has_pods(live, found)]
    return [
        {"name": target, "share": 100, "template": template},
        *({"name": found.name, "share": 0, "template": found.template.to_wire()} for found in kept[:3]),
    ]


def _pool_object(view: DeploymentView, pool: Pool, revisions: list[dict[str, Any]]) -> Object:
    """Without `replicas`: they belong to `/scale`."""
    name = pool_object_name(view.deployment, pool)
    labels = {**deployment_labels(view.deployment), "pool": pool.name}
    metadata = metadata_of(view.seen.resource, name, "engine", labels)
    del metadata["labels"]["stoker.dev/role"]
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "EnginePool",
        "metadata": metadata,
        "spec": {"revisions": revisions, "maxSurge": pool.max_surge, "maxUnavailable": pool.max_unavailable},
    }


def _same(live: EnginePool, wanted: Object) -> bool:
    spec = live.spec.to_wire()
    ours = type(live.spec).model_validate({**wanted["spec"], "replicas": live.spec.replicas}).to_wire()
    return spec == ours


def _has_pods(live: EnginePool | None, revision: Revision) -> bool:
    return any(found.name == revision.name and found.replicas for found in (live.status.revisions if live else ()))


def _obsolete_pools(view: DeploymentView) -> tuple[Ref, ...]:
    """EnginePools of pools that the user took out."""
    wanted = {pool_object_name(view.deployment, pool) for pool in view.deployment.spec.pools}
    return tuple(_pool_ref(p) for p in view.pools if p.metadata.name not in wanted and not p.deleting)


def _pool_ref(pool: EnginePool) -> Ref:
    return Ref("EnginePool", pool.metadata.namespace, pool.metadata.name, pool.metadata.uid)


# Progress of a rollout


def _all_updated(view: DeploymentView, target: str) -> bool:
    """Every pool has seen its newest spec and runs nothing but ready replicas of the target."""
    for pool in view.deployment.spec.pools:
        live = view.engine_pool(pool)
        if live is None or live.status.observed_generation != live.metadata.generation:
            return False
        if not any(found.name == target and found.share == 100 for found in live.spec.revisions):
            return False
        others = any(found.replicas for found in live.status.revisions if found.name != target)
        if others or live.status.updated_replicas < live.spec.replicas:
            return False
    return True


def _shares(revisions: tuple[RevisionStatus, ...], current: str | None) -> tuple[RevisionStatus, ...]:
    return tuple(found.model_copy(update={"share": 100 if found.name == current else 0}) for found in revisions)


def _kept(
    view: DeploymentView, revisions: tuple[RevisionStatus, ...], current: str | None, target: str
) -> tuple[RevisionStatus, ...]:
    """Those in use and the newest few before them."""
    limit = view.deployment.spec.rollout.revision_history_limit
    used = [found for found in revisions if found.name in {current, target}]
    history = [found for found in revisions if found.name not in {current, target}]
    return (*used, *history[:limit])


def _rollout_status(
    view: DeploymentView, old: RolloutStatus, current: str | None, target: str, *, done: bool
) -> RolloutStatus:
    updated = sum(live.status.updated_replicas for live in view.pools)
    if done:
        changes = {"phase": "Completed", "from_revision": None, "to_revision": target, "step": updated, "message": None}
        return old.model_copy(update=changes)
    if old.to_revision != target:
        return RolloutStatus(
            phase="Progressing",
            from_revision=current if current != target else None,
            to_revision=target,
            step=updated,
            started_at=view.time,
            progressed_at=view.time,
        )
    progressed = view.time if old.step != updated or old.phase == "Completed" else old.progressed_at
    phase = "Paused" if view.deployment.spec.rollout.paused else "Progressing"
    return old.model_copy(update={"phase": phase, "step": updated, "progressed_at": progressed})


# Status


def _report(view: DeploymentView, choice: ModelChoice | NoModel, rollout: _Rollout) -> Plan:
    wanted = snapshot(view)
    routers = step_routers(view, wanted)
    calls = router_calls(view, wanted)
    router = with_snapshot(routers.status, wanted)
    serving = next((found for found in rollout.revisions if found.name == rollout.current), None)
    pools = tuple(_pool_summary(view, pool) for pool in view.deployment.spec.pools)
    health, phase, message = _judge(view, choice, rollout, router.ready, pools)
    total = sum(pool.replicas for pool in view.deployment.spec.pools)
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
    plan = Plan(
        create=(*rollout.create, *routers.create),
        apply=(*rollout.apply, *routers.apply),
        scale=rollout.scale,
        delete=(*rollout.delete, *routers.delete),
        calls=calls,
        events=rollout.events,
        requeue_after_s=ROUTER_RETRY_S if calls else _until_deadline(view, rollout),
    )
    conditions = (*summary(health, phase, message or ""), *_own_conditions(choice, router.ready))
    return settle(view, changes, conditions, plan)


def _judge(
    view: DeploymentView,
    choice: ModelChoice | NoModel,
    rollout: _Rollout,
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
        if _overdue(view, rollout.status):
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
        return Health.PROGRESSING, "Starting" if not view.router_status.ready else "Degraded", "no router is ready"
    if any(pool.ready < pool.replicas for pool in pools):
        return Health.PROGRESSING, "Degraded" if ready else "Starting", why
    if isinstance(choice, NoModel):
        return (Health.STALLED if choice.stalled else Health.READY), "Serving", choice.message
    return Health.READY, "Serving", None


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


def _what(revision: RevisionStatus) -> str:
    if revision.checkpoint is None:
        return f"revision {revision.name}"
    return f"revision {revision.name} serves Checkpoint {revision.checkpoint.name} (step {revision.checkpoint.step})"


def _overdue(view: DeploymentView, status: RolloutStatus) -> bool:
    left = _deadline_left_s(view, status)
    return left is not None and left <= 0 and status.phase == "Progressing"


def _until_deadline(view: DeploymentView, rollout: _Rollout) -> float | None:
    if rollout.status is None or rollout.status.phase != "Progressing":
        return None
    left = _deadline_left_s(view, rollout.status)
    return left if left is not None and left > 0 else None


def _deadline_left_s(view: DeploymentView, status: RolloutStatus) -> float | None:
    if status.progressed_at is None:
        return None
    limit = timedelta(seconds=view.deployment.spec.rollout.progress_deadline_seconds)
    return (datetime.fromisoformat(status.progressed_at) + limit - view.now).total_seconds()
