"""The versioned snapshot of backends that the routers follow, written to a ConfigMap before it is sent. Pure.

Called by `reconcile` and `routers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.operator.api.inferencedeployment import RolloutStatus
from stoker.operator.domain.labels import POOL, ZONE
from stoker.operator.domain.plan import ControlCall, Object
from stoker.operator.domain.pods import ended, is_ready, label, ref_of
from stoker.operator.reconcile.enginepool.replica import draining, revision_of
from stoker.operator.reconcile.inferencedeployment.canary import traffic_shares
from stoker.operator.reconcile.inferencedeployment.disaggregation import role_of_engine
from stoker.operator.reconcile.inferencedeployment.fallback import fallback_target
from stoker.operator.reconcile.inferencedeployment.other_models import other_models
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView
from stoker.operator.render.engine import engine_url
from stoker.operator.render.names import digest_of


@dataclass(frozen=True)
class BackendSnapshot:
    """The backends that the routers should have."""

    body: Mapping[str, Any]
    hash: str
    version: int


def wanted_snapshot(view: DeploymentView, rollout: RolloutStatus | None, current: str | None) -> BackendSnapshot:
    """Ready and draining engines, and a canary's shares. The version rises when the content changes."""
    backends = [_backend(view, pod) for pod in view.engines if _is_listed(pod)]
    shares, window = traffic_shares(rollout, current)
    canary = {"shares": shares, "window": window} if shares else {}
    target = fallback_target(view)
    fallback = {"fallback": target} if target is not None else {}
    extra: dict[str, Any] = {**canary, **fallback, **other_models(view)}
    content = digest_of([backends, extra] if extra else backends, 16)
    status = view.router_status
    version = status.snapshot_version if content == status.snapshot_hash else status.snapshot_version + 1
    return BackendSnapshot({"version": version, "backends": backends, **extra}, content, version)


def router_calls(view: DeploymentView, wanted: BackendSnapshot) -> tuple[ControlCall, ...]:
    """`PUT /backends` for each Ready router that has not taken the newest version."""
    behind = (pod for pod in view.routers if is_ready(pod) and _version_of(view, pod) < wanted.version)
    return tuple(ControlCall(ref_of(pod), "PUT", "/backends", wanted.body) for pod in behind)


def engine_known(view: DeploymentView) -> bool:
    """Whether a Ready router has an engine that answers. One that has not reported, or does not say, may have one."""
    reports = (view.seen.reports.get(pod["metadata"]["uid"]) for pod in view.routers if is_ready(pod))
    return any(report is None or report.get("ready_backends") != 0 for report in reports)


def _is_listed(pod: Object) -> bool:
    if ended(pod) or pod["metadata"].get("deletionTimestamp"):
        return False
    return is_ready(pod) or draining(pod)


def _backend(view: DeploymentView, pod: Object) -> dict[str, Any]:
    return {
        "url": engine_url(pod, view.settings.engine_port),
        "pod_uid": pod["metadata"]["uid"],
        "role": role_of_engine(view, pod),
        "revision": revision_of(pod),
        "pool": label(pod, POOL),
        "draining": draining(pod),
        **(_place(pod) if view.deployment.spec.router.policy == "locality" else {}),
    }


def _place(pod: Object) -> dict[str, str]:
    """Node and zone of a pod. Only routers that look at them get them."""
    return {"host": str(pod["spec"].get("nodeName", "")), "zone": label(pod, ZONE) or ""}


def _version_of(view: DeploymentView, pod: Object) -> int:
    """The version that the router has taken; -1 while it has not reported."""
    report = view.seen.reports.get(pod["metadata"]["uid"])
    return int(report.get("snapshot_version") or 0) if report is not None else -1
