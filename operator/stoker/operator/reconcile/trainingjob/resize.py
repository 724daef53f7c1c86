"""Elastic runs: the number of workers follows the room that there is. The decision is `domain/elastic`.

A change is only written here, as `status.elastic`. The spec in force then has another number of workers, and
`apply_edit` saves, ends the attempt and starts the next one, as for an edit of the user.

Pure. Called by `reconcile` and `view`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from stoker.operator.api.trainingjob import TrainingJobSpec
from stoker.operator.api.trainingjob_status import Attempt, ElasticSize
from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.elastic import Form, Limits, Moment, due_in_s, resized
from stoker.operator.domain.placement.device_catalog import needs_of
from stoker.operator.domain.placement.gang import Level
from stoker.operator.domain.placement.job_gang import gang_of_rendering
from stoker.operator.domain.placement.place import Placement, place
from stoker.operator.domain.plan import Event, Plan
from stoker.operator.domain.pods import is_gated
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.trainingjob.attempt import gang_size, moment
from stoker.operator.reconcile.trainingjob.blame import avoided_nodes
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome, changed_attempt
from stoker.operator.reconcile.trainingjob.view import TrainingView

LIMITED = "ElasticLimited"
"""Condition of an elastic run whose size cannot change, because the operator does not place it."""


def resize(view: TrainingView) -> JobOutcome | None:
    """Change the number of workers where there is room for another one, not more often than stated."""
    attempt, elastic = view.attempt, view.job.spec.run.elastic
    if elastic is None or attempt is None or attempt.ended_at is not None or _not_its_turn(view):
        return None
    now = _moment(view, attempt)
    if now is None or view.seen.nodes is None or (now.runs and _was_refused(view)):
        return None
    limits = Limits(smallest=elastic.min_workers, largest=elastic.max_workers, pace=view.settings.elastic_pace)
    form = _form(view, limits, now)
    if form is None:
        return None
    whole = changed_attempt(attempt, phase=attempt.phase or "Pending")  # as `follow` writes it
    return _changed_to(view, whole, form, now.workers, _why(now, form["workers"]["replicas"]))


def shrink_to_made(view: TrainingView) -> JobOutcome | None:
    """Take the size of the pods that were made, where the cluster refuses the others for longer than a gang waits for
    room: nodes may have more room than a quota admits."""
    attempt, elastic, refusal = view.attempt, view.job.spec.run.elastic, view.seen.refusal
    if elastic is None or refusal is None or view.seen.nodes is None or attempt is None or attempt.started_at is None:
        return None
    made, workers = len(view.gang), gang_size(view)
    if attempt.scheduler or attempt.ended_at is not None or attempt.phase is not None or made >= workers:
        return None
    limits = Limits(smallest=elastic.min_workers, largest=made, pace=view.settings.elastic_pace)
    form = _form(view, limits, Moment(now=view.now, workers=workers, runs=False, since=moment(attempt.started_at)))
    return _changed_to(view, attempt, form, workers, f"{made} pods were made: {refusal}") if form is not None else None


def _was_refused(view: TrainingView) -> bool:
    """Whether a gang of another size was made before this one, and never became whole.

    A run that grew again would stop for what is refused again. The next attempt may grow.
    """
    last = next(iter(view.job.status.attempts), None)
    return view.size is not None and last is not None and last.phase is None


def _changed_to(view: TrainingView, attempt: Attempt, form: Form, before: int, why: str) -> JobOutcome:
    workers = form["workers"]["replicas"]
    text = shortened(f"workers {before} -> {workers}: {why}")
    size = ElasticSize(workers=workers, form=dict(form), base=view.base, changed_at=view.time)
    plan = Plan(events=(Event("Normal", "Resized", text),))
    return JobOutcome(reason="Resized", message=text, changes=JobChanges(elastic=size, attempt=attempt), plan=plan)


def next_look_s(view: TrainingView) -> float | None:
    """Seconds until the size may change; None for a run that is not elastic, and where that time is over."""
    attempt = view.attempt
    if view.job.spec.run.elastic is None or attempt is None or attempt.ended_at is not None:
        return None
    now = _moment(view, attempt)
    return (due_in_s(now, view.settings.elastic_pace) or None) if now is not None else None


def elastic_condition(view: TrainingView) -> Condition:
    """Say where `run.elastic` has no effect."""
    scheduler = view.attempt.scheduler if view.attempt else None
    blind = not view.settings.places_gangs or bool(scheduler)
    why = f"{scheduler} places the pods" if scheduler else "the operator has no view of nodes"
    elastic = view.job.spec.run.elastic is not None
    return Condition(LIMITED, True if elastic and blind else None, "NotPlaced", f"run.elastic has no effect: {why}")


def _moment(view: TrainingView, attempt: Attempt) -> Moment | None:
    """None while the gang is being made or its pods start."""
    workers = gang_size(view)
    gated = len(view.gang) == workers and all(map(is_gated, view.gang))
    runs = attempt.placed_at is not None and view.leader_running
    if not (gated or runs) or attempt.started_at is None:
        return None
    size = view.job.status.elastic
    return Moment(
        now=view.now,
        workers=workers,
        runs=runs,
        since=moment((attempt.placed_at or attempt.started_at) if runs else attempt.started_at),
        changed=moment(size.changed_at) if size is not None else None,
    )


def _not_its_turn(view: TrainingView) -> bool:
    """Whether other gangs are ahead: one that waits behind them takes no room in another size either."""
    return view.seen.turn is not None and view.seen.turn.position > 1


def _form(view: TrainingView, limits: Limits, now: Moment) -> Form | None:
    """The form to change to; on nodes that the job avoids only where a gang that waits finds no others."""
    avoided = avoided_nodes(view.job.status)
    form = resized(view.written, limits, now, lambda spec: _has_room(view, spec, avoided))
    if form is not None or not avoided or now.runs:
        return form
    return resized(view.written, limits, now, lambda spec: _has_room(view, spec))


def _has_room(view: TrainingView, spec: Mapping[str, Any], avoided: Collection[str] = ()) -> bool:
    assert view.seen.nodes is not None
    pinned = view.job.status.pinned
    rendered = (pinned.rendered if pinned else None) or {}
    config = rendered["config"]
    layout = TrainingJobSpec.model_validate(spec).parallelism.model_dump()
    grid = {**config, "parallelism": layout, "gang": {**config["gang"], "nodes": spec["workers"]["replicas"]}}
    levels = tuple(Level(found.key, found.mode) for found in view.job.spec.scheduling.topology)
    devices = needs_of(view.seen.devices, view.job.metadata.namespace, rendered["pod"]["spec"]).amounts
    gang = gang_of_rendering({**rendered, "config": grid}, devices)
    return isinstance(place(gang, view.seen.nodes, levels, avoided), Placement)


def _why(now: Moment, workers: int) -> str:
    if now.runs:
        return "there is room for more"
    return f"no room for {now.workers}" if workers < now.workers else "there is room for more while it waits"
