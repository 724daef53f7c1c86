"""The observation of an EnginePool, sorted once: its replicas, their reports, the routers in front of them.

Read-only. Made once per pass; also by the InferenceDeployment for its pools.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stoker.operator.api.enginepool import EnginePool, EngineStatus, Revision
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.labels import ROLE
from stoker.operator.domain.plan import Object, Observed, Report
from stoker.operator.domain.pods import is_owned, is_ready, label
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.enginepool.replica import Replica, replicas_of
from stoker.operator.reconcile.enginepool.split import wanted_by_revision
from stoker.operator.reconcile.enginepool.step import resolve
from stoker.operator.reconcile.intent import Intent, read_in_force

FAILURES_TO_STALL = 3
"""Failures in a row, without a ready engine between them, after which a person must act."""


@dataclass(frozen=True)
class PoolView:
    """Read-only; every decision of the reconcile is a function of it."""

    pool: EnginePool
    """With the spec in force."""
    intent: Intent
    seen: Observed
    settings: Settings
    now: datetime
    replicas: tuple[Replica, ...]
    routers: tuple[Object, ...]
    """Ready ones."""

    @property
    def time(self) -> str:
        return timestamp(self.now)

    @property
    def target(self) -> Revision:
        """The revision with the largest share: without a split new pods are made of it."""
        return max(self.pool.spec.revisions, key=lambda revision: revision.share)

    @property
    def wanted(self) -> dict[str, int]:
        """Replicas of each revision by its share of the spec's."""
        spec, replicas = self.pool.spec, self.pool.spec.bounded_replicas
        surge = resolve(spec.max_surge, replicas, up=True)
        return wanted_by_revision(replicas, surge, [(found.name, found.share) for found in spec.revisions])

    @property
    def is_split(self) -> bool:
        """Whether several revisions have a share."""
        return sum(revision.share > 0 for revision in self.pool.spec.revisions) > 1 and not self.pool.spec.paused

    @property
    def shared(self) -> frozenset[str]:
        """Names of the revisions that have a share."""
        return frozenset(revision.name for revision in self.pool.spec.revisions if revision.share)

    @property
    def serving(self) -> tuple[Replica, ...]:
        """Replicas that count: neither broken, nor draining, nor being deleted."""
        return tuple(replica for replica in self.replicas if replica.serving)

    @property
    def spec_changed(self) -> bool:
        """Whether other engines are wanted than at the last pass: failures of the old ones no longer count."""
        known = self.pool.status.accepted_spec
        if known is None:
            return self.pool.status.observed_generation != self.pool.metadata.generation
        return _without_size(known) != _without_size(self.intent.spec)

    def report(self, pod: Object) -> Report | None:
        return self.seen.reports.get(pod["metadata"]["uid"])

    def known(self, pod: Object) -> EngineStatus | None:
        """The status of this very pod, as written by an earlier pass."""
        uid = pod["metadata"]["uid"]
        return next((engine for engine in self.pool.status.engines if engine.uid == uid), None)

    def is_known_as_failed(self, replica: Replica) -> bool:
        """Whether an earlier pass has written that the replica failed."""
        failed = {engine.uid for engine in self.pool.status.engines if engine.phase == "Failed"}
        return bool(failed & replica.uids)


def pool_view(seen: Observed, settings: Settings, now: datetime) -> PoolView:
    """Sort what is observed."""
    pool, intent = read_in_force(EnginePool, seen.resource, controls=("replicas",))
    uid = pool.metadata.uid
    pods = [pod for pod in seen.of_kind("Pod") if role_of(pod) == "engine" and is_owned(pod, uid)]
    routers = [pod for pod in seen.of_kind("Pod") if role_of(pod) == "router" and is_ready(pod) and _is_near(pod, pool)]
    return PoolView(
        pool=pool,
        intent=intent,
        seen=seen,
        settings=settings,
        now=now,
        replicas=replicas_of(pods),
        routers=tuple(routers),
    )


def _is_near(router: Object, pool: EnginePool) -> bool:
    """Whether a router belongs to the deployment of the pool."""
    return any(is_owned(router, owner.uid) for owner in pool.metadata.owner_references)


def role_of(pod: Object) -> str:
    """`engine` or `router`."""
    return label(pod, ROLE)


def pods_with_free_index(
    render: Callable[[int], Object], existing: Collection[Object], number: int
) -> tuple[Object, ...]:
    """`number` new pods with the lowest indexes whose names no existing pod has."""
    taken = {pod["metadata"]["name"] for pod in existing}
    made: list[Object] = []
    index = 0
    while len(made) < number:
        pod = render(index)
        if pod["metadata"]["name"] not in taken:
            made.append(pod)
        index += 1
    return tuple(made)


def _without_size(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in spec.items() if name not in ("replicas", "bounds")}
