"""Suspend, cancel and the deadline of a run: save first, then release the pods.

Pure. Called by `reconcile`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from stoker.operator.domain.conditions import Health
from stoker.operator.domain.plan import Plan
from stoker.operator.reconcile.trainingjob.attempt import closed, completed, moment
from stoker.operator.reconcile.trainingjob.drain import StopKind, drain
from stoker.operator.reconcile.trainingjob.end import finish
from stoker.operator.reconcile.trainingjob.orphaned_saves import list_orphaned_saves, needs_listing
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome
from stoker.operator.reconcile.trainingjob.saves import expired, new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView


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
    mode: StopKind = "cancel" if run.cancel else "suspend"
    if view.live:
        return drain(view, mode, "saving before the pods are released")
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
    attempt, message = view.attempt, "suspended by the user"
    return JobOutcome(
        phase="Suspended",
        health=Health.PROGRESSING,
        reason="Suspended",
        message=message,
        changes=JobChanges(attempt=closed(view, attempt, message) if attempt else None, requests=()),
        plan=Plan(create=new_checkpoints(view), patch=expired(view)),
    )
