"""A pod's status as a kubelet writes it: phase, conditions and the state of the one container. Pure.

Called by `pod_status_writer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.operator.domain.plan import Object

NODE = "local"
HOST_IP = "127.0.0.1"

Condition = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PodView:
    """The state of a pod in the kubelet; `render_status` turns it into the object's status."""

    name: str
    """Name of the container."""
    image: str
    ip: str = ""
    scheduled: bool = False
    schedule_reason: str = ""
    """`SchedulingGated` or `Unschedulable`."""
    schedule_message: str = ""
    waiting_reason: str = "ContainerCreating"
    waiting_message: str = ""
    container_id: str = ""
    started_at: str = ""
    """Empty until the container runs."""
    started: bool = False
    """Whether the startup probe has passed."""
    ready: bool = False
    terminated: dict[str, Any] | None = None
    reason: str = ""
    """Reason of a failure of the whole pod: `DeadlineExceeded`, `Terminated`, `Unhealthy`."""
    message: str = ""
    disrupted: str = ""
    """Reason of the condition DisruptionTarget."""
    accepted_at: str = ""

    @property
    def phase(self) -> str:
        if self.terminated is not None:
            return "Succeeded" if self.terminated["exitCode"] == 0 and not self.reason else "Failed"
        return "Running" if self.started_at else "Pending"


def render_status(view: PodView, old: Object, now: str) -> Object:
    """Render the whole status; a condition keeps its transition time while its status stays."""
    status: Object = {"phase": view.phase, "conditions": _conditions(view, old, now)}
    if not view.scheduled:
        return status
    status |= {"hostIP": HOST_IP, "startTime": view.accepted_at, "containerStatuses": [_container(view)]}
    if view.ip:
        status |= {"podIP": view.ip, "podIPs": [{"ip": view.ip}]}
    if view.reason:
        status |= {"reason": view.reason, "message": view.message}
    return status


def _container(view: PodView) -> dict[str, Any]:
    return {
        "name": view.name,
        "image": view.image,
        "imageID": "",
        "restartCount": 0,
        "ready": view.ready and view.terminated is None,
        "started": view.started and view.terminated is None,
        "state": _state(view),
        "lastState": {},
        **({"containerID": view.container_id} if view.container_id else {}),
    }


def _state(view: PodView) -> dict[str, Any]:
    if view.terminated is not None:
        return {"terminated": view.terminated}
    if view.started_at:
        return {"running": {"startedAt": view.started_at}}
    message = {"message": view.waiting_message} if view.waiting_message else {}
    return {"waiting": {"reason": view.waiting_reason, **message}}


@dataclass(frozen=True)
class _Wanted:
    type: str
    status: bool
    reason: str = ""
    message: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def _conditions(view: PodView, old: Object, now: str) -> list[Condition]:
    before = {condition["type"]: condition for condition in old.get("conditions") or ()}
    conditions = []
    for wanted in _wanted(view):
        status = "True" if wanted.status else "False"
        same = before.get(wanted.type, {}).get("status") == status
        since = before[wanted.type]["lastTransitionTime"] if same else now
        condition = {"type": wanted.type, "status": status, "lastProbeTime": None, "lastTransitionTime": since}
        named = {name: value for name, value in (("reason", wanted.reason), ("message", wanted.message)) if value}
        conditions.append(condition | named)
    return conditions


def _wanted(view: PodView) -> list[_Wanted]:
    scheduled = _Wanted("PodScheduled", view.scheduled, view.schedule_reason, view.schedule_message)
    if not view.scheduled:
        return [scheduled]
    ready, reason, message = _readiness(view)
    disrupted = [_Wanted("DisruptionTarget", True, view.disrupted, view.message)] if view.disrupted else []
    done = "PodCompleted" if view.phase == "Succeeded" else ""
    return [
        *disrupted,
        _Wanted("Initialized", True, done),
        _Wanted("Ready", ready, reason, message),
        _Wanted("ContainersReady", ready, reason, message),
        scheduled,
    ]


def _readiness(view: PodView) -> tuple[bool, str, str]:
    if view.terminated is not None:
        return False, "PodCompleted" if view.phase == "Succeeded" else "PodFailed", ""
    if view.ready:
        return True, "", ""
    return False, "ContainersNotReady", f"containers with unready status: [{view.name}]"
