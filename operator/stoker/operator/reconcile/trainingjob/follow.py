"""The pass over a TrainingJob whose gang runs: phase from pods and report, Checkpoints from saves, retention.

Pure. Called by `reconcile` when nothing has to start, stop or recover.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.operator.api.trainingjob_status import TrainingPhase
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.plan import Object, Plan
from stoker.operator.domain.pods import PodState, pod_state, waiting_reason
from stoker.operator.domain.schedulers import waits_for
from stoker.operator.domain.waiting import mounting, waiting
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome, changed_attempt
from stoker.operator.reconcile.trainingjob.saves import expired, new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView

_PHASES: Mapping[str, TrainingPhase] = {"Loading": "Starting", "FirstStep": "Starting", "Saving": "Checkpointing"}
"""Phase of the job by phase of its agent; any other is Running."""
_FOLLOWED = (*_PHASES.values(), "Running")


def follow(view: TrainingView) -> JobOutcome:
    """Phase and message from pods and report, Checkpoint objects from saves, retention."""
    attempt = view.attempt
    assert attempt is not None
    agent_phase = str((view.report or {}).get("phase") or "") or None
    phase, message = _phase_and_message(view, agent_phase)
    stuck, reason = _health(view, phase)
    return JobOutcome(
        phase=phase,
        health=Health.STALLED if stuck else Health.PROGRESSING,
        reason=reason,
        message=message,
        changes=JobChanges(attempt=changed_attempt(attempt, phase=agent_phase or attempt.phase or "Pending")),
        plan=Plan(create=new_checkpoints(view), patch=expired(view)),
    )


def _health(view: TrainingView, phase: TrainingPhase) -> tuple[bool, str]:
    """Whether a person must act, and the conditions' reason, from the pods that wait."""
    if phase != "Pending":
        return False, phase
    if view.attempt is not None and view.attempt.scheduler and any(map(_gated, view.gang)):
        return False, "Queued"
    found = [known for pod in view.gang if pod_state(pod) is PodState.PENDING and (known := waiting(pod))]
    stuck = next((known for known in found if known.stuck), None)
    if stuck is not None:
        return True, stuck.reason
    return False, next((known.reason for known in found if known.reason == "WaitingForGPUs"), "WaitingForPods")


def _phase_and_message(view: TrainingView, agent_phase: str | None) -> tuple[TrainingPhase, str | None]:
    pods = [pod for pod in view.gang if pod_state(pod) in {PodState.PENDING, PodState.GATED}]
    if pods and view.attempt is not None and view.attempt.scheduler and any(map(_gated, pods)):
        return "Pending", f"the gang {waits_for(view.attempt.scheduler, view.job.spec.scheduling.queue_name)}"
    if pods:
        rendered = view.job.status.pinned.rendered if view.job.status.pinned else None
        spec = (rendered or {}).get("pod", {}).get("spec", {})
        reasons = sorted({reason for pod in pods if (reason := mounting(pod, spec) or waiting_reason(pod))})
        return "Pending", f"{len(pods)} of {len(view.gang)} pods wait: {'; '.join(reasons)}"
    if agent_phase is None:
        return _before_report(view)
    phase = _PHASES.get(agent_phase, "Running")
    return phase, str((view.report or {}).get("message") or "") or None


def _gated(pod: Object) -> bool:
    return pod_state(pod) is PodState.GATED


def _before_report(view: TrainingView) -> tuple[TrainingPhase, str | None]:
    """Phase and message while no agent has answered yet.

    Either the workers have just started, or the operator has; then the earlier phase stays until an agent answers.
    """
    status, attempt = view.job.status, view.attempt
    if attempt is not None and attempt.phase not in (None, "Pending") and status.phase in _FOLLOWED:
        return status.phase, status.message
    return "Starting", "the workers start"
