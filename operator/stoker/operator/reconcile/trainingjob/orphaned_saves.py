"""Saves that no report names: task pods list what the writer of an ended attempt left behind.

Pure. Called by `start` and `stop` before the next decision.
"""

from __future__ import annotations

from stoker.operator.api.trainingjob_status import Resumption
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.plan import Plan
from stoker.operator.domain.waiting import waiting
from stoker.operator.reconcile.trainingjob.announced_saves import leader_message, omits_saves
from stoker.operator.reconcile.trainingjob.listing import listing_of, not_listed
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome
from stoker.operator.reconcile.trainingjob.saves import new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView


def needs_listing(view: TrainingView) -> bool:
    """Whether the last attempt's leader left no termination message, or one that omits saves, and no list is made."""
    attempt, resumption = view.attempt, view.job.status.resumption
    if attempt is None or attempt.phase is None:
        return False
    if resumption is not None and resumption.listed_writer == attempt.writer:
        return False
    return omits_saves(view) or not leader_message(view)


def list_orphaned_saves(view: TrainingView) -> JobOutcome:
    """Let task pods list what the attempt's writer left; the saves that they find become Checkpoints."""
    attempt = view.attempt
    assert attempt is not None
    found = listing_of(view, attempt)
    if found.complete:
        rejected = view.job.status.resumption.rejected if view.job.status.resumption else ()
        resumption = Resumption(listed_writer=attempt.writer, rejected=rejected)
        events = () if found.succeeded else (not_listed(attempt),)
        plan = Plan(create=new_checkpoints(view), events=events)
        return JobOutcome(changes=JobChanges(resumption=resumption), plan=plan)
    left = "left no termination message" if not leader_message(view) else "made more saves than its last word names"
    message = f"looking for saves of attempt {attempt.number}, whose leader {left}"
    held = next((known.line for pod in found.running if (known := waiting(pod))), None)
    message = f"{message}: {held}" if held else message
    plan = Plan(create=(*new_checkpoints(view), *found.due(view)), requeue_after_s=found.rest_s(view) or None)
    return JobOutcome(health=Health.PROGRESSING, reason="ListingSaves", message=message, plan=plan)
