"""The move of an InferenceDeployment from one revision to the next: which revision is wanted, what its EnginePools hold, when it is done. Pure.

A revision's name is a hash of the user's intent and the checkpoint; its template is frozen in the EnginePools when it is first made.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from stoker.operator.api.enginepool import EnginePool, Revision
from stoker.operator.api.inferencedeployment import RevisionStatus, RolloutStatus
from stoker.operator.api.pool import Pool
from stoker.operator.domain.plan import Event, Object, Ref, Scale
from stoker.operator.reconcile.inferencedeployment.model_choice import ModelChoice, NoModel
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, pool_object_name
from stoker.operator.render.engine import engine_template
from stoker.operator.render.names import digest_of
from stoker.operator.render.pod import metadata_of
from stoker.operator.render.router import deployment_labels

MAX_REVISIONS = 24
_POOL_ONLY = {"replicas", "autoscaling", "maxSurge", "maxUnavailable"}
"""Fields of a pool that do not make a new revision."""


@dataclass(frozen=True)
class Rollout:
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


def plan_rollout(view: DeploymentView, choice: ModelChoice | NoModel) -> Rollout:
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
        return Rollout(revisions, None, None, None)
    updated, obsolete = _all_updated(view, target), _obsolete_pools(view)
    done = updated and not obsolete
    current = target if done or status.current_revision is None else status.current_revision
    create, apply, scale = _pools(view, choice, target, current)
    return Rollout(
        revisions=_kept(view, _shares(revisions, current), current, target),
        current=current,
        target=target,
        status=_rollout_status(view, old, current, target, done=done),
        create=create,
        apply=apply,
        scale=scale,
        delete=obsolete if updated else (),
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
        "spec": {
            "revisions": revisions,
            "maxSurge": pool.max_surge,
            "maxUnavailable": pool.max_unavailable,
            "paused": view.deployment.spec.rollout.paused,
        },
    }


def _same(live: EnginePool, wanted: Object) -> bool:
    spec = live.spec.to_wire()
    ours = type(live.spec).model_validate({**wanted["spec"], "replicas": live.spec.replicas}).to_wire()
    return spec == ours


def _has_pods(live: EnginePool | None, revision: Revision) -> bool:
    return any(found.name == revision.name and found.replicas for found in (live.status.revisions if live else ()))


def _obsolete_pools(view: DeploymentView) -> tuple[Ref, ...]:
    """EnginePools of pools that the user took out. They serve until the others are ready."""
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


def _what(revision: RevisionStatus) -> str:
    if revision.checkpoint is None:
        return f"revision {revision.name}"
    return f"revision {revision.name} serves Checkpoint {revision.checkpoint.name} (step {revision.checkpoint.step})"


def overdue(view: DeploymentView, status: RolloutStatus) -> bool:
    left = _deadline_left_s(view, status)
    return left is not None and left <= 0 and status.phase == "Progressing"


def until_deadline_s(view: DeploymentView, rollout: Rollout) -> float | None:
    if rollout.status is None or rollout.status.phase != "Progressing":
        return None
    left = _deadline_left_s(view, rollout.status)
    return left if left is not None and left > 0 else None


def _deadline_left_s(view: DeploymentView, status: RolloutStatus) -> float | None:
    if status.progressed_at is None:
        return None
    limit = timedelta(seconds=view.deployment.spec.rollout.progress_deadline_seconds)
    return (datetime.fromisoformat(status.progressed_at) + limit - view.now).total_seconds()
