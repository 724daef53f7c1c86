"""Saves that the leader's word has no room for, made while the operator was away: a task pod lists them.

Until they have Checkpoints, newer ones get none: the next list begins after the newest Checkpoint.

Pure. Called by `reconcile` for a job that runs or has ended.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.operator.reconcile.trainingjob.announced_saves import omits_saves
from stoker.operator.reconcile.trainingjob.listing import listing_of
from stoker.operator.reconcile.trainingjob.outcome import JobOutcome
from stoker.operator.reconcile.trainingjob.view import TrainingView


def with_omitted_saves(view: TrainingView, outcome: JobOutcome) -> JobOutcome:
    """The outcome, with the pod that lists the next omitted saves."""
    if view.attempt is None or not omits_saves(view):
        return outcome
    listing = listing_of(view, view.attempt)
    waits = [wait for wait in (outcome.plan.requeue_after_s, listing.rest_s(view)) if wait]
    create = (*outcome.plan.create, *listing.due(view))
    return replace(outcome, plan=replace(outcome.plan, create=create, requeue_after_s=min(waits, default=None)))
