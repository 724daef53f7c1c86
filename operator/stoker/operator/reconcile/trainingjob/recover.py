"""The end of a failed attempt: its cause is written, its saves become known, its pods go.

Pure. Called by `reconcile`; the policy is `domain/recovery`.
"""

from __future__ import annotations

from stoker.operator.api.trainingjob_status import Attempt, Failure, Resumption
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.labels import NODE_RANK
from stoker.operator.domain.plan import Event, Plan
from stoker.operator.domain.pods import ended_by_itself, label_number
from stoker.operator.domain.recovery import (
    Ending,
    disruption,
    exhausted,
    first_failure,
    first_removal,
    lost_pod,
    root_cause,
)
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.trainingjob.attempt import (
    completed,
    failures_without_progress,
    gang_size,
    moment,
    reported_step,
    undeleted,
)
from stoker.operator.reconcile.trainingjob.end import finish
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome, changed_attempt
from stoker.operator.reconcile.trainingjob.saves import new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.names import stem
from stoker.pod.causes import Action, Cause

_CONSEQUENCES = frozenset({Cause.PEER_LOST, Cause.HANG, Cause.RANK_FAILED})
"""What a rank reports also where only a peer of it is lost."""


def recover(view: TrainingView) -> JobOutcome | None:
    """Act on a confirmed end of the running attempt, before anything else."""
    attempt = view.attempt
    if attempt is None or attempt.ended_at is not None:
        return None
    if completed(view):
        return finish(view, "Completed", Health.READY, "Completed", "")
    ending = _root_cause(view, attempt)
    return _after_failure(view, attempt, ending) if ending is not None else None


def explain(view: TrainingView) -> JobOutcome | None:
    """Replace the recorded failure with its root cause while the attempt's pods terminate.

    A lost node is detected late and kubelets report exits in any order, so the first failure seen may be a peer's. A
    retry after a lost node is not counted. It comes before a stop, whose pods are the same: what ended the attempt
    counts also for the run that goes on later.
    """
    attempt = view.attempt
    failure = attempt.failure if attempt is not None and attempt.ended_at is not None else None
    if attempt is None or failure is None or failure.action != Action.RETRY:
        return None
    ending = _disruption(view) or _origin(view, attempt, failure)
    return _explained(view, attempt, ending) if ending is not None else None


def _root_cause(view: TrainingView, attempt: Attempt) -> Ending | None:
    """The most telling end of a pod: by its exit, or because another client removed it or is removing it.

    A pod that is being deleted may still save, so it ends nothing by itself.
    """
    failed, lost = first_failure(view.gang), _lost(view, attempt)
    leaving = first_removal(view.gang) if failed is not None else None
    return root_cause(found for found in (failed, lost, leaving) if found is not None)


def _after_failure(view: TrainingView, attempt: Attempt, ending: Ending) -> JobOutcome:
    """Write the cause and the end of the attempt, make its saves known, let its pods go."""
    action = _action(view, attempt, ending)
    if action is Action.CANCEL:
        return finish(view, "Cancelled", Health.READY, "Cancelled", ending.detail or "cancelled")
    failure = _failure(view, ending, action)
    message = f"{ending.cause}: {ending.detail}".rstrip(": ")
    over = changed_attempt(attempt, ended_at=view.time, failure=failure, last_step=_last_step(view, ending))
    changes = JobChanges(
        attempt=over,
        last_failure=failure,
        failures_without_progress=failures_without_progress(view) + (ending.action is Action.RETRY),
        requests=(),
        resumption=_resumption(view, ending),
    )
    if action is Action.FAIL:
        return finish(view, "Failed", Health.STALLED, ending.cause.value, message, changes)
    event = Event("Warning", ending.cause.value, f"attempt {attempt.number} ended: {message}; {action}")
    return JobOutcome(
        phase="Restarting",
        health=Health.PROGRESSING,
        reason="Restarting",
        message=message,
        changes=changes,
        plan=Plan(create=new_checkpoints(view), delete=undeleted(view.live), events=(event,)),
    )


def _action(view: TrainingView, attempt: Attempt, ending: Ending) -> Action:
    """The table's action, or Fail where it cannot help: the budget is spent, or nothing older can be resumed.

    What a lost peer causes is a consequence: others miss it, hang or raise. Whether its node is lost, so that the retry
    is free, is known once the last pod has gone.
    """
    action = ending.action
    if action is Action.RETRY and exhausted(failures_without_progress(view) + 1, view.job.spec.run.backoff_limit):
        cause_may_come = ending.cause in _CONSEQUENCES and bool(view.live)
        return Action.RETRY if cause_may_come else Action.FAIL
    own = {found.status.folder for found in view.checkpoints}
    if action is Action.RESUME_OLDER and (attempt.resumed_from is None or attempt.resumed_from.folder not in own):
        return Action.FAIL
    return action


def _explained(view: TrainingView, attempt: Attempt, ending: Ending) -> JobOutcome:
    explained = _failure(view, ending, ending.action)
    message = f"{ending.cause}: {ending.detail}".rstrip(": ")
    failures = failures_without_progress(view) - (ending.action is Action.RETRY_FREE)
    event = Event("Warning", ending.cause.value, f"what ended attempt {attempt.number}: {message}; {explained.action}")
    return JobOutcome(
        health=Health.PROGRESSING,
        reason="Restarting",
        message=message,
        changes=JobChanges(
            attempt=changed_attempt(attempt, failure=explained),
            last_failure=explained,
            failures_without_progress=max(0, failures),
        ),
        plan=Plan(events=(event,)),
    )


def _disruption(view: TrainingView) -> Ending | None:
    ending = disruption(view.gang)
    return ending if ending is not None and ending.action is Action.RETRY_FREE else None


def _origin(view: TrainingView, attempt: Attempt, failure: Failure) -> Ending | None:
    """The reason for a lost peer: the failure of a pod that ended before it was asked to."""
    if failure.cause != Cause.PEER_LOST or attempt.ended_at is None:
        return None
    asked_at = moment(attempt.ended_at)
    ending = first_failure(pod for pod in view.gang if ended_by_itself(pod, asked_at))
    if ending is None or ending.cause is Cause.PEER_LOST:
        return None
    return ending if ending.action is Action.RETRY else None


def _lost(view: TrainingView, attempt: Attempt) -> Ending | None:
    """The ending of a pod that is gone, in a gang that was whole once."""
    if attempt.phase is None or len(view.gang) >= gang_size(view):
        return None
    present = {label_number(pod, NODE_RANK) for pod in view.gang}
    missing = min(set(range(gang_size(view))) - present)
    return lost_pod(missing, f"{stem(view.job.metadata.name, view.job.metadata.uid)}-a{attempt.number}-{missing}")


def _resumption(view: TrainingView, ending: Ending) -> Resumption | None:
    """The search for what to resume, without the save that the attempt found corrupt."""
    now = view.job.status.resumption or Resumption()
    attempt = view.attempt
    if ending.cause is not Cause.CHECKPOINT_CORRUPT or attempt is None or attempt.resumed_from is None:
        return view.job.status.resumption
    folder = attempt.resumed_from.folder
    kept = tuple(found for found in now.rejected if found != folder)[-15:]
    return Resumption(listed_writer=now.listed_writer, rejected=(*kept, folder))


def _failure(view: TrainingView, ending: Ending, action: Action) -> Failure:
    return Failure(
        cause=ending.cause.value,
        exit_code=ending.exit_code,
        node=ending.node or None,
        pod=ending.pod,
        rank=ending.rank,
        step=ending.step,
        detail=shortened(ending.detail) or None,
        at=view.time,
        action=action.value,
    )


def _last_step(view: TrainingView, ending: Ending) -> int | None:
    attempt = view.attempt
    assert attempt is not None
    return ending.step if ending.step is not None else reported_step(view, attempt)
