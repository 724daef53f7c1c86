"""The orderly stop of a gang: pod 0 is asked to save and to end all pods.

Pure. Called by `stop` and `apply_edit`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from stoker.operator.api.trainingjob_status import PendingRequest, Resumption, TrainingPhase
from stoker.operator.domain.clock import rest_s
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.plan import ControlCall, Event, Plan
from stoker.operator.domain.pods import PodState, pod_state, ref_of
from stoker.operator.reconcile.trainingjob.attempt import gang_size, moment, undeleted
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome
from stoker.operator.reconcile.trainingjob.saves import new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView

StopKind = Literal["cancel", "suspend", "restart"]
STOP_MARGIN_S = 30.0
"""Time beyond the grace period before the pods of a stopping job are deleted."""
REPEAT_CALL_S = 10.0
_PHASES: dict[StopKind, TrainingPhase] = {"cancel": "Cancelling", "suspend": "Suspending", "restart": "Restarting"}


def asked_to(view: TrainingView, kind: StopKind) -> PendingRequest | None:
    """The request of that kind to the running attempt, if there is one."""
    return next((request for request in view.job.status.requests if request.kind == kind), None)


def drain(view: TrainingView, kind: StopKind, message: str, events: tuple[Event, ...] = ()) -> JobOutcome:
    """Ask pod 0 to save and to end the gang; pods that never ran, or do not end in time, are deleted.

    Args:
        events: told once, together with the request.
    """
    asked = asked_to(view, kind)
    outcome = JobOutcome(
        phase=_PHASES[kind],
        health=Health.PROGRESSING,
        reason=_PHASES[kind],
        message=message,
        plan=Plan(create=new_checkpoints(view), requeue_after_s=REPEAT_CALL_S),
    )
    if asked is None:
        asked = PendingRequest(id=_request_id(view, kind), kind=kind, requested_at=view.time)
        plan = replace(outcome.plan, events=events)
        outcome = replace(outcome, changes=JobChanges(requests=(asked,)), plan=plan)
    if view.leader is None or not view.leader_running or _overdue(view, asked):
        changes = outcome.changes | _nothing_to_list(view)
        return replace(outcome, changes=changes, plan=replace(outcome.plan, delete=undeleted(view.live)))
    acknowledged = asked.id in (view.report or {}).get("requests", {})
    calls = () if acknowledged else (_call(view, asked),)
    return replace(outcome, plan=replace(outcome.plan, calls=calls))


def _nothing_to_list(view: TrainingView) -> JobChanges:
    """Note that the writer of a gang whose pods are all gated has saved nothing, so that no task looks for it."""
    gated = all(pod_state(pod) is PodState.GATED for pod in view.gang)
    if view.attempt is None or not gated or len(view.gang) < gang_size(view):
        return JobChanges()
    known = view.job.status.resumption
    return JobChanges(
        resumption=Resumption(listed_writer=view.attempt.writer, rejected=known.rejected if known else ())
    )


def _overdue(view: TrainingView, asked: PendingRequest) -> bool:
    limit_s = view.job.spec.workers.grace_period_seconds + STOP_MARGIN_S
    return not rest_s(moment(asked.requested_at or view.time), limit_s, view.now)


def _call(view: TrainingView, asked: PendingRequest) -> ControlCall:
    """The call to pod 0. For its agent a restart is a suspend: save, then end as Interrupted."""
    assert view.leader is not None
    mode = "cancel" if asked.kind == "cancel" else "suspend"
    body = {"id": asked.id, "mode": mode, "deadline_s": view.job.spec.workers.grace_period_seconds}
    return ControlCall(ref_of(view.leader), "POST", "/drain", body)


def _request_id(view: TrainingView, kind: StopKind) -> str:
    attempt = view.attempt
    return f"{view.job.metadata.uid}-{kind}-{attempt.number if attempt else 0}"[-64:]
