"""Suspend, cancel and the deadline of a run: save first, then release the pods.

Pure. Called by `reconcile`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Literal

from stoker.operator.api.trainingjob_status import PendingRequest, TrainingPhase
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.plan import ControlCall, Plan
from stoker.operator.domain.pods import ref_of
from stoker.operator.reconcile.trainingjob.attempt import closed, completed, moment, undeleted
from stoker.operator.reconcile.trainingjob.end import finish
from stoker.operator.reconcile.trainingjob.orphaned_saves import list_orphaned_saves, needs_listing
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome
from stoker.operator.reconcile.trainingjob.saves import expired, new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView

STOP_MARGIN_S = 30.0
"""Time beyond the grace period before the pods of a stopping job are deleted."""
REPEAT_CALL_S = 10.0


def stop(view: TrainingView) -> JobOutcome | None:
    """Stop the run where the user or the deadline asks for it: save first, then release the pods."""
    run = view.job.spec.run
    if completed(view):
        return None
    if deadline_left_s(view) == 0:
        text = f"activeDeadlineSeconds {run.active_deadline_seconds} have passed since the first start"
        return finish(view, "Failed", Health.STALLED, "DeadlineExceeded", text)
    if not run.cancel and not run.suspend:
        return None
    mode: Literal["cancel", "suspend"] = "cancel" if run.cancel else "suspend"
    if view.live:
        return _ask_to_stop(view, mode)
    if needs_listing(view):
        return list_orphaned_saves(view)
    if run.cancel:
        return finish(view, "Cancelled", Health.READY, "Cancelled", "cancelled by the user")
    return _suspended(view)


def by_deadline(view: TrainingView, outcome: JobOutcome) -> JobOutcome:
    """The outcome, requeued no later than the run's deadline."""
    waits = [wait for wait in (outcome.plan.requeue_after_s, deadline_left_s(view)) if wait]
    return replace(outcome, plan=replace(outcome.plan, requeue_after_s=min(waits, default=None)))


def deadline_left_s(view: TrainingView) -> float | None:
    run, started = view.job.spec.run, view.job.status.started_at
    if run.active_deadline_seconds is None or not started:
        return None
    over_at = moment(started) + timedelta(seconds=run.active_deadline_seconds)
    return max((over_at - view.now).total_seconds(), 0.0)


def _suspended(view: TrainingView) -> JobOutcome:
    attempt = view.attempt
    return JobOutcome(
        phase="Suspended",
        health=Health.PROGRESSING,
        reason="Suspended",
        message="suspended by the user",
        changes=JobChanges(attempt=closed(view, attempt) if attempt else None, requests=()),
        plan=Plan(create=new_checkpoints(view), patch=expired(view)),
    )


def _ask_to_stop(view: TrainingView, mode: Literal["cancel", "suspend"]) -> JobOutcome:
    """Drain the gang through pod 0; pods that never ran, or do not end in time, are deleted."""
    asked = next((request for request in view.job.status.requests if request.kind == mode), None)
    deadline_s = view.job.spec.workers.grace_period_seconds + STOP_MARGIN_S
    overdue = asked is not None and view.now >= moment(asked.requested_at or view.time) + timedelta(seconds=deadline_s)
    phase: TrainingPhase = "Cancelling" if mode == "cancel" else "Suspending"
    outcome = JobOutcome(
        phase=phase,
        health=Health.PROGRESSING,
        reason=phase,
        message="saving before the pods are released",
        plan=Plan(create=new_checkpoints(view), requeue_after_s=REPEAT_CALL_S),
    )
    if view.leader is None or overdue or not view.leader_running:
        return replace(outcome, plan=replace(outcome.plan, delete=undeleted(view.live)))
    if asked is None:
        asked = PendingRequest(id=_request_id(view, mode), kind=mode, requested_at=view.time)
        outcome = replace(outcome, changes=JobChanges(requests=(asked,)))
    body = {"id": asked.id, "mode": mode, "deadline_s": view.job.spec.workers.grace_period_seconds}
    acknowledged = asked.id in (view.report or {}).get("requests", {})
    calls = () if acknowledged else (ControlCall(ref_of(view.leader), "POST", "/drain", body),)
    return replace(outcome, plan=replace(outcome.plan, calls=calls))


def _request_id(view: TrainingView, mode: str) -> str:
    attempt = view.attempt
    return f"{view.job.metadata.uid}-{mode}-{attempt.number if attempt else 0}"[-64:]
