"""The whole status of an InferenceDeployment, derived from what is observed and what the pass decided. Pure."""

from __future__ import annotations

from stoker.operator.api.enginepool import EnginePool
from stoker.operator.api.inferencedeployment import PoolSummary
from stoker.operator.api.pool import Pool
from stoker.operator.domain.labels import POOL
from stoker.operator.domain.plan import Plan
from stoker.operator.reconcile.inferencedeployment.autoscaling import (
    autoscaling_condition,
    pool_decisions,
    scaling_events,
    wanted_replicas,
)
from stoker.operator.reconcile.inferencedeployment.cache_tiers import store_condition
from stoker.operator.reconcile.inferencedeployment.disaggregation import disaggregation_conditions
from stoker.operator.reconcile.inferencedeployment.endpoints import served_names, url_of
from stoker.operator.reconcile.inferencedeployment.fallback import fallback_condition
from stoker.operator.reconcile.inferencedeployment.other_models import other_model_statuses, other_models_condition
from stoker.operator.reconcile.inferencedeployment.outcome import DeploymentFields, DeploymentOutcome
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, former_pools
from stoker.operator.reconcile.intent import EDIT_REFUSED, edit_conditions, edit_events
from stoker.operator.reconcile.outcome import derive_plan

MAX_POOLS = 8
"""As many as the status lists."""


def derive_status(view: DeploymentView, outcome: DeploymentOutcome) -> Plan:
    """The outcome's plan with the whole status that follows from view and outcome."""
    status = view.deployment.status
    return derive_plan(
        outcome,
        seen=view.seen,
        status=status,
        fields=_fields(view, outcome) if outcome.health is not None else {},
        now=view.now,
        conditions=(
            *edit_conditions(view.intent),
            autoscaling_condition(view),
            fallback_condition(view),
            other_models_condition(view),
            *disaggregation_conditions(view),
            store_condition(view),
        ),
        events=(*edit_events(view.intent, status), *scaling_events(view)),
    )


def pool_summaries(view: DeploymentView) -> tuple[PoolSummary, ...]:
    """One line for each pool of the spec, and for each former one that serves until they are ready."""
    former = (_former_summary(live) for live in former_pools(view))
    return (*(_pool_summary(view, pool) for pool in view.deployment.spec.pools), *former)[:MAX_POOLS]


def _fields(view: DeploymentView, outcome: DeploymentOutcome) -> DeploymentFields:
    pools = pool_summaries(view)
    accepted = view.intent.accepted
    serving = next((found for found in outcome.revisions if found.name == outcome.current_revision), None)
    return DeploymentFields(
        phase=outcome.phase,
        endpoint=url_of(view.deployment),
        models=served_names(view, outcome.current_revision),
        other_models=other_model_statuses(view),
        current_checkpoint=serving.checkpoint if serving else None,
        model_digest=_model_digest(view, outcome.current_revision),
        current_revision=outcome.current_revision,
        revisions=outcome.revisions,
        rollout=outcome.rollout,
        pools=pools,
        router=outcome.router,
        ready=f"{sum(pool.ready for pool in pools)}/{sum(pool.replicas for pool in pools)}",
        accepted_spec=dict(accepted) if accepted is not None else None,
    )


def _pool_summary(view: DeploymentView, pool: Pool) -> PoolSummary:
    live = view.engine_pool(pool)
    if live is None:
        replicas = 0 if _is_rolled_back(view) else pool.replicas
        return PoolSummary(name=pool.name, role=pool.role, replicas=replicas, decisions=pool_decisions(view, pool))
    status = live.status
    refusal = next((item.message for item in status.conditions if item.type == EDIT_REFUSED), None)
    return PoolSummary(
        name=pool.name,
        role=pool.role,
        engine_pool=live.metadata.name,
        replicas=_replicas(view, pool, live),
        ready=status.ready_replicas,
        updated=status.updated_replicas,
        message=status.message or refusal,
        last_start=status.last_start,
        decisions=pool_decisions(view, pool),
    )


def _is_rolled_back(view: DeploymentView) -> bool:
    """Whether a canary was given up; a pool that came with its revision is not made again."""
    rollout = view.deployment.status.rollout
    return rollout is not None and rollout.phase == "RolledBack"


def _former_summary(live: EnginePool) -> PoolSummary:
    status = live.status
    return PoolSummary(
        name=live.metadata.labels.get(POOL, live.metadata.name),
        role=live.spec.revisions[0].template.role,
        engine_pool=live.metadata.name,
        replicas=live.spec.bounded_replicas,
        ready=status.ready_replicas,
        message=status.message,
        last_start=status.last_start,
    )


def _replicas(view: DeploymentView, pool: Pool, live: EnginePool) -> int:
    """The replicas that the pool has or gets in this pass, so that no status calls a deployment ready for an edit whose
    replicas are still missing."""
    wanted = wanted_replicas(view, pool, live)
    return live.spec.bounded_replicas if wanted == live.spec.replicas else wanted


def _model_digest(view: DeploymentView, revision: str | None) -> str | None:
    """What engines of a revision have loaded; of several digests the smallest, so that passes agree."""
    pools = filter(None, map(view.engine_pool, view.deployment.spec.pools))
    engines = [engine for pool in pools for engine in pool.status.engines if engine.revision == revision]
    return min(filter(None, (engine.model_digest for engine in engines)), default=None)
