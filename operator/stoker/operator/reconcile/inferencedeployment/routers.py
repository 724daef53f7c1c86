"""The router pods of an InferenceDeployment: moved from one revision to the next, and replaced when they end. Pure.

Called by `reconcile`; pods are rendered by `render/router`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from stoker.operator.api.inferencedeployment import RouterStatus
from stoker.operator.domain.applied_hash import is_applied
from stoker.operator.domain.plan import Object, Ref
from stoker.operator.domain.pods import ended, ended_at, exit_of, is_ready, ref_of
from stoker.operator.domain.recovery import left_s, retry_delay_s
from stoker.operator.reconcile.enginepool.replica import revision_of
from stoker.operator.reconcile.enginepool.step import Counts, next_step
from stoker.operator.reconcile.enginepool.view import pods_with_free_index
from stoker.operator.reconcile.inferencedeployment.backends import BackendSnapshot
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView
from stoker.operator.render.keys import keys_config_map
from stoker.operator.render.network_policy import router_policies
from stoker.operator.render.router import (
    backends_config_map,
    front_service,
    router_base,
    router_config_map,
    router_intent,
    router_pod,
)

FORGOTTEN_AFTER_S = 600.0
"""Seconds after which a failure no longer delays a replacement."""
MAX_FAILED = 8


@dataclass(frozen=True)
class RouterRendering:
    """The routers' pod and configuration as first rendered for the user's intent.

    It is pinned in the status, so an operator upgrade restarts no router.
    """

    revision: str
    """Hash of the intent when it was rendered; the pods are named after it."""
    intent: str
    """Hash of the same intent by this version of the operator."""
    base: Mapping[str, Any]
    image: str | None


@dataclass(frozen=True)
class RouterStep:
    """The status of the routers, and the children and pods to change now."""

    status: RouterStatus
    apply: tuple[Object, ...]
    create: tuple[Object, ...]
    delete: tuple[Ref, ...]
    requeue_after_s: float | None = None


def plan_routers(view: DeploymentView, wanted: BackendSnapshot) -> RouterStep:
    """Missing children first; pods once their configuration exists."""
    pinned = _pinned_rendering(view)
    children = _missing_children(view, pinned, wanted)
    create, delete = _pod_changes(view, pinned)
    delay_s = _replacement_delay_s(view, pinned.revision) if create else 0.0
    status = RouterStatus(
        replicas=sum(not ended(pod) for pod in view.routers),
        ready=sum(is_ready(pod) for pod in view.routers),
        revision=pinned.revision,
        intent=pinned.intent,
        snapshot_version=wanted.version,
        snapshot_hash=wanted.hash,
        image=pinned.image,
        rendered=dict(pinned.base),
    )
    waits = delay_s or _delays_pods(view, children)
    return RouterStep(status, children, () if waits else create, delete, delay_s or None)


def _pinned_rendering(view: DeploymentView) -> RouterRendering:
    """The rendering in the status while the user's intent is the same, else a new one."""
    status = view.router_status
    intent = router_intent(view.deployment.spec)
    if status.revision is not None and status.rendered is not None and _is_known(view, intent):
        return RouterRendering(status.revision, intent, status.rendered, status.image)
    base = router_base(view.deployment, view.settings)
    return RouterRendering(intent, intent, base, base["pod"]["spec"]["containers"][0]["image"])


def _is_known(view: DeploymentView, intent: str) -> bool:
    """Whether the rendering in the status is of this intent.

    Another version of the operator had other defaults, and so another hash of the same manifest: then the spec of the
    last pass decides, read with the defaults of this version.
    """
    if intent == (view.router_status.intent or view.router_status.revision):
        return True
    last = view.last_spec()
    return last is not None and router_intent(last) == intent


def _missing_children(view: DeploymentView, pinned: RouterRendering, wanted: BackendSnapshot) -> tuple[Object, ...]:
    """Public keys, configuration, snapshot, Service and policy that are not applied as wanted."""
    deployment, resource = view.deployment, view.seen.resource
    bodies = (
        keys_config_map(resource, view.settings),
        router_config_map(deployment, resource, pinned.base),
        backends_config_map(deployment, resource, wanted.body),
        front_service(deployment, resource, view.settings),
        *router_policies(deployment, resource, view.settings),
    )
    return tuple(body for body in bodies if not is_applied(body, _live(view, body)))


def _delays_pods(view: DeploymentView, missing: tuple[Object, ...]) -> bool:
    """Whether pods wait for a missing child. They do not for an edit of the Service or a policy, which the cluster may
    refuse."""
    return any(body["kind"] == "ConfigMap" or _live(view, body) is None for body in missing)


def _live(view: DeploymentView, body: Object) -> Object | None:
    """The child as it is in the cluster."""
    name = body["metadata"]["name"]
    return next((found for found in view.seen.of_kind(body["kind"]) if found["metadata"]["name"] == name), None)


def _pod_changes(view: DeploymentView, pinned: RouterRendering) -> tuple[tuple[Object, ...], tuple[Ref, ...]]:
    """Pods to make and to delete: one more of the new revision at a time, and an old one when a new one is ready.

    A router that is deleted streams its last answers in its grace period.
    """
    revision = pinned.revision
    alive = [pod for pod in view.routers if not ended(pod) and not pod["metadata"].get("deletionTimestamp")]
    new = [pod for pod in alive if revision_of(pod) == revision]
    old = [pod for pod in alive if revision_of(pod) != revision]
    counts = Counts(
        sum(is_ready(pod) for pod in new),
        sum(not is_ready(pod) for pod in new),
        sum(is_ready(pod) for pod in old),
        sum(not is_ready(pod) for pod in old),
    )
    step = next_step(view.deployment.spec.router.replicas, 1, 0, counts)
    kept = _recent_failures(view, revision)
    gone = [pod for pod in view.routers if ended(pod) and pod not in kept]
    gone = [pod for pod in gone if not pod["metadata"].get("deletionTimestamp")]
    gone += [pod for pod in old if not is_ready(pod)][: step.drop_old_unready]
    gone += [pod for pod in old if is_ready(pod)][: step.drain_old]
    gone += [pod for pod in new if not is_ready(pod)][: step.drop_new_unready]
    gone += [pod for pod in new if is_ready(pod)][: step.drain_new]
    return _new_pods(view, pinned, step.create_new), tuple(ref_of(pod) for pod in gone)


def _recent_failures(view: DeploymentView, revision: str) -> list[Object]:
    """Routers of the revision that ended by themselves lately, the newest first.

    Their pods are kept for the logs and for the count.
    """
    lately = view.now - timedelta(seconds=FORGOTTEN_AFTER_S)
    found = [
        (at, pod["metadata"]["name"], pod)
        for pod in view.routers
        if ended(pod) and revision_of(pod) == revision and not exit_of(pod).disrupted
        if (at := ended_at(pod)) is not None and at > lately
    ]
    return [pod for _, _, pod in sorted(found, key=lambda item: item[:2], reverse=True)[:MAX_FAILED]]


def _replacement_delay_s(view: DeploymentView, revision: str) -> float:
    """Seconds until the next router may be made; the delay grows with the recent failures."""
    failed = _recent_failures(view, revision)
    return left_s(ended_at(failed[0]), retry_delay_s(len(failed)), view.now) if failed else 0.0


def _new_pods(view: DeploymentView, pinned: RouterRendering, number: int) -> tuple[Object, ...]:
    def render(index: int) -> Object:
        return router_pod(view.deployment, view.seen.resource, pinned.base, pinned.revision, index)

    return pods_with_free_index(render, view.routers, number)
