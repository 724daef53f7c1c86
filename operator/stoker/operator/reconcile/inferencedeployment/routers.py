"""The router pods of an InferenceDeployment: replaced one revision by another, made anew when they end. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from stoker.operator.api.inferencedeployment import RouterStatus
from stoker.operator.domain.applied_hash import is_applied
from stoker.operator.domain.plan import Object, Ref
from stoker.operator.domain.pods import ended, ended_at, exit_of, is_ready, label, ref_of
from stoker.operator.domain.recovery import left_s, retry_delay_s
from stoker.operator.reconcile.enginepool.step import Counts, next_step
from stoker.operator.reconcile.inferencedeployment.backends import Snapshot
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView
from stoker.operator.render.router import (
    backends_config_map,
    front_service,
    router_base,
    router_config_map,
    router_intent,
    router_pod,
)
from stoker.operator.render.trainer import keys_config_map

FORGIVEN_S = 600.0
"""An end that is longer ago slows nothing down any more."""
MAX_FAILED = 8


@dataclass(frozen=True)
class RouterStep:
    """What the routers need now."""

    status: RouterStatus
    apply: tuple[Object, ...]
    create: tuple[Object, ...]
    delete: tuple[Ref, ...]
    requeue_after_s: float | None = None


def step_routers(view: DeploymentView, wanted: Snapshot) -> RouterStep:
    """Children first; pods once their configuration is there."""
    status = _pinned(view)
    children = _missing(view, status, wanted)
    ready = sum(is_ready(pod) for pod in view.routers)
    alive = sum(not ended(pod) for pod in view.routers)
    status = status.model_copy(update={"replicas": alive, "ready": ready})
    create, delete = _pods(view, status)
    rest_s = _rest_s(view, str(status.revision)) if create else 0.0
    return RouterStep(status, children, () if children or rest_s else create, delete, rest_s or None)


def _pinned(view: DeploymentView) -> RouterStatus:
    """The rendering of the user's present wishes; an operator upgrade does not change it."""
    status = view.router_status
    intent = router_intent(view.deployment)
    if status.revision == intent and status.rendered is not None:
        return status
    base = router_base(view.deployment, view.settings)
    image = base["pod"]["spec"]["containers"][0]["image"]
    return status.model_copy(update={"revision": intent, "rendered": base, "image": image})


def _missing(view: DeploymentView, status: RouterStatus, wanted: Snapshot) -> tuple[Object, ...]:
    deployment, resource = view.deployment, view.seen.resource
    assert status.rendered is not None
    bodies = (
        keys_config_map(resource, view.settings),
        router_config_map(deployment, resource, status.rendered),
        backends_config_map(deployment, resource, wanted.body),
        front_service(deployment, resource, view.settings),
    )
    live = {(k, found["metadata"]["name"]): found for k in ("ConfigMap", "Service") for found in view.seen.of_kind(k)}
    return tuple(body for body in bodies if not is_applied(body, live.get((body["kind"], body["metadata"]["name"]))))


def _pods(view: DeploymentView, status: RouterStatus) -> tuple[tuple[Object, ...], tuple[Ref, ...]]:
    """One more of the new revision at a time; an old one goes when a new one is ready. A router streams its last answers in its grace period."""
    revision = str(status.revision)
    alive = [pod for pod in view.routers if not ended(pod) and not pod["metadata"].get("deletionTimestamp")]
    new = [pod for pod in alive if label(pod, "revision") == revision]
    old = [pod for pod in alive if label(pod, "revision") != revision]
    counts = Counts(
        sum(is_ready(pod) for pod in new),
        sum(not is_ready(pod) for pod in new),
        sum(is_ready(pod) for pod in old),
        sum(not is_ready(pod) for pod in old),
    )
    step = next_step(view.deployment.spec.router.replicas, 1, 0, counts)
    kept = _failed(view, revision)
    gone = [pod for pod in view.routers if ended(pod) and pod not in kept]
    gone = [pod for pod in gone if not pod["metadata"].get("deletionTimestamp")]
    gone += [pod for pod in old if not is_ready(pod)][: step.drop_old_unready]
    gone += [pod for pod in old if is_ready(pod)][: step.drain_old]
    gone += [pod for pod in new if not is_ready(pod)][: step.drop_new_unready]
    gone += [pod for pod in new if is_ready(pod)][: step.drain_new]
    return _made(view, status, step.create_new), tuple(ref_of(pod) for pod in gone)


def _failed(view: DeploymentView, revision: str) -> list[Object]:
    """Routers of the revision that ended by themselves lately, the last first. They stay for their logs, and for the count."""
    lately = view.now - timedelta(seconds=FORGIVEN_S)
    found = [
        (at, pod["metadata"]["name"], pod)
        for pod in view.routers
        if ended(pod) and label(pod, "revision") == revision and not exit_of(pod).disrupted
        if (at := ended_at(pod)) is not None and at > lately
    ]
    return [pod for _, _, pod in sorted(found, key=lambda item: item[:2], reverse=True)[:MAX_FAILED]]


def _rest_s(view: DeploymentView, revision: str) -> float:
    """Seconds until the next router: those that end one after the other are replaced ever more slowly."""
    failed = _failed(view, revision)
    return left_s(ended_at(failed[0]), retry_delay_s(len(failed)), view.now) if failed else 0.0


def _made(view: DeploymentView, status: RouterStatus, number: int) -> tuple[Object, ...]:
    assert status.rendered is not None
    taken = {pod["metadata"]["name"] for pod in view.routers}
    made: list[Object] = []
    index = 0
    while len(made) < number:
        pod = router_pod(view.deployment, view.seen.resource, status.rendered, str(status.revision), index)
        if pod["metadata"]["name"] not in taken:
            made.append(pod)
        index += 1
    return tuple(made)
