"""Suspend, cancel and the deadline of a run: save first, then release the pods.

Pure. Called by `reconcile`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from stoker.operator.domain.clock import is_ahead
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
    """The outcome, requeued no later than the run's deadline, whose time begins anew where the clock was put back."""
    waits = [wait for wait in (outcome.plan.requeue_after_s, deadline_left_s(view)) if wait]
    begun = outcome.changes | JobChanges(started_at=view.time) if _starts_ahead(view) else outcome.changes
    return replace(outcome, changes=begun, plan=replace(outcome.plan, requeue_after_s=min(waits, default=None)))


def deadline_left_s(view: TrainingView) -> float | None:
    """Seconds until the deadline; 0 when it has passed, None without one."""
    limit_s, started = view.job.spec.run.active_deadline_seconds, view.job.status.started_at
    if limit_s is None or not started:
        return None
    if _starts_ahead(view):
        return float(limit_s)
    return max((moment(started) + timedelta(seconds=limit_s) - view.now).total_seconds(), 0.0)


def _starts_ahead(view: TrainingView) -> bool:
    limit_s, started = view.job.spec.run.active_deadline_seconds, view.job.status.started_at
    return limit_s is not None and started is not None and is_ahead(moment(started), limit_s, view.now)


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
