"""State and end of pods. Pure functions on raw pod objects.

Called by the reconcilers, by recovery and by the watch over nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from stoker.operator.domain.labels import NODE_RANK, PREFIX, RANK_PODS, REPLICA, REPLICA_PODS, ROLE, SCHEDULER, PodRole
from stoker.operator.domain.plan import Object, Ref
from stoker.operator.domain.text import shortened
from stoker.operator.domain.waiting import waiting
from stoker.pod.causes import Cause, cause_of_exit_code
from stoker.pod.termination_message import TerminationMessage, parse_termination_message

PLACEMENT_GATE = f"{PREFIX}/placement"
"""Holds a pod until the operator has chosen a node for each pod of its gang."""
MAIN = "main"
"""Name of the container that does the work."""
_LOST_CONTAINER = frozenset({"ContainerStatusUnknown", "Unknown"})
"""What a kubelet says of a container that its node knows nothing of any more, as after a power cut."""
GRACE_S = 30.0
"""Kubernetes' default from the request to go until the kill."""


class PodState(StrEnum):
    """State of a pod, as far as a decision needs it."""

    GATED = "Gated"
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    TERMINATING = "Terminating"


@dataclass(frozen=True)
class PodExit:
    """End of a pod's main container."""

    cause: Cause
    exit_code: int | None
    detail: str
    message: TerminationMessage | None
    """The program's own; None where it left none."""
    disrupted: bool = False
    """Whether it was evicted, pre-empted or lost with its node."""
    refused: bool = False
    """Whether the node had no room for it when it came (OutOfcpu, OutOfnvidia.com/gpu): another pod has taken it.

    A job's retry costs nothing then. For other pods it is a failure, so that a node whose devices are gone is not tried
    without a pause.
    """


def answers_polls(pod: Object) -> bool:
    """Whether the operator asks it for its status: the leader of a gang (it gathers the others), engines, routers."""
    role = label(pod, ROLE)
    return role in {PodRole.ENGINE, PodRole.ROUTER} or (role == PodRole.TRAINER and label(pod, NODE_RANK) in {"", "0"})


def pod_state(pod: Object) -> PodState:
    """The state of a pod; a pod that is being deleted but has ended already counts as ended."""
    phase = pod.get("status", {}).get("phase", "Pending")
    if phase == "Succeeded":
        return PodState.SUCCEEDED
    if phase == "Failed":
        return PodState.FAILED
    if pod["metadata"].get("deletionTimestamp"):
        return PodState.TERMINATING
    if phase == "Running":
        return PodState.RUNNING
    return PodState.GATED if pod["spec"].get("schedulingGates") else PodState.PENDING


def is_gated(pod: Object) -> bool:
    """Whether the pod waits for its place in a gang; other gates are not ours."""
    gates = pod["spec"].get("schedulingGates") or ()
    return pod_state(pod) is PodState.GATED and any(gate["name"] == PLACEMENT_GATE for gate in gates)


def waits_in_queue(pod: Object) -> bool:
    """Whether the scheduler that an engine pod's replica was given to holds the pod back: it has no node yet."""
    held = pod_state(pod) in {PodState.GATED, PodState.PENDING} and not pod["spec"].get("nodeName")
    return held and bool(label(pod, SCHEDULER))


def ended(pod: Object) -> bool:
    """Whether no process of the pod runs any more."""
    return pod_state(pod) in {PodState.SUCCEEDED, PodState.FAILED}


def is_ready(pod: Object) -> bool:
    """Whether the pod's Ready condition is true and it is not being deleted."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", ()))


def exit_of(pod: Object) -> PodExit:
    """End of a pod, by its termination message, else by its exit code and the kubelet's reason."""
    status = pod.get("status", {})
    terminated = _terminated(status)
    message = parse_termination_message(terminated.get("message", ""))
    code = terminated.get("exitCode")
    detail = message.detail if message else _kubelet_detail(status, terminated)
    return PodExit(
        cause=message.cause if message else _cause_without_message(status, terminated),
        exit_code=code,
        detail=detail,
        message=message,
        disrupted=_is_disrupted(status),
        refused=(status.get("reason") or "").startswith("OutOf"),
    )


def scheduled_at(pod: Object) -> datetime | None:
    """Time at which the pod got its node; None before, and where the cluster reports none."""
    return _since(pod, "PodScheduled")


def ready_at(pod: Object) -> datetime | None:
    """Time since which the pod is ready; None while it is not, and where the cluster reports none."""
    return _since(pod, "Ready")


def created_at(pod: Object) -> datetime | None:
    """Time of the pod's creation by the cluster's clock."""
    return _time(pod["metadata"].get("creationTimestamp"))


def started_at(pod: Object) -> datetime | None:
    """Time at which the main container started, by its node's clock; None before."""
    for container in pod.get("status", {}).get("containerStatuses", ()):
        if container.get("name") == MAIN:
            state = container.get("state", {})
            return _time((state.get("running") or state.get("terminated") or {}).get("startedAt"))
    return None


def ended_at(pod: Object) -> datetime | None:
    """Time at which the main container ended, by its node's clock; the pod's creation where no end is reported."""
    at = _terminated(pod.get("status", {})).get("finishedAt") or pod["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(at) if at else None


def ended_by_itself(pod: Object, asked_at: datetime) -> bool:
    """Whether the main container ended before it could be killed for not going.

    It had half of its grace period left at least, which covers the difference between the clocks.
    """
    at = _terminated(pod.get("status", {})).get("finishedAt")
    grace_s = float(pod["spec"].get("terminationGracePeriodSeconds", GRACE_S))
    return at is not None and datetime.fromisoformat(at) < asked_at + timedelta(seconds=grace_s / 2)


def waiting_reason(pod: Object) -> str | None:
    """The reason why a pod does not run yet, in one line; None when it runs."""
    found = waiting(pod)
    if found is not None:
        return found.line
    return None if pod.get("status", {}).get("phase") == "Running" else "waiting for the pod to start"


def image_id(pod: Object) -> str:
    """The `imageID` of the main container; empty while its node reports none."""
    for container in pod.get("status", {}).get("containerStatuses", ()):
        if container.get("name") == MAIN:
            return str(container.get("imageID") or "")
    return ""


def ref_of(item: Object) -> Ref:
    """Identity of an object by name and uid."""
    metadata = item["metadata"]
    return Ref(item["kind"], metadata["namespace"], metadata["name"], metadata["uid"])


def is_owned(item: Object, uid: str) -> bool:
    """Whether an object belongs to the one with this uid.

    Labels alone prove nothing: a copy of a pod has them too, and so has whatever a user gives them to.
    """
    return any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences") or ())


def label(item: Object, name: str) -> str:
    """The value of one of our labels (`labels.ROLE`); empty when it is absent."""
    return str(item["metadata"].get("labels", {}).get(name, ""))


def label_number(item: Object, name: str, absent: int = 0) -> int:
    """The value of a label that counts something; `absent` also where a user has made it no number."""
    text = label(item, name)
    return int(text) if text.isascii() and text.isdecimal() else absent


def is_endpoint(pod: Object) -> bool:
    """Whether an engine pod answers requests: the first of its replica, or of each data-parallel rank."""
    number, group = label_number(pod, NODE_RANK), label_number(pod, RANK_PODS)
    return number % group == 0 if group else number == 0


def replica_name(pod: Object) -> str:
    """Name of the replica that an engine pod is part of: that of its leader."""
    return label(pod, REPLICA) or str(pod["metadata"]["name"])


def num_endpoints(pod: Object) -> int:
    """Pods of an engine pod's replica that answer requests."""
    size = label_number(pod, REPLICA_PODS, 1)
    return max(size // max(label_number(pod, RANK_PODS, size), 1), 1)


def _since(pod: Object, kind: str) -> datetime | None:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == kind and condition["status"] == "True":
            return _time(condition.get("lastTransitionTime"))
    return None


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _terminated(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in status.get("containerStatuses", ()):
        if container.get("name") == MAIN:
            terminated: Mapping[str, Any] = container.get("state", {}).get("terminated") or {}
            return terminated
    return {}


def _cause_without_message(status: Mapping[str, Any], terminated: Mapping[str, Any]) -> Cause:
    if terminated.get("reason") == "OOMKilled":
        return Cause.OUT_OF_MEMORY
    code = terminated.get("exitCode")
    if code is None or code > 128 or status.get("reason"):
        return Cause.RANK_KILLED
    return cause_of_exit_code(code) or Cause.INTERNAL


def _kubelet_detail(status: Mapping[str, Any], terminated: Mapping[str, Any]) -> str:
    reason = status.get("reason") or terminated.get("reason") or "the pod ended without a termination message"
    message = status.get("message") or terminated.get("message") or ""
    return shortened(f"{reason}: {message}".rstrip(": "))


def _is_disrupted(status: Mapping[str, Any]) -> bool:
    if status.get("reason") in {"Evicted", "NodeLost", "Preempting", "Shutdown", "NodeShutdown", "Terminated"}:
        return True
    if _terminated(status).get("reason") in _LOST_CONTAINER:
        return True
    return any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in status.get("conditions", ()))
