"""The engine pods and other children of an EnginePool to make, drain and delete next. Pure.

Called by `reconcile`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.operator.api.enginepool import Revision
from stoker.operator.domain.applied_hash import is_applied
from stoker.operator.domain.plan import Object, Plan
from stoker.operator.domain.pods import ended, is_ready
from stoker.operator.reconcile.enginepool.drain import (
    advance_drains,
    cordon_pods,
    least_loaded,
    releasable_pods,
)
from stoker.operator.reconcile.enginepool.failures import replacement_delay_s
from stoker.operator.reconcile.enginepool.split import next_split
from stoker.operator.reconcile.enginepool.step import Counts, next_step, resolve
from stoker.operator.reconcile.enginepool.view import PoolView, leaving, pods_with_free_index, revision_of
from stoker.operator.render.engine import disruption_budget, engine_pod, engine_service, revision_config_map
from stoker.operator.render.keys import keys_config_map
from stoker.operator.render.network_policy import engine_policies


@dataclass(frozen=True)
class ServingPods:
    """Serving pods by revision and readiness."""

    new_ready: tuple[Object, ...]
    new_unready: tuple[Object, ...]
    old_ready: tuple[Object, ...]
    old_unready: tuple[Object, ...]

    @property
    def counts(self) -> Counts:
        return Counts(len(self.new_ready), len(self.new_unready), len(self.old_ready), len(self.old_unready))


def plan_replicas(view: PoolView) -> Plan:
    """Missing children first, then one step towards the wanted pods."""
    children = _missing_children(view)
    failed = tuple(pod for pod in view.pods if ended(pod) and not leaving(pod))
    step = _split_step(view) if view.is_split else _single_step(view)
    ready = [pod for pod in view.serving if is_ready(pod)]
    released = releasable_pods(view, ready, step.surplus, step.needed)
    drain = advance_drains(view, (*failed, *step.dropped))
    delay_s = replacement_delay_s(view)
    waits = [value for value in (drain.requeue_after_s, delay_s or None) if value is not None]
    return Plan(
        apply=children,
        create=() if children or delay_s > 0 else _new_pods(view, step.create),
        patch=cordon_pods(released),
        calls=drain.calls,
        delete=drain.delete,
        requeue_after_s=min(waits, default=None),
    )


@dataclass(frozen=True)
class PodStep:
    """Pods to make, by revision, and pods that are too many."""

    create: tuple[tuple[Revision, int], ...]
    dropped: tuple[Object, ...]
    surplus: tuple[Object, ...]
    """Ready ones."""
    needed: int
    """Ready pods that must stay."""


def _limits(view: PoolView, replicas: int) -> tuple[int, int]:
    """Surge and unavailable replicas."""
    spec = view.pool.spec
    return resolve(spec.max_surge, replicas, up=True), resolve(spec.max_unavailable, replicas, up=False)


def _single_step(view: PoolView) -> PodStep:
    """The step to one revision."""
    pods, replicas = _sort_serving(view), view.pool.spec.replicas
    surge, unavailable = _limits(view, replicas)
    step = next_step(replicas, surge, unavailable, pods.counts)
    return PodStep(
        create=((view.target, step.create_new),),
        dropped=(
            *least_loaded(view, pods.old_unready, step.drop_old_unready),
            *least_loaded(view, pods.new_unready, step.drop_new_unready),
        ),
        surplus=(
            *least_loaded(view, pods.old_ready, step.drain_old),
            *least_loaded(view, pods.new_ready, step.drain_new),
        ),
        needed=replicas - unavailable,
    )


def _split_step(view: PoolView) -> PodStep:
    """The step to several revisions at once."""
    ready: defaultdict[str, list[Object]] = defaultdict(list)
    unready: defaultdict[str, list[Object]] = defaultdict(list)
    for pod in view.serving:
        (ready if is_ready(pod) else unready)[revision_of(pod)].append(pod)
    replicas = view.pool.spec.replicas
    surge, unavailable = _limits(view, replicas)
    counts = {name: (len(ready[name]), len(unready[name])) for name in {*ready, *unready}}
    steps = next_split(replicas, surge, unavailable, view.wanted, counts)
    revisions = {revision.name: revision for revision in view.pool.spec.revisions}
    return PodStep(
        create=tuple((revisions[name], step.create) for name, step in steps.items() if step.create),
        dropped=tuple(
            pod for name, step in steps.items() for pod in least_loaded(view, unready[name], step.drop_unready)
        ),
        surplus=tuple(pod for name, step in steps.items() for pod in least_loaded(view, ready[name], step.drain)),
        needed=replicas - unavailable,
    )


def _sort_serving(view: PoolView) -> ServingPods:
    """New and old pods. While a rollout is paused every revision counts as new."""
    target, paused = view.target.name, view.pool.spec.paused
    new = [pod for pod in view.serving if paused or revision_of(pod) == target]
    old = [pod for pod in view.serving if not paused and revision_of(pod) != target]

    def split(pods: Sequence[Object], *, ready: bool) -> tuple[Object, ...]:
        return tuple(pod for pod in pods if is_ready(pod) is ready)

    return ServingPods(split(new, ready=True), split(new, ready=False), split(old, ready=True), split(old, ready=False))


def _missing_children(view: PoolView) -> tuple[Object, ...]:
    """Public keys, configuration of every revision, Service, budget and policy that are not applied as wanted."""
    pool, resource = view.pool, view.seen.resource
    wanted = (
        keys_config_map(resource, view.settings),
        *(revision_config_map(pool, resource, revision) for revision in pool.spec.revisions),
        engine_service(pool, resource, view.settings),
        disruption_budget(pool, resource),
        *engine_policies(pool, resource, view.settings),
    )
    live = {
        (kind, found["metadata"]["name"]): found
        for kind in ("ConfigMap", "Service", "PodDisruptionBudget", "NetworkPolicy")
        for found in view.seen.of_kind(kind)
    }
    return tuple(body for body in wanted if not is_applied(body, live.get((body["kind"], body["metadata"]["name"]))))


def _new_pods(view: PoolView, wanted: Sequence[tuple[Revision, int]]) -> tuple[Object, ...]:
    made: list[Object] = []
    for revision, number in wanted:

        def render(index: int, revision: Revision = revision) -> Object:
            return engine_pod(view.pool, view.seen.resource, revision, index)

        made += pods_with_free_index(render, [*view.pods, *made], number)
    return tuple(made)
