"""The status of a TrainingJob: the one function that derives it from the view and the outcome of a pass. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.pod_fields import PodCounts
from stoker.operator.api.trainingjob_status import TERMINAL_PHASES, Attempt, Progress, SourceProgress
from stoker.operator.api.value import comparable, measured
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.plan import Plan
from stoker.operator.domain.pods import PodState, ended, exit_of, is_ready, pod_state
from stoker.operator.reconcile.intent import EditTime, edit_conditions, edit_events
from stoker.operator.reconcile.outcome import derive_plan
from stoker.operator.reconcile.trainingjob.announced_saves import omits_saves
from stoker.operator.reconcile.trainingjob.apply_edit import applies_at_once
from stoker.operator.reconcile.trainingjob.attempt import failures_without_progress, gang_size
from stoker.operator.reconcile.trainingjob.blame import avoided_nodes
from stoker.operator.reconcile.trainingjob.ledger import goodput
from stoker.operator.reconcile.trainingjob.outcome import JobFields, JobOutcome, changed_attempt
from stoker.operator.reconcile.trainingjob.pending_edit import pending_edit
from stoker.operator.reconcile.trainingjob.pinning import pinned_by_now
from stoker.operator.reconcile.trainingjob.startup import with_startup
from stoker.operator.reconcile.trainingjob.stragglers import newly_found, stragglers, straggling
from stoker.operator.reconcile.trainingjob.view import TrainingView, saved_step


def derive_status(view: TrainingView, outcome: JobOutcome) -> Plan:
    """The outcome's plan with the whole status. What a decision changes replaces what follows from the view."""
    status = view.job.status
    phase = outcome.phase or status.phase
    attempt = outcome.changes.get("attempt", status.attempt)
    late = () if phase in TERMINAL_PHASES else stragglers(view)
    derived = JobFields(
        phase=phase,
        accepted_spec=_accepted(view),
        pods=_pod_counts(view, attempt, phase),
        pinned=pinned_by_now(view),
        avoided_nodes=avoided_nodes(status),
        goodput=goodput(view, phase, attempt),
        stragglers=late,
    )
    derived |= _progress(view)
    derived |= _checkpoint_fields(view)
    announced = JobFields(attempt=with_startup(view, _with_announced_step(view, attempt)))
    pinned = outcome.changes.get("pinned", status.pinned)
    return derive_plan(
        outcome,
        seen=view.seen,
        status=status,
        fields={**derived, **outcome.changes, **announced},
        now=view.now,
        conditions=(
            *edit_conditions(view.intent, pending_edit(view, pinned), _edit_time(view, phase)),
            straggling(late),
        ),
        events=(*edit_events(view.intent, status), *newly_found(status.stragglers, late)),
    )


def _edit_time(view: TrainingView, phase: str) -> EditTime:
    if phase in TERMINAL_PHASES:
        return "Ended"
    return "Restart" if applies_at_once(view) else "NextAttempt"


def _accepted(view: TrainingView) -> dict[str, object] | None:
    return None if view.intent.accepted is None else dict(view.intent.accepted)


def _progress(view: TrainingView) -> JobFields:
    """The agent's newest numbers; without any the last ones stay."""
    report = {**(view.report or {}), **_last_numbers(view)}
    if report.get("step") is None:
        return JobFields()
    at = report.get("progressed_at")
    eta = report.get("eta_s")
    progress = Progress(
        step=report["step"],
        total_steps=report.get("total_steps"),
        tokens=report.get("tokens"),
        loss=measured(report.get("loss")),
        validation_loss=measured(report.get("validation_loss")),
        learning_rate=measured(report.get("learning_rate")),
        gradient_norm=measured(report.get("grad_norm")),
        tokens_per_second=measured(report.get("tokens_per_s")),
        eta_seconds=None if eta is None else max(0, round(eta)),
        progressed_at=timestamp(datetime.fromtimestamp(at, view.now.tzinfo)) if at else None,
        sources=tuple(map(_source_progress, report.get("sources") or ())),
    )
    return JobFields(progress=progress)


def _last_numbers(view: TrainingView) -> Mapping[str, Any]:
    """The numbers that the leader left at its end: its last steps may have come after the last report."""
    message = exit_of(view.leader).message if view.leader and ended(view.leader) else None
    return message.result if message else {}


def _source_progress(source: Mapping[str, Any]) -> SourceProgress:
    epochs = source["samples"] / max(1, source["sequences"])
    return SourceProgress(name=source["name"], samples=source["samples"], epochs=measured(epochs) or "0")


def _checkpoint_fields(view: TrainingView) -> JobFields:
    """Counts and references of the job's Checkpoint objects; progress in verified steps refills the restart budget."""
    saved = [found for found in view.checkpoints if found.status.step is not None and found.status.folder]
    verified = view.newest_verified
    losses = ((found, comparable(found.status.validation_loss)) for found in view.checkpoints if found.status.verified)
    scored = [(found, loss) for found, loss in losses if loss is not None]
    best, _ = min(scored, key=lambda item: item[1], default=(None, None))
    return JobFields(
        checkpoints=len(view.checkpoints),
        latest_checkpoint=saved_step(saved[0]) if saved else None,
        newest_verified_checkpoint=saved_step(verified) if verified else None,
        best_verified_checkpoint=saved_step(best) if best else None,
        best_step=max(view.verified_step, view.job.status.best_step),
        failures_without_progress=failures_without_progress(view),
    )


def _pod_counts(view: TrainingView, attempt: Attempt | None, phase: str) -> PodCounts | None:
    """Counts of the running gang; a finished job keeps its last ones. A gang that is still being made has none."""
    if phase in TERMINAL_PHASES:
        return view.job.status.pods
    if attempt is None or attempt.ended_at is not None or attempt.phase is None:
        return None
    return PodCounts(
        desired=gang_size(view),
        scheduled=sum(bool(pod["spec"].get("nodeName")) for pod in view.gang),
        running=sum(pod_state(pod) is PodState.RUNNING for pod in view.gang),
        ready=sum(is_ready(pod) for pod in view.gang),
    )


def _with_announced_step(view: TrainingView, attempt: Attempt | None) -> Attempt | None:
    """The attempt, remembering the highest of its saves that was seen as an object.

    While older saves are being listed, one that a Checkpoint has asked for meanwhile does not count.
    """
    if attempt is None:
        return None
    mine = [found for found in view.checkpoints if _writer(found) == attempt.writer]
    if omits_saves(view):
        mine = [found for found in mine if found.spec.source.save]
    steps = [found.spec.source.save.step if found.spec.source.save else found.status.step for found in mine]
    highest = max((step for step in (*steps, attempt.announced_step) if step is not None), default=None)
    return attempt if highest == attempt.announced_step else changed_attempt(attempt, announced_step=highest)


def _writer(found: Checkpoint) -> str | None:
    return found.spec.source.save.writer if found.spec.source.save else found.status.writer
