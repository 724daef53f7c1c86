"""The snapshot of backends that the routers follow: versioned, written to its ConfigMap before it is sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.operator.api.inferencedeployment import RouterStatus
from stoker.operator.domain.plan import ControlCall, Object
from stoker.operator.domain.pods import ended, is_ready, label, ref_of
from stoker.operator.reconcile.enginepool.view import draining
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView
from stoker.operator.render.engine import engine_url
from stoker.operator.render.names import digest_of


@dataclass(frozen=True)
class Snapshot:
    """What the routers should know."""

    body: Mapping[str, Any]
    hash: str
    version: int


def snapshot(view: DeploymentView) -> Snapshot:
    """Ready engines, and draining ones as such. The version moves with the content."""
    backends = [_backend(view, pod) for pod in view.engines if _listed(pod)]
    content = digest_of(backends, 16)
    status = view.router_status
    version = status.snapshot_version if content == status.snapshot_hash else status.snapshot_version + 1
    return Snapshot({"version": version, "backends": backends}, content, version)


def router_calls(view: DeploymentView, wanted: Snapshot) -> tuple[ControlCall, ...]:
    """`PUT /backends` for each Ready router that has not taken the newest version."""
    behind = (pod for pod in view.routers if is_ready(pod) and _version_of(view, pod) < wanted.version)
    return tuple(ControlCall(ref_of(pod), "PUT", "/backends", wanted.body) for pod in behind)


def with_snapshot(status: RouterStatus, wanted: Snapshot) -> RouterStatus:
    return status.model_copy(update={"snapshot_version": wanted.version, "snapshot_hash": wanted.hash})


def _listed(pod: Object) -> bool:
    if ended(pod) or pod["metadata"].get("deletionTimestamp"):
        return False
    return is_ready(pod) or draining(pod)


def _backend(view: DeploymentView, pod: Object) -> dict[str, Any]:
    role = next(
        (pool.spec.revisions[0].template.role for pool in view.pools if _owns(pool.metadata.uid, pod)), "colocated"
    )
    return {
        "url": engine_url(pod, view.settings.engine_port),
        "pod_uid": pod["metadata"]["uid"],
        "role": role,
        "revision": label(pod, "revision"),
        "draining": draining(pod),
    }


def _owns(uid: str, pod: Object) -> bool:
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())


def _version_of(view: DeploymentView, pod: Object) -> int:
    report = view.seen.reports.get(pod["metadata"]["uid"])
    return int(report.get("snapshot_version") or 0) if report is not None else -1
