"""How a TrainingJob ends: terminal phases are sticky, and nothing but cleaning up happens in them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from stoker.operator.domain.conditions import Condition, Health, summary
from stoker.operator.domain.plan import Event, Plan
from stoker.operator.domain.pods import ref_of
from stoker.operator.reconcile.trainingjob.saves import expired, new_checkpoints
from stoker.operator.reconcile.trainingjob.status import checkpoint_figures, closed, moment, progress_figures, undeleted
from stoker.operator.reconcile.trainingjob.view import TrainingView, settle


def clean_up(view: TrainingView) -> Plan:
    """The job is being deleted: its pods go with it by ownership, at once where they still run. Checkpoints stay."""
    return Plan(delete=undeleted(view.live))


def after_end(view: TrainingView) -> Plan:
    """A terminal phase is sticky: pods that still run go, saves are recorded, the object goes when its time has come."""
    plan = Plan(create=new_checkpoints(view), patch=expired(view), delete=undeleted(view.live))
    ttl = view.job.spec.run.ttl_seconds_after_finished
    if ttl is not None and view.job.status.finished_at:
        left_s = (moment(view.job.status.finished_at) + timedelta(seconds=ttl) - view.now).total_seconds()
        if left_s <= 0:
            return Plan(delete=(ref_of(view.seen.resource),))
        plan = replace(plan, requeue_after_s=left_s)
    return settle(view, checkpoint_figures(view), (), plan)


def finish(view: TrainingView, phase: str, health: Health, reason: str, message: str, **changes: Any) -> Plan:
    """Enter a terminal phase."""
    attempt = view.attempt
    status = {
        "phase": phase,
        "finished_at": view.time,
        "message": message or None,
        "attempt": closed(view, attempt) if attempt else None,
        **progress_figures(view),
        **checkpoint_figures(view),
        **changes,
    }
    event = Event("Warning" if health is Health.STALLED else "Normal", reason, message or f"the job is {phase}")
    done = Condition("Succeeded", phase == "Completed", reason, message)
    plan = Plan(create=new_checkpoints(view), delete=undeleted(view.live), events=(event,))
    return settle(view, status, (*summary(health, reason, message), done), plan)


def stall(view: TrainingView, reason: str, message: str) -> Plan:
    """A person must act; nothing runs."""
    return settle(view, {"phase": "Pending", "message": message}, summary(Health.STALLED, reason, message))
