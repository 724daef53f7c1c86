"""Reading pods: which state one is in, and how it ended. Pure functions on raw pod objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from stoker.operator.domain.plan import Object, Ref
from stoker.operator.domain.waiting import waiting
from stoker.pod.causes import Cause, cause_of_exit_code
from stoker.pod.termination_message import TerminationMessage, parse_termination_message

MAIN = "main"
"""Name of the container that does the work."""
GRACE_S = 30.0
"""Kubernetes' default from the request to go until the kill."""


class PodState(StrEnum):
    """What a pod is doing, as far as a decision needs it."""

    GATED = "Gated"
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    TERMINATING = "Terminating"


@dataclass(frozen=True)
class Exit:
    """How a pod's main container ended."""

    cause: Cause
    exit_code: int | None
    detail: str
    word: TerminationMessage | None
    disrupted: bool = False
    """Evicted, pre-empted or lost with its node: not the program's doing."""


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


def ended(pod: Object) -> bool:
    """No process of the pod runs any more."""
    return pod_state(pod) in {PodState.SUCCEEDED, PodState.FAILED}


def is_ready(pod: Object) -> bool:
    """The pod's Ready condition is true and nobody deletes it."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", ()))


def exit_of(pod: Object) -> Exit:
    """How an ended pod ended, from its last word, else from its exit code and the kubelet's reason."""
    status = pod.get("status", {})
    terminated = _terminated(status)
    word = parse_termination_message(terminated.get("message", ""))
    code = terminated.get("exitCode")
    detail = word.detail if word else _kubelet_detail(status, terminated)
    return Exit(
        cause=word.cause if word else _cause_without_word(status, terminated),
        exit_code=code,
        detail=detail,
        word=word,
        disrupted=_is_disrupted(status),
    )


def ended_at(pod: Object) -> datetime | None:
    """When its main container ended, by the clock of its node; when the pod was made, where nothing else is known."""
    at = _terminated(pod.get("status", {})).get("finishedAt") or pod["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(at) if at else None


def ended_by_itself(pod: Object, told_at: datetime) -> bool:
    """Whether its main container ended without being killed for not going: half of the grace it had lies between, whatever the clocks' difference."""
    at = _terminated(pod.get("status", {})).get("finishedAt")
    grace_s = float(pod["spec"].get("terminationGracePeriodSeconds", GRACE_S))
    return at is not None and datetime.fromisoformat(at) < told_at + timedelta(seconds=grace_s / 2)


def waiting_reason(pod: Object) -> str | None:
    """Why a pod does not run yet, in one line; None when it runs."""
    found = waiting(pod)
    if found is not None:
        return found.line
    return None if pod.get("status", {}).get("phase") == "Running" else "waiting for the pod to start"


def ref_of(item: Object) -> Ref:
    """The exact object."""
    metadata = item["metadata"]
    return Ref(item["kind"], metadata["namespace"], metadata["name"], metadata["uid"])


def label(item: Object, name: str) -> str:
    """A label below `stoker.dev/`; empty when it is absent."""
    return str(item["metadata"].get("labels", {}).get(f"stoker.dev/{name}", ""))


def with_label(items: Iterable[Object], name: str, value: str) -> tuple[Object, ...]:
    return tuple(item for item in items if label(item, name) == value)


def _terminated(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in status.get("containerStatuses", ()):
        if container.get("name") == MAIN:
            terminated: Mapping[str, Any] = container.get("state", {}).get("terminated") or {}
            return terminated
    return {}


def _cause_without_word(status: Mapping[str, Any], terminated: Mapping[str, Any]) -> Cause:
    if terminated.get("reason") == "OOMKilled":
        return Cause.OUT_OF_MEMORY
    code = terminated.get("exitCode")
    if code is None or code > 128 or status.get("reason"):
        return Cause.RANK_KILLED
    return cause_of_exit_code(code) or Cause.INTERNAL


def _kubelet_detail(status: Mapping[str, Any], terminated: Mapping[str, Any]) -> str:
    reason = status.get("reason") or terminated.get("reason") or "the pod ended without a last word"
    message = status.get("message") or terminated.get("message") or ""
    return f"{reason}: {message}".rstrip(": ")[:1024]


def _is_disrupted(status: Mapping[str, Any]) -> bool:
    if status.get("reason") in {"Evicted", "NodeLost", "Preempting", "Shutdown", "NodeShutdown", "Terminated"}:
        return True
    return any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in status.get("conditions", ()))
