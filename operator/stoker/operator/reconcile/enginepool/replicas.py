"""The replicas and other children of an EnginePool to make, drain and delete next. Pure.

A replica of several pods is made, drained and deleted as a whole; one that has lost a pod is replaced as a whole.

Called by `reconcile`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from stoker.operator.api.enginepool import Revision
from stoker.operator.domain.applied_hash import is_applied
from stoker.operator.domain.plan import Object, Plan
from stoker.operator.domain.schedulers import Missing
from stoker.operator.reconcile.enginepool.bind import Binding
from stoker.operator.reconcile.enginepool.drain import (
    advance_drains,
    cordon,
    least_loaded,
    releasable,
)
from stoker.operator.reconcile.enginepool.failures import replacement_delay_s
from stoker.operator.reconcile.enginepool.queueing import group_of, new_group, scheduler_for
from stoker.operator.reconcile.enginepool.replica import Replica
from stoker.operator.reconcile.enginepool.split import next_split
from stoker.operator.reconcile.enginepool.step import Counts, next_step, resolve
from stoker.operator.reconcile.enginepool.view import PoolView
from stoker.operator.render.engine import disruption_budget, engine_pods, engine_service, revision_config_map
from stoker.operator.render.keys import keys_config_map
from stoker.operator.render.network_policy import engine_policies
from stoker.operator.render.replica_key import replica_secret, replica_secret_name


@dataclass(frozen=True)
class ServingReplicas:
    """Serving replicas by revision and readiness."""

    new_ready: tuple[Replica, ...]
    new_unready: tuple[Replica, ...]
    old_ready: tuple[Replica, ...]
    old_unready: tuple[Replica, ...]

    @property
    def counts(self) -> Counts:
        return Counts(len(self.new_ready), len(self.new_unready), len(self.old_ready), len(self.old_unready))


def plan_replicas(view: PoolView, binding: Binding) -> Plan:
    """Missing children first, then one step towards the wanted pods, and the nodes of those that wait."""
    children = _missing_children(view)
    failed = tuple(found for found in view.replicas if found.broken or found.leaving)
    step = _split_step(view) if view.is_split else _single_step(view)
    ready = [found for found in view.serving if found.ready]
    released = releasable(view, ready, step.surplus, step.needed)
    gone = (*failed, *step.dropped, *(found for found in binding.given_back if found not in step.dropped))
    drain = advance_drains(view, gone)
    delay_s = replacement_delay_s(view)
    after_s = (drain.requeue_after_s, delay_s or None, binding.requeue_after_s)
    waits = [value for value in after_s if value is not None]
    dropped = {found.name for found in gone}
    uids = {uid for found in gone for uid in found.uids}
    return Plan(
        generate=_missing_keys(view),
        apply=(*children, *binding.apply),
        create=() if children or delay_s > 0 else (*_missing_pods(view, dropped), *_new_pods(view, step.create)),
        patch=(*cordon(released), *(patch for patch in binding.patches if patch.ref.uid not in uids)),
        calls=drain.calls,
        delete=drain.delete,
        requeue_after_s=min(waits, default=None),
    )


@dataclass(frozen=True)
class Step:
    """Replicas to make, by revision, and replicas that are too many."""

    create: tuple[tuple[Revision, int], ...]
    dropped: tuple[Replica, ...]
    surplus: tuple[Replica, ...]
    """Ready ones."""
    needed: int
    """Ready replicas that must stay."""


def _limits(view: PoolView, replicas: int) -> tuple[int, int]:
    """Surge and unavailable replicas. Where percentages of both are none, one may be missing, as in a Deployment of
    Kubernetes: else no replica could ever be replaced."""
    spec = view.pool.spec
    surge = resolve(spec.max_surge, replicas, up=True)
    unavailable = resolve(spec.max_unavailable, replicas, up=False)
    return surge, unavailable if surge or unavailable else 1


def _single_step(view: PoolView) -> Step:
    """The step to one revision."""
    serving, replicas = _sort_serving(view), view.pool.spec.bounded_replicas
    surge, unavailable = _limits(view, replicas)
    step = next_step(replicas, surge, unavailable, serving.counts)
    return Step(
        create=((view.target, step.create_new),),
        dropped=(
            *least_loaded(view, serving.old_unready, step.drop_old_unready),
            *least_loaded(view, serving.new_unready, step.drop_new_unready),
        ),
        surplus=(
            *least_loaded(view, serving.old_ready, step.drain_old),
            *least_loaded(view, serving.new_ready, step.drain_new),
        ),
        needed=replicas - unavailable,
    )


def _split_step(view: PoolView) -> Step:
    """The step to several revisions at once."""
    ready: defaultdict[str, list[Replica]] = defaultdict(list)
    unready: defaultdict[str, list[Replica]] = defaultdict(list)
    for found in view.serving:
        (ready if found.ready else unready)[found.revision].append(found)
    replicas = view.pool.spec.bounded_replicas
    surge, unavailable = _limits(view, replicas)
    counts = {name: (len(ready[name]), len(unready[name])) for name in {*ready, *unready}}
    steps = next_split(replicas, surge, unavailable, view.wanted, counts)
    revisions = {revision.name: revision for revision in view.pool.spec.revisions}
    return Step(
        create=tuple((revisions[name], step.create) for name, step in steps.items() if step.create),
        dropped=tuple(
            found for name, step in steps.items() for found in least_loaded(view, unready[name], step.drop_unready)
        ),
        surplus=tuple(found for name, step in steps.items() for found in least_loaded(view, ready[name], step.drain)),
        needed=replicas - unavailable,
    )


def _sort_serving(view: PoolView) -> ServingReplicas:
    """New and old replicas. While a rollout is paused every revision counts as new."""
    target, paused = view.target.name, view.pool.spec.paused
    new = [found for found in view.serving if paused or found.revision == target]
    old = [found for found in view.serving if not paused and found.revision != target]

    def split(replicas: Sequence[Replica], *, ready: bool) -> tuple[Replica, ...]:
        return tuple(found for found in replicas if found.ready is ready)

    return ServingReplicas(
        split(new, ready=True), split(new, ready=False), split(old, ready=True), split(old, ready=False)
    )


def _missing_children(view: PoolView) -> tuple[Object, ...]:
    """Public keys, configuration of every revision, Service, budget and policy that are not applied as wanted."""
    pool, resource = view.pool, view.seen.resource
    wanted = (
        keys_config_map(resource, view.settings),
        *(revision_config_map(pool, resource, revision) for revision in pool.spec.revisions),
        engine_service(pool, resource, view.settings),
        disruption_budget(pool, resource, view.wanted),
        *engine_policies(pool, resource, view.settings),
    )
    live = {
        (kind, found["metadata"]["name"]): found
        for kind in ("ConfigMap", "Service", "PodDisruptionBudget", "NetworkPolicy")
        for found in view.seen.of_kind(kind)
    }
    return tuple(body for body in wanted if not is_applied(body, live.get((body["kind"], body["metadata"]["name"]))))


def _missing_keys(view: PoolView) -> tuple[Object, ...]:
    """The Secret by which the pods of a replica know each other, until it exists.

    An operator that cannot see Secrets asks for it with each change of the pool.
    """
    pool = view.pool
    if all(revision.template.pods_per_replica == 1 for revision in pool.spec.revisions):
        return ()
    name = replica_secret_name(pool)
    if view.settings.sees_secrets:
        missing = not any(found["metadata"]["name"] == name for found in view.seen.of_kind("Secret"))
    else:
        missing = pool.status.observed_generation != pool.metadata.generation
    return (replica_secret(pool, view.seen.resource),) if missing else ()


def _missing_pods(view: PoolView, dropped: Collection[str]) -> tuple[Object, ...]:
    """Pods of replicas whose making was interrupted."""
    revisions = {revision.name: revision for revision in view.pool.spec.revisions}
    made: list[Object] = []
    for found in view.serving:
        if found.complete or found.name in dropped or found.revision not in revisions:
            continue
        index = int(found.name.rpartition("-")[2])
        present = {pod["metadata"]["name"] for pod in found.pods}
        revision = revisions[found.revision]
        group = group_of(found, revision.template)
        pods = engine_pods(view.pool, view.seen.resource, revision, index, view.settings, group)
        made += [pod for pod in pods if pod["metadata"]["name"] not in present]
    return tuple(made)


def _new_pods(view: PoolView, wanted: Sequence[tuple[Revision, int]]) -> tuple[Object, ...]:
    """The pods of new replicas, with the lowest indexes of which no pod has a name. Without their scheduler none is
    made."""
    taken = {pod["metadata"]["name"] for found in view.replicas for pod in found.pods}
    made: list[Object] = []
    for revision, number in wanted:
        free = (pods for pods in _rendered(view, revision) if taken.isdisjoint(pod["metadata"]["name"] for pod in pods))
        made += [pod for pods in islice(free, number) for pod in pods]
    return tuple(made)


def _rendered(view: PoolView, revision: Revision) -> Iterator[tuple[Object, ...]]:
    """Yield the pods of each replica that a revision could have; none while its scheduler is missing."""
    scheduler = scheduler_for(view, revision.template)
    if isinstance(scheduler, Missing):
        return
    for index in count():
        group = new_group(view, revision, scheduler, index)
        yield engine_pods(view.pool, view.seen.resource, revision, index, view.settings, group)
