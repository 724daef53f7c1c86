"""The end of a TrainingJob: terminal phases are sticky, and only clean-up happens in them.

Pure. Called by `reconcile`, and by the modules that end an attempt.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from stoker.operator.api.trainingjob_status import TrainingPhase
from stoker.operator.domain.clock import is_ahead
from stoker.operator.domain.conditions import Condition, Health
from stoker.operator.domain.plan import Event, Plan
from stoker.operator.domain.pods import ref_of
from stoker.operator.reconcile.trainingjob.announced_saves import omits_saves
from stoker.operator.reconcile.trainingjob.attempt import closed, moment, undeleted
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome
from stoker.operator.reconcile.trainingjob.saves import expired, new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView


def clean_up(view: TrainingView) -> JobOutcome:
    """Delete the pods of a job that is being deleted; those that have ended go by ownership. Checkpoints stay."""
    return JobOutcome(plan=Plan(delete=undeleted(view.live)))


def after_end(view: TrainingView) -> JobOutcome:
    """Delete pods that still run, record saves, and delete the job once these are objects and its time is over."""
    plan = Plan(create=new_checkpoints(view), patch=expired(view), delete=undeleted(view.live))
    ttl, finished = view.job.spec.run.ttl_seconds_after_finished, view.job.status.finished_at
    if ttl is None or not finished:
        return JobOutcome(plan=plan)
    if is_ahead(moment(finished), ttl, view.now):  # the clock was put back: the time begins anew
        return JobOutcome(changes=JobChanges(finished_at=view.time), plan=replace(plan, requeue_after_s=float(ttl)))
    left_s = (moment(finished) + timedelta(seconds=ttl) - view.now).total_seconds()
    if left_s <= 0 and not (plan.create or omits_saves(view)):
        return JobOutcome(plan=Plan(delete=(ref_of(view.seen.resource),)))
    return JobOutcome(plan=replace(plan, requeue_after_s=left_s if left_s > 0 else None))


def finish(
    view: TrainingView,
    phase: TrainingPhase,
    health: Health,
    reason: str,
    message: str,
    changes: JobChanges | None = None,
) -> JobOutcome:
    """Enter a terminal phase."""
    attempt = closed(view, view.attempt, message or phase.lower()) if view.attempt else None
    own = JobChanges(finished_at=view.time, attempt=attempt)
    event = Event("Warning" if health is Health.STALLED else "Normal", reason, message or f"the job is {phase}")
    return JobOutcome(
        phase=phase,
        health=health,
        reason=reason,
        message=message or None,
        changes=own | (changes or JobChanges()),
        conditions=(Condition("Succeeded", phase == "Completed", reason, message),),
        plan=Plan(create=new_checkpoints(view), delete=undeleted(view.live), events=(event,)),
    )


def stall(reason: str, message: str) -> JobOutcome:
    """Wait for a person; nothing runs."""
    return JobOutcome(phase="Pending", health=Health.STALLED, reason=reason, message=message)
