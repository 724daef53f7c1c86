"""The order of decisions about a TrainingJob. Pure: the same observation gives the same plan.

Called by the loop's workers through `service/reconcilers`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from stoker.operator.domain.plan import Observed, Plan
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.trainingjob.apply_edit import apply_edit
from stoker.operator.reconcile.trainingjob.bind import bind
from stoker.operator.reconcile.trainingjob.end import after_end, clean_up, stall
from stoker.operator.reconcile.trainingjob.follow import follow
from stoker.operator.reconcile.trainingjob.omitted_saves import with_omitted_saves
from stoker.operator.reconcile.trainingjob.outcome import JobOutcome
from stoker.operator.reconcile.trainingjob.recover import explain, recover
from stoker.operator.reconcile.trainingjob.resize import elastic_condition, next_look_s, resize, shrink_to_made
from stoker.operator.reconcile.trainingjob.start import start
from stoker.operator.reconcile.trainingjob.status import derive_status
from stoker.operator.reconcile.trainingjob.stop import by_deadline, stop
from stoker.operator.reconcile.trainingjob.view import TrainingView, training_view


def reconcile_trainingjob(seen: Observed, settings: Settings, now: datetime) -> Plan:
    """Plan the next changes; a converged job gives an empty plan."""
    view = training_view(seen, settings, now)
    return derive_status(view, _decide(view))


def _decide(view: TrainingView) -> JobOutcome:
    if view.job.deleting:
        return clean_up(view)
    if view.job.status.terminal:
        return with_omitted_saves(view, after_end(view))
    if view.intent.never_accepted and view.attempt is None and not view.job.spec.run.cancel:
        return stall("NotSupported", view.intent.text)
    outcome = explain(view) or stop(view) or apply_edit(view) or recover(view) or shrink_to_made(view) or start(view)
    outcome = outcome or _resized(view)
    return by_deadline(view, with_omitted_saves(view, outcome) if view.live else outcome)


def _resized(view: TrainingView) -> JobOutcome:
    """A change of the size, or what a gang of this size does next."""
    outcome = resize(view) or bind(view) or follow(view)
    waits = [wait for wait in (outcome.plan.requeue_after_s, next_look_s(view)) if wait]
    conditions = (*outcome.conditions, elastic_condition(view))
    return replace(outcome, conditions=conditions, plan=replace(outcome.plan, requeue_after_s=min(waits, default=None)))
