"""The move of an InferenceDeployment from one revision to the next: wanted revision, EnginePools, progress. Pure.

The template of a revision is frozen in the EnginePools when it is first made.

Called by `reconcile`; the step of a rollout is kept in the status.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stoker.operator.api.enginepool import EnginePool, Revision
from stoker.operator.api.inferencedeployment import RevisionStatus, RolloutStatus
from stoker.operator.api.metadata import API_VERSION
from stoker.operator.api.pool import Pool
from stoker.operator.domain.labels import POOL, ROLE
from stoker.operator.domain.plan import Event, Object, Ref, Scale
from stoker.operator.reconcile.inferencedeployment.autoscaling import external_bounds, wanted_replicas
from stoker.operator.reconcile.inferencedeployment.availability import max_unavailable
from stoker.operator.reconcile.inferencedeployment.canary import (
    CanaryTurn,
    plan_canary,
    plan_return,
    with_canary,
)
from stoker.operator.reconcile.inferencedeployment.evaluation import stale_tasks
from stoker.operator.reconcile.inferencedeployment.model_choice import ModelChoice, NoModel
from stoker.operator.reconcile.inferencedeployment.queue_time import queued_s
from stoker.operator.reconcile.inferencedeployment.revision import last_target, revision_of, source_of
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, former_pools, has_pods, pool_object_name
from stoker.operator.reconcile.intent import EDIT_REFUSED
from stoker.operator.render.engine import engine_template
from stoker.operator.render.pod import metadata_of
from stoker.operator.render.router import deployment_labels

MAX_REVISIONS = 24
Shares = tuple[tuple[str, int], ...]
"""(revision, percent of the replicas), the target first."""


@dataclass(frozen=True)
class RolloutStep:
    """The revisions, how far the move between them is, and the EnginePools to change now."""

    revisions: tuple[RevisionStatus, ...]
    current: str | None
    """Serves until every pool has moved to `target`."""
    target: str | None
    """None: no model was found so far."""
    status: RolloutStatus | None
    whole: bool = False
    """Whether every pool runs all its replicas, ready ones of `target`, and nothing else."""
    create: tuple[Object, ...] = ()
    apply: tuple[Object, ...] = ()
    scale: tuple[Scale, ...] = ()
    delete: tuple[Ref, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after_s: float | None = None
    """Until time alone changes the step."""
    held: str | None = None
    """The wanted revision, in words, that `rollout.paused` keeps from being the target."""


@dataclass(frozen=True)
class PoolChanges:
    """EnginePools to make, to give another set of revisions, and to scale."""

    create: tuple[Object, ...]
    apply: tuple[Object, ...]
    scale: tuple[Scale, ...]


def plan_rollout(view: DeploymentView, choice: ModelChoice | NoModel) -> RolloutStep:
    """The next step towards the revision of the user's intent and the chosen checkpoint."""
    status = view.deployment.status
    wanted = revision_of(view, choice) if isinstance(choice, ModelChoice) else None
    revisions = _with_wanted(view, wanted)
    last = last_target(view)
    asked = _asked(view, wanted, last)
    left = None if _is_lost(view, choice, asked) else plan_return(view, status.current_revision, asked)
    target = last if asked is None or left is not None else asked
    if target is None:
        return RolloutStep(revisions, None, None, None)
    canary = left if left is not None else plan_canary(view, status.current_revision, target)
    moving = canary is None or canary.promoted
    updated, obsolete = moving and _all_updated(view, target), tuple(map(_pool_ref, former_pools(view)))
    done = updated and not obsolete
    current = target if done or status.current_revision is None else status.current_revision
    shares = canary.shares if canary is not None else ((target, 100),)
    pools = _pool_changes(view, choice, shares, current, canary)
    given_up = canary is not None and canary.rolled_back and not canary.status.percent
    abandoned = _abandoned_pools(view, shares, pools) if given_up else ()
    stale = stale_tasks(view, target if canary is not None and canary.evaluating else None)
    chosen = _chosen_event(wanted) if wanted is not None and target == wanted.name != last else ()
    old = status.rollout or RolloutStatus()
    kept = old.phase == "Completed" and old.to_revision == current == target and _runs_alone(view, target)
    progress = _rollout_status(view, old, current, target, over=done or kept)
    return RolloutStep(
        revisions=_kept_revisions(view, revisions, current, target, canary),
        current=current,
        target=target,
        status=with_canary(progress, canary, view.time),
        whole=done,
        create=(*pools.create, *(canary.create if canary is not None else ())),
        apply=(*pools.apply, *_reunited_pools(view, shares, current)),
        scale=pools.scale,
        delete=(*(obsolete if updated else ()), *abandoned, *stale),
        events=(*chosen, *(canary.events if canary is not None else ())),
        requeue_after_s=canary.requeue_after_s if canary is not None else None,
        held=_held(view, wanted, target),
    )


def is_overdue(view: DeploymentView, status: RolloutStatus) -> bool:
    """Whether the rollout has made no progress for longer than its deadline."""
    left_s = _deadline_left_s(view, status)
    return left_s is not None and left_s <= 0 and status.phase == "Progressing"


def until_deadline_s(view: DeploymentView, rollout: RolloutStep) -> float | None:
    """Seconds until the rollout is overdue; None where no deadline runs."""
    if rollout.status is None or rollout.status.phase != "Progressing":
        return None
    left_s = _deadline_left_s(view, rollout.status)
    return left_s if left_s is not None and left_s > 0 else None


def _asked(view: DeploymentView, wanted: RevisionStatus | None, last: str | None) -> str | None:
    """The wanted revision; None while the rollout is paused or no model is found, so that the last target stays."""
    paused = view.deployment.spec.rollout.paused and last is not None
    return None if wanted is None or paused else wanted.name


def _is_lost(view: DeploymentView, choice: ModelChoice | NoModel, asked: str | None) -> bool:
    """Whether another revision is asked for, and the current one was lost with its EnginePools: no way leads back."""
    current = view.deployment.status.current_revision
    if current is None or asked in (None, current):
        return False
    held = any(found.name == current for live in view.pools if not live.deleting for found in live.spec.revisions)
    return not held and source_of(view, choice, current) is None


def _held(view: DeploymentView, wanted: RevisionStatus | None, target: str) -> str | None:
    if not view.deployment.spec.rollout.paused or wanted is None or wanted.name == target:
        return None
    found = wanted.checkpoint
    return f"revision {wanted.name}" + (f" of Checkpoint {found.name} (step {found.step})" if found is not None else "")


def _with_wanted(view: DeploymentView, wanted: RevisionStatus | None) -> tuple[RevisionStatus, ...]:
    """The known revisions, newest first, with the wanted one."""
    known = view.deployment.status.revisions
    if wanted is None:
        return known
    if view.revision(wanted.name) is not None:
        return tuple(wanted if found.name == wanted.name else found for found in known)
    return (wanted, *known)[:MAX_REVISIONS]


def _pool_changes(
    view: DeploymentView, choice: ModelChoice | NoModel, shares: Shares, current: str | None, canary: CanaryTurn | None
) -> PoolChanges:
    create: list[Object] = []
    apply: list[Object] = []
    scale: list[Scale] = []
    for pool in view.deployment.spec.pools:
        live = view.engine_pool(pool)
        revisions = _pool_revisions(view, pool, live, choice, shares, current)
        if revisions is None:
            continue
        wanted = _pool_object(view, pool, revisions)
        if live is None:
            create.append({**wanted, "spec": {**wanted["spec"], "replicas": pool.replicas}})
            continue
        wanted["spec"]["maxUnavailable"] = max_unavailable(view, pool, live, canary)
        if not _is_as_wanted(live, wanted):
            apply.append(wanted)
        replicas = wanted_replicas(view, pool, live)
        if live.spec.replicas != replicas:
            scale.append(Scale(_pool_ref(live), replicas))
    return PoolChanges(tuple(create), tuple(apply), tuple(scale))


def _pool_revisions(
    view: DeploymentView,
    pool: Pool,
    live: EnginePool | None,
    choice: ModelChoice | NoModel,
    shares: Shares,
    current: str | None,
) -> list[dict[str, Any]] | None:
    """The revisions with a share, and with share 0 the older ones that still have pods.

    A template that the pool already holds is frozen and reused. One that was lost with its pool is rendered anew where
    the spec still describes it. A pool that came with the target has no other revision:
    the old one has its replicas in the pools of before. None: the template of a revision with a share cannot be
    rendered now.
    """
    frozen = {revision.name: revision for revision in live.spec.revisions} if live else {}
    wanted = []
    for name, share in shares:
        if name in frozen:
            wanted.append({"name": name, "share": share, "template": frozen[name].template.to_wire()})
        elif (source := source_of(view, choice, name)) is not None:
            template = engine_template(view.deployment, pool, source, view.settings)
            wanted.append({"name": name, "share": share, "template": template})
    if len(wanted) < len(shares):
        if not wanted or (live is not None and wanted[0]["name"] != shares[0][0]):
            return None
        wanted = [{**wanted[0], "share": 100}]
    named = {str(found["name"]) for found in wanted}
    kept = [frozen[name] for name in (current,) if name is not None and name in frozen and name not in named]
    others = [found for found in frozen.values() if found.name not in {*named, current}]
    kept += [found for found in others if live is not None and has_pods(live, found)]
    return [
        *wanted,
        *({"name": found.name, "share": 0, "template": found.template.to_wire()} for found in kept[: 4 - len(wanted)]),
    ]


def _pool_object(view: DeploymentView, pool: Pool, revisions: list[dict[str, Any]]) -> Object:
    """The EnginePool to apply. `replicas` is left out, because it is written through `/scale` only."""
    bounds = external_bounds(pool)
    return {
        "apiVersion": API_VERSION,
        "kind": "EnginePool",
        "metadata": _pool_metadata(view, pool_object_name(view.deployment, pool), pool.name),
        "spec": {
            "revisions": revisions,
            "maxSurge": pool.max_surge,
            "maxUnavailable": pool.max_unavailable,
            "paused": view.deployment.spec.rollout.paused and view.deployment.spec.rollout.canary is None,
            **({"bounds": bounds.to_wire()} if bounds is not None else {}),
        },
    }


def _pool_metadata(view: DeploymentView, name: str, pool_name: str) -> Object:
    labels = {**deployment_labels(view.deployment), "pool": pool_name}
    metadata = metadata_of(view.seen.resource, name, "engine", labels)
    del metadata["labels"][ROLE]
    return metadata


def _is_as_wanted(live: EnginePool, wanted: Object) -> bool:
    """Whether the spec is `wanted`, apart from its replicas."""
    spec = live.spec.to_wire()
    ours = type(live.spec).model_validate({**wanted["spec"], "replicas": live.spec.replicas}).to_wire()
    return spec == ours


def _reunited_pools(view: DeploymentView, shares: Shares, current: str | None) -> tuple[Object, ...]:
    """Former pools that an interrupted canary left split, with all replicas for the current revision.

    They serve beside the new canary, whose routers give no traffic to the revision of the interrupted one.
    """
    used = {name for name, _ in shares}
    changed = []
    for live in former_pools(view):
        held = {found.name: found.share for found in live.spec.revisions}
        if current in used and current in held and any(share and name not in used for name, share in held.items()):
            first = sorted(live.spec.revisions, key=lambda found: found.name != current)
            changed.append(_reunited_pool(view, live, first))
    return tuple(changed)


def _reunited_pool(view: DeploymentView, live: EnginePool, revisions: Sequence[Revision]) -> Object:
    """The EnginePool to apply, with the whole share for the first of the revisions."""
    shared = [{**found.to_wire(), "share": 0 if number else 100} for number, found in enumerate(revisions)]
    spec = {name: value for name, value in live.spec.to_wire().items() if name != "replicas"}
    metadata = _pool_metadata(view, live.metadata.name, live.metadata.labels.get(POOL, live.metadata.name))
    return {
        "apiVersion": API_VERSION,
        "kind": "EnginePool",
        "metadata": metadata,
        "spec": {**spec, "revisions": shared},
    }


def _abandoned_pools(view: DeploymentView, shares: Shares, changes: PoolChanges) -> tuple[Ref, ...]:
    """EnginePools that came with a revision that is given up, and neither have another one nor get it now."""
    kept, changed = {name for name, _ in shares}, {body["metadata"]["name"] for body in changes.apply}
    found = (live for live in view.pools if not live.deleting and live.metadata.name not in changed)
    return tuple(_pool_ref(live) for live in found if kept.isdisjoint(one.name for one in live.spec.revisions))


def _pool_ref(pool: EnginePool) -> Ref:
    return Ref("EnginePool", pool.metadata.namespace, pool.metadata.name, pool.metadata.uid)


# Progress of a rollout


def _runs_alone(view: DeploymentView, target: str) -> bool:
    """Whether all pools are given to the target, and no other pool is left; whatever number of replicas they have."""
    given = (view.engine_pool(pool) for pool in view.deployment.spec.pools)
    return not former_pools(view) and all(live is not None and _is_given_to(live, target) for live in given)


def _is_given_to(live: EnginePool, target: str) -> bool:
    return any(found.name == target and found.share == 100 for found in live.spec.revisions)


def _all_updated(view: DeploymentView, target: str) -> bool:
    """Whether every pool carries out its newest spec and runs nothing but ready replicas of the target."""
    for pool in view.deployment.spec.pools:
        live = view.engine_pool(pool)
        if live is None or live.status.observed_generation != live.metadata.generation or _is_refused(live):
            return False
        if not _is_given_to(live, target):
            return False
        others = any(found.replicas for found in live.status.revisions if found.name != target)
        if others or live.status.updated_replicas < live.spec.bounded_replicas:
            return False
    return True


def _is_refused(live: EnginePool) -> bool:
    return any(item.type == EDIT_REFUSED and item.status == "True" for item in live.status.conditions)


def _kept_revisions(
    view: DeploymentView,
    revisions: tuple[RevisionStatus, ...],
    current: str | None,
    target: str,
    canary: CanaryTurn | None,
) -> tuple[RevisionStatus, ...]:
    """Those in use and the newest few before them, each with its share of the traffic."""
    limit = view.deployment.spec.rollout.revision_history_limit
    used = [found for found in revisions if found.name in {current, target}]
    history = [found for found in revisions if found.name not in {current, target}]
    percent = canary.status.percent if canary is not None and current != target else 0
    shares = {target: percent, current: 100 - percent} if current != target else {target: 100}
    return tuple(_with_share(found, shares.get(found.name, 0)) for found in (*used, *history[:limit]))


def _with_share(found: RevisionStatus, share: int) -> RevisionStatus:
    return RevisionStatus(
        name=found.name,
        intent=found.intent,
        generation=found.generation,
        created_at=found.created_at,
        share=share,
        checkpoint=found.checkpoint,
    )


def _rollout_status(
    view: DeploymentView, old: RolloutStatus, current: str | None, target: str, *, over: bool
) -> RolloutStatus:
    """How far the move to `target` is. `over`: everything has run it; replicas that came or went since are no move."""
    updated = sum(live.status.updated_replicas for live in view.pools)
    if over:
        return RolloutStatus(
            phase="Completed",
            to_revision=target,
            step=updated,
            started_at=old.started_at,
            progressed_at=old.progressed_at,
            canary=old.canary if old.to_revision == target else None,
        )
    if old.to_revision != target:
        return RolloutStatus(
            phase="Progressing",
            from_revision=current if current != target else old.to_revision,
            to_revision=target,
            step=updated,
            started_at=view.time,
            progressed_at=view.time,
        )
    progressed = old.step != updated or old.progressed_at is None
    return RolloutStatus(
        phase="Paused" if view.deployment.spec.rollout.paused else "Progressing",
        from_revision=old.from_revision,
        to_revision=target,
        step=updated,
        started_at=old.started_at,
        progressed_at=view.time if progressed else min(old.progressed_at or view.time, view.time),
        canary=old.canary,
    )


def _chosen_event(revision: RevisionStatus) -> tuple[Event, ...]:
    return (Event("Normal", "RevisionChosen", _describe(revision)),)


def _describe(revision: RevisionStatus) -> str:
    if revision.checkpoint is None:
        return f"revision {revision.name}"
    return f"revision {revision.name} serves Checkpoint {revision.checkpoint.name} (step {revision.checkpoint.step})"


def _deadline_left_s(view: DeploymentView, status: RolloutStatus) -> float | None:
    """Seconds until the deadline; None where none runs, as while a replica waits in the queue of its scheduler."""
    if status.progressed_at is None or (status.canary is not None and status.canary.phase == "Holding"):
        return None
    progressed = datetime.fromisoformat(status.progressed_at)
    limit_s = view.deployment.spec.rollout.progress_deadline_seconds + queued_s(view, status.to_revision, progressed)
    return limit_s - (view.now - progressed).total_seconds() if math.isfinite(limit_s) else None
