"""A TrainingJob whose gang is there: status from pods and report, Checkpoint objects from saves, retention."""

from __future__ import annotations

from stoker.operator.api.pod_fields import PodCounts
from stoker.operator.domain.conditions import Health, summary
from stoker.operator.domain.plan import Plan
from stoker.operator.domain.pods import PodState, is_ready, pod_state, waiting_reason
from stoker.operator.domain.waiting import mounting, waiting
from stoker.operator.reconcile.trainingjob.saves import expired, new_checkpoints
from stoker.operator.reconcile.trainingjob.status import checkpoint_figures, gang_size, progress_figures
from stoker.operator.reconcile.trainingjob.view import TrainingView, settle

_PHASES = {"Loading": "Starting", "FirstStep": "Starting", "Saving": "Checkpointing"}
"""Phase of the job by phase of the agent; any other is Running."""
_FOLLOWED = (*_PHASES.values(), "Running")


def follow(view: TrainingView) -> Plan:
    """Status from pods and report, Checkpoint objects from saves, retention."""
    attempt = view.attempt
    assert attempt is not None
    agent_phase = str((view.report or {}).get("phase") or "") or None
    known = attempt.model_copy(update={"phase": agent_phase or attempt.phase or "Pending"})
    phase, message = _phase_and_message(view, agent_phase)
    stuck, reason = _judge(view, phase)
    changes = {
        "attempt": known,
        "phase": phase,
        "message": message,
        "pods": _pod_counts(view),
        **progress_figures(view),
        **checkpoint_figures(view),
    }
    health = Health.STALLED if stuck else Health.PROGRESSING
    plan = Plan(create=new_checkpoints(view), patch=expired(view))
    return settle(view, changes, summary(health, reason, message or ""), plan)


def _judge(view: TrainingView, phase: str) -> tuple[bool, str]:
    """Whether a person must act, and the conditions' reason: the most telling one of the pods that wait."""
    if phase != "Pending":
        return False, phase
    found = [known for pod in view.gang if pod_state(pod) is PodState.PENDING and (known := waiting(pod))]
    stuck = next((known for known in found if known.stuck), None)
    if stuck is not None:
        return True, stuck.reason
    return False, next((known.reason for known in found if known.reason == "WaitingForGPUs"), "WaitingForPods")


def _phase_and_message(view: TrainingView, agent_phase: str | None) -> tuple[str, str | None]:
    pods = [pod for pod in view.gang if pod_state(pod) in {PodState.PENDING, PodState.GATED}]
    if pods:
        rendered = view.job.status.pinned.rendered if view.job.status.pinned else None
        spec = (rendered or {}).get("pod", {}).get("spec", {})
        reasons = sorted({reason for pod in pods if (reason := mounting(pod, spec) or waiting_reason(pod))})
        return "Pending", f"{len(pods)} of {len(view.gang)} pods wait: {'; '.join(reasons)}"[:1024]
    if agent_phase is None:
        return _before_report(view)
    phase = _PHASES.get(agent_phase, "Running")
    return phase, str((view.report or {}).get("message") or "")[:1024] or None


def _before_report(view: TrainingView) -> tuple[str, str | None]:
    """No agent has answered yet: the workers start, or the operator did, and then what it knew before stays until it hears more."""
    status, attempt = view.job.status, view.attempt
    if attempt is not None and attempt.phase not in (None, "Pending") and status.phase in _FOLLOWED:
        return status.phase, status.message
    return "Starting", "the workers start"


def _pod_counts(view: TrainingView) -> PodCounts:
    return PodCounts(
        desired=gang_size(view),
        scheduled=sum(bool(pod["spec"].get("nodeName")) for pod in view.gang),
        running=sum(pod_state(pod) is PodState.RUNNING for pod in view.gang),
        ready=sum(is_ready(pod) for pod in view.gang),
    )
