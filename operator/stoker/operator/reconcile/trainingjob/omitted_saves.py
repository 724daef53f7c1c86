"""Saves that the leader's word has no room for, made while the operator was away: a task pod lists them.

Until they have Checkpoints, newer ones get none: the next list begins after the newest Checkpoint.

Pure. Called by `reconcile` for a job that runs or has ended.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.operator.reconcile.trainingjob.announced_saves import leaves_gap
from stoker.operator.reconcile.trainingjob.listing import listing_of, not_listed
from stoker.operator.reconcile.trainingjob.outcome import JobOutcome
from stoker.operator.reconcile.trainingjob.view import TrainingView


def with_omitted_saves(view: TrainingView, outcome: JobOutcome) -> JobOutcome:
    """The outcome, with the pod that lists the next omitted saves.

    An event tells that the list was given up, in the pass that makes the Checkpoints of the newer saves without it.
    """
    if view.attempt is None or not leaves_gap(view):
        return outcome
    listing = listing_of(view, view.attempt)
    if listing.given_up and any(made["kind"] == "Checkpoint" for made in outcome.plan.create):
        return replace(outcome, plan=replace(outcome.plan, events=(*outcome.plan.events, not_listed(view.attempt))))
    if listing.complete:
        return outcome
    waits = [wait for wait in (outcome.plan.requeue_after_s, listing.rest_s(view)) if wait]
    create = (*outcome.plan.create, *listing.due(view))
    return replace(outcome, plan=replace(outcome.plan, create=create, requeue_after_s=min(waits, default=None)))
