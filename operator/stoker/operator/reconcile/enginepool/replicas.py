"""The engine pods and other children of an EnginePool to make, drain and delete next. Pure.

Called by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    pods = _sort_serving(view)
    spec = view.pool.spec
    surge = resolve(spec.max_surge, spec.replicas, up=True)
    unavailable = resolve(spec.max_unavailable, spec.replicas, up=False)
    step = next_step(spec.replicas, surge, unavailable, pods.counts)
    dropped = (
        *failed,
        *least_loaded(view, pods.old_unready, step.drop_old_unready),
        *least_loaded(view, pods.new_unready, step.drop_new_unready),
    )
    surplus = (
        *least_loaded(view, pods.old_ready, step.drain_old),
        *least_loaded(view, pods.new_ready, step.drain_new),
    )
    released = releasable_pods(view, (*pods.old_ready, *pods.new_ready), surplus, spec.replicas - unavailable)
    drain = advance_drains(view, dropped)
    delay_s = replacement_delay_s(view)
    waits = [value for value in (drain.requeue_after_s, delay_s or None) if value is not None]
    return Plan(
        apply=children,
        create=() if children or delay_s > 0 else _new_pods(view, step.create_new),
        patch=cordon_pods(released),
        calls=drain.calls,
        delete=drain.delete,
        requeue_after_s=min(waits, default=None),
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


def _new_pods(view: PoolView, number: int) -> tuple[Object, ...]:
    def render(index: int) -> Object:
        return engine_pod(view.pool, view.seen.resource, view.target, index)

    return pods_with_free_index(render, view.pods, number)
