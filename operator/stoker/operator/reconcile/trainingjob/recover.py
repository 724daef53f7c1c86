"""What follows a failed attempt: its cause is written, its saves become known, its pods go."""

from __future__ import annotations

from typing import Any

from stoker.operator.api.trainingjob_status import Attempt, Failure, Resumption
from stoker.operator.domain.conditions import Health, summary
from stoker.operator.domain.plan import Event, Plan
from stoker.operator.domain.pods import ended_by_itself, label
from stoker.operator.domain.recovery import Ending, disruption, exhausted, first_failure, lost_pod
from stoker.operator.reconcile.trainingjob.end import finish
from stoker.operator.reconcile.trainingjob.saves import new_checkpoints
from stoker.operator.reconcile.trainingjob.status import (
    checkpoint_figures,
    completed,
    gang_size,
    moment,
    progress_figures,
    reported_step,
    undeleted,
)
from stoker.operator.reconcile.trainingjob.view import TrainingView, settle
from stoker.operator.render.names import stem
from stoker.pod.causes import Action, Cause


def recover(view: TrainingView) -> Plan | None:
    """A confirmed end of the running attempt acts before anything else."""
    attempt = view.attempt
    if attempt is None:
        return None
    if attempt.ended_at is not None:
        return _explain(view, attempt)
    if completed(view):
        return finish(view, "Completed", Health.READY, "Completed", "")
    ending = first_failure(view.gang) or _lost(view, attempt)
    return _after_failure(view, attempt, ending) if ending is not None else None


def _after_failure(view: TrainingView, attempt: Attempt, ending: Ending) -> Plan:
    """Write the cause and the end of the attempt, make its saves known, let its pods go."""
    action = _action(view, attempt, ending)
    if action is Action.CANCEL:
        return finish(view, "Cancelled", Health.READY, "Cancelled", ending.detail or "cancelled")
    in_a_row = view.job.status.failures_without_progress + (ending.action is Action.RETRY)
    failure = _failure(view, ending, action)
    message = f"{ending.cause}: {ending.detail}".rstrip(": ")[:1024]
    over = attempt.model_copy(update={"ended_at": view.time, "failure": failure, "last_step": _last_step(view, ending)})
    changes: dict[str, Any] = {
        "attempt": over,
        "last_failure": failure,
        "failures_without_progress": in_a_row,
        "requests": (),
        "resumption": _resumption(view, ending),
    }
    if action is Action.FAIL:
        return finish(view, "Failed", Health.STALLED, ending.cause.value, message, **changes)
    changes |= {
        "phase": "Restarting",
        "message": message,
        "pods": None,
        **progress_figures(view),
        **checkpoint_figures(view),
    }
    event = Event("Warning", ending.cause.value, f"attempt {attempt.number} ended: {message}; {action}")
    plan = Plan(create=new_checkpoints(view), delete=undeleted(view.live), events=(event,))
    return settle(view, changes, summary(Health.PROGRESSING, "Restarting", message), plan)


def _action(view: TrainingView, attempt: Attempt, ending: Ending) -> Action:
    """By the table, as long as it can help: retries are counted, and what the user named to start from has nothing older.

    A lost peer is a consequence: whether its node is lost, and the budget untouched, is known once the last pod has gone.
    """
    action, status = ending.action, view.job.status
    if action is Action.RETRY and exhausted(status.failures_without_progress + 1, view.job.spec.run.backoff_limit):
        cause_may_come = ending.cause is Cause.PEER_LOST and bool(view.live)
        return Action.RETRY if cause_may_come else Action.FAIL
    own = {found.status.folder for found in view.checkpoints}
    if action is Action.RESUME_OLDER and (attempt.resumed_from is None or attempt.resumed_from.folder not in own):
        return Action.FAIL
    return action


def _explain(view: TrainingView, attempt: Attempt) -> Plan | None:
    """A node is known to be lost only after a while, and kubelets tell of ends in any order: peers may have failed of it by then. While the
    attempt's pods go, the cause replaces the consequence; where it was a lost node, the job's budget has its retry back."""
    failure = attempt.failure
    if failure is None or failure.action != Action.RETRY:
        return None
    ending = _disruption(view) or _origin(view, attempt, failure)
    if ending is None:
        return None
    explained = _failure(view, ending, ending.action)
    message = f"{ending.cause}: {ending.detail}".rstrip(": ")[:1024]
    failures = view.job.status.failures_without_progress - (ending.action is Action.RETRY_FREE)
    changes = {
        "attempt": attempt.model_copy(update={"failure": explained}),
        "last_failure": explained,
        "failures_without_progress": max(0, failures),
        "message": message,
    }
    event = Event("Warning", ending.cause.value, f"what ended attempt {attempt.number}: {message}; {explained.action}")
    return settle(view, changes, summary(Health.PROGRESSING, "Restarting", message), Plan(events=(event,)))


def _disruption(view: TrainingView) -> Ending | None:
    ending = disruption(view.gang)
    return ending if ending is not None and ending.action is Action.RETRY_FREE else None


def _origin(view: TrainingView, attempt: Attempt, failure: Failure) -> Ending | None:
    """Why a peer was lost: the failure of a pod that nobody had told to go."""
    if failure.cause != Cause.PEER_LOST or attempt.ended_at is None:
        return None
    told_at = moment(attempt.ended_at)
    ending = first_failure(pod for pod in view.gang if ended_by_itself(pod, told_at))
    if ending is None or ending.cause is Cause.PEER_LOST:
        return None
    return ending if ending.action is Action.RETRY else None


def _lost(view: TrainingView, attempt: Attempt) -> Ending | None:
    """A pod of a gang that was whole once is gone."""
    if attempt.phase is None or len(view.gang) >= gang_size(view):
        return None
    present = {int(label(pod, "node-rank") or 0) for pod in view.gang}
    missing = min(set(range(gang_size(view))) - present)
    return lost_pod(missing, f"{stem(view.job.metadata.name, view.job.metadata.uid)}-a{attempt.number}-{missing}")


def _resumption(view: TrainingView, ending: Ending) -> Resumption | None:
    """Never try again what an attempt found corrupt."""
    now = view.job.status.resumption or Resumption()
    attempt = view.attempt
    if ending.cause is not Cause.CHECKPOINT_CORRUPT or attempt is None or attempt.resumed_from is None:
        return view.job.status.resumption
    folder = attempt.resumed_from.folder
    kept = tuple(found for found in now.rejected if found != folder)[-15:]
    return now.model_copy(update={"rejected": (*kept, folder)})


def _failure(view: TrainingView, ending: Ending, action: Action) -> Failure:
    return Failure(
        cause=ending.cause.value,
        exit_code=ending.exit_code,
        node=ending.node or None,
        rank=ending.rank,
        step=ending.step,
        detail=ending.detail[:1024] or None,
        at=view.time,
        action=action.value,
    )


def _last_step(view: TrainingView, ending: Ending) -> int | None:
    attempt = view.attempt
    assert attempt is not None
    return ending.step if ending.step is not None else reported_step(view, attempt)
