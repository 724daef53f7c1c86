"""The observation of an InferenceDeployment, sorted once: pools, engines, routers, reports, Checkpoints."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.enginepool import EnginePool, Revision
from stoker.operator.api.inferencedeployment import (
    InferenceDeployment,
    InferenceDeploymentSpec,
    RevisionStatus,
    RouterStatus,
)
from stoker.operator.api.metadata import read
from stoker.operator.api.pool import Pool
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.plan import Object, Observed
from stoker.operator.domain.pods import ended, is_endpoint, is_owned, is_ready
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.enginepool.replica import draining, is_leader, leaving, revision_of
from stoker.operator.reconcile.enginepool.view import role_of
from stoker.operator.reconcile.intent import Intent, read_in_force
from stoker.operator.render.names import short_hash

LONGEST_NAME = 30
"""Characters of a deployment's name in those of its pools."""


@dataclass(frozen=True)
class DeploymentView:
    """Read-only; every decision of the reconcile is a function of it."""

    deployment: InferenceDeployment
    """With the spec in force."""
    intent: Intent
    seen: Observed
    settings: Settings
    now: datetime
    pools: tuple[EnginePool, ...]
    engines: tuple[Object, ...]
    """Pods that answer requests: one of each replica."""
    routers: tuple[Object, ...]
    tasks: tuple[Object, ...]
    checkpoints: tuple[Checkpoint, ...]

    @property
    def time(self) -> str:
        return timestamp(self.now)

    @property
    def router_status(self) -> RouterStatus:
        return self.deployment.status.router or RouterStatus()

    def last_spec(self) -> InferenceDeploymentSpec | None:
        """Return the spec that the last pass worked with, read with the defaults of this version."""
        accepted = self.deployment.status.accepted_spec
        return None if accepted is None else InferenceDeploymentSpec.model_validate(accepted)

    def engine_pool(self, pool: Pool) -> EnginePool | None:
        """The pool's EnginePool, if it exists."""
        name = pool_object_name(self.deployment, pool)
        return next((found for found in self.pools if found.metadata.name == name), None)

    def revision(self, name: str | None) -> RevisionStatus | None:
        return next((found for found in self.deployment.status.revisions if found.name == name), None)


def deployment_view(seen: Observed, settings: Settings, now: datetime) -> DeploymentView:
    """Sort what is observed."""
    deployment, intent = read_in_force(InferenceDeployment, seen.resource)
    uid = deployment.metadata.uid
    pools = [read(EnginePool, found) for found in seen.of_kind("EnginePool") if is_owned(found, uid)]
    owners = (uid, *(pool.metadata.uid for pool in pools))
    mine = [pod for pod in seen.of_kind("Pod") if any(is_owned(pod, owner) for owner in owners)]
    return DeploymentView(
        deployment=deployment,
        intent=intent,
        seen=seen,
        settings=settings,
        now=now,
        pools=tuple(pools),
        engines=tuple(pod for pod in mine if role_of(pod) == "engine" and is_endpoint(pod)),
        routers=tuple(pod for pod in mine if role_of(pod) == "router"),
        tasks=tuple(pod for pod in mine if role_of(pod) == "task"),
        checkpoints=tuple(read(Checkpoint, found) for found in seen.of_kind("Checkpoint")),
    )


def pool_object_name(deployment: InferenceDeployment, pool: Pool) -> str:
    """`<deployment>-<pool>`. A long name is cut and gets a hash, so that the pool's pods still have a host name."""
    name = deployment.metadata.name
    short = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 6].rstrip('-.')}-{short_hash(name)}"
    return f"{short}-{pool.name}"


def former_pools(view: DeploymentView) -> tuple[EnginePool, ...]:
    """EnginePools of pools that are no longer in the spec. They serve until the others are ready."""
    wanted = {pool_object_name(view.deployment, pool) for pool in view.deployment.spec.pools}
    return tuple(live for live in view.pools if live.metadata.name not in wanted and not live.deleting)


def has_pods(pool: EnginePool, revision: Revision) -> bool:
    """Whether the pool has pods of a revision, whatever its share."""
    return any(found.name == revision.name and found.replicas for found in pool.status.revisions)


def ready_by_revision(view: DeploymentView, pool: EnginePool) -> Counter[str]:
    """Ready replicas of a pool that get new requests where their revision has a share."""
    leaders = (pod for pod in view.engines if is_owned(pod, pool.metadata.uid) and is_leader(pod))
    return Counter(
        revision_of(pod) for pod in leaders if is_ready(pod) and not (ended(pod) or draining(pod) or leaving(pod))
    )
