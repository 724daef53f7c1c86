"""Checkpoint: whether a save is complete, verified and used. Pure.

A save becomes known by its own spec (made by the job's reconcile), by the answer to a request (`source.jobRef`) or by
an import. It counts as verified when the agent has read it back; where no agent can do that any more, a task pod does.

Called by the loop's workers through `service/reconcilers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from stoker.operator.api.checkpoint import CheckpointPhase, Origin
from stoker.operator.domain.clock import rest_s
from stoker.operator.domain.conditions import Condition, Health
from stoker.operator.domain.labels import JOB, JOB_UID
from stoker.operator.domain.plan import ControlCall, Event, Observed, Patch, Plan
from stoker.operator.domain.pods import ended, ref_of
from stoker.operator.domain.settings import Settings
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.checkpoint.delete import delete, expire, wanted_finalizers
from stoker.operator.reconcile.checkpoint.metrics import save_metrics
from stoker.operator.reconcile.checkpoint.newer_saves import waits_for_newer_saves
from stoker.operator.reconcile.checkpoint.outcome import CheckpointChanges, CheckpointOutcome
from stoker.operator.reconcile.checkpoint.status import derive_status
from stoker.operator.reconcile.checkpoint.task import TaskAnswer, ask_task
from stoker.operator.reconcile.checkpoint.view import CheckpointView, ReportedSave, checkpoint_view
from stoker.operator.reconcile.missing_storage import missing_of

REPEAT_CALL_S = 10.0
NEXT_LOOK_S = 30.0
"""Time until a save that waits for newer ones looks at them again: their changes do not wake it."""
MAX_PROBLEMS = 8

VerifiedBy = Literal["Agent", "Task", "Manifest"]
"""What has verified a save: the job's agent and a task have read its data, a manifest's task has not."""


def reconcile_checkpoint(seen: Observed, settings: Settings, now: datetime) -> Plan:
    """Plan the next changes; a converged checkpoint gives an empty plan."""
    view = checkpoint_view(seen, settings, now)
    return derive_status(view, _decide(view))


def _decide(view: CheckpointView) -> CheckpointOutcome:
    if view.checkpoint.deleting:
        return delete(view)
    if view.intent.never_accepted and view.checkpoint.status.folder is None:
        return CheckpointOutcome(health=Health.STALLED, reason="NotSupported", message=view.intent.text)
    outcome = expire(view) or _advance(view)
    if outcome.plan.finalizers is not None:
        return outcome
    return replace(outcome, plan=replace(outcome.plan, finalizers=wanted_finalizers(view)))


def _advance(view: CheckpointView) -> CheckpointOutcome:
    status = view.checkpoint.status
    if status.phase in {"Failed", "Corrupt"}:
        return CheckpointOutcome()
    if status.folder is None:
        return _locate(view)
    return _check(view, status.folder)


# Where the data is


def _locate(view: CheckpointView) -> CheckpointOutcome:
    source = view.checkpoint.spec.source
    if source.save is not None:
        save = source.save
        return _committed(
            view,
            CheckpointChanges(
                folder=save.folder, step=save.step, digest=save.digest, writer=save.writer, reason=save.reason
            ),
            view.save_report(save.folder, save.digest),
        )
    if source.import_ is not None:
        return _import(view)
    return _request(view)


def _committed(view: CheckpointView, changes: CheckpointChanges, report: ReportedSave | None) -> CheckpointOutcome:
    """Record where a committed save is, and its metrics."""
    changes |= CheckpointChanges(storage=view.storage, saved_at=view.time, job=_origin(view))
    if report is not None:
        changes |= save_metrics(report.metrics)
    return CheckpointOutcome(
        phase="Complete",
        health=Health.PROGRESSING,
        reason="Verifying",
        message="waiting for the read-back",
        changes=changes,
    )


def _import(view: CheckpointView) -> CheckpointOutcome:
    """Let a task read the folder and verify it."""
    wanted = view.checkpoint.spec.source.import_
    assert wanted is not None
    text = "a task reads the folder"
    missing = missing_of(wanted.storage, "spec.source.import.storage", view.seen, view.settings)
    if missing is not None:
        return _wait("Pending", missing.reason, missing.message)
    answer = ask_task(view, "inspect" if _manifest_suffices(view) else "import", wanted.folder, wanted.digest)
    changes = CheckpointChanges(storage=wanted.storage, folder=wanted.folder)
    if answer.result is None:
        return _until_answered(answer, "Pending", "Importing", text)
    if not answer.succeeded:
        return _corrupt(answer.result.get("problems") or [answer.problem], changes)
    changes |= CheckpointChanges(
        step=answer.result.get("step"),
        digest=answer.result.get("digest"),
        writer=wanted.folder.rpartition(".")[2],
        reason="import",
        saved_at=view.time,
    )
    return _verified(view, _task_verdict(view), changes | save_metrics(answer.result))


def _request(view: CheckpointView) -> CheckpointOutcome:
    """Ask the running job to save now, until it reports the save."""
    wanted = view.checkpoint.spec.source.job_ref
    assert wanted is not None
    if view.job is None:
        return _wait("Pending", "JobMissing", f"TrainingJob {wanted.name} does not exist (spec.source.jobRef)")
    plan = Plan(patch=_label_patch(view))
    uid = view.checkpoint.metadata.uid
    answer = view.requests.get(uid) or {}
    save = _answered(view, uid, answer)
    if save is not None:
        writer = save.folder.rpartition(".")[2]
        changes = CheckpointChanges(
            folder=save.folder, step=save.step, digest=save.digest, writer=writer, reason="request"
        )
        return _committed(view, changes, save)
    if answer.get("state") == "Failed":
        return _fail(f"the job could not save: {answer.get('detail') or 'no reason given'}")
    if view.job.status.terminal:
        return _fail(f"TrainingJob {wanted.name} is {view.job.status.phase}: it saves no more")
    if not view.leader_running:
        return _wait("Pending", "JobNotRunning", f"TrainingJob {wanted.name} is not running", plan)
    if not view.leader_reports:
        return _wait("Pending", "JobStarting", f"TrainingJob {wanted.name} starts", plan)
    return _call(view, plan, acknowledged=bool(answer))


def _answered(view: CheckpointView, uid: str, answer: Mapping[str, Any]) -> ReportedSave | None:
    """The save that was made for this request.

    One save may answer several requests; it carries the id of the first.
    """
    save = next((save for save in view.saves if save.id == uid), None)
    if save is None and answer.get("state") == "Done" and answer.get("folder"):
        return view.save_report(str(answer["folder"]), None)
    return save


def _call(view: CheckpointView, plan: Plan, *, acknowledged: bool) -> CheckpointOutcome:
    """Send the request to the leader, again and again until it is acknowledged."""
    assert view.leader is not None
    assert view.job is not None
    status, uid = view.checkpoint.status, view.checkpoint.metadata.uid
    changes = CheckpointChanges(request_id=uid)
    asked = datetime.fromisoformat(status.requested_at) if status.requested_at is not None else None
    due = asked is None or not rest_s(asked, REPEAT_CALL_S, view.now)
    if not acknowledged and due:
        call = ControlCall(ref_of(view.leader), "POST", "/checkpoint", {"id": uid, "reason": "request"})
        plan = replace(plan, calls=(call,))
        changes |= CheckpointChanges(requested_at=view.time)
    return CheckpointOutcome(
        phase="Saving",
        health=Health.PROGRESSING,
        reason="Saving",
        message=f"TrainingJob {view.job.metadata.name} was asked to save",
        changes=changes,
        plan=replace(plan, requeue_after_s=REPEAT_CALL_S),
    )


def _label_patch(view: CheckpointView) -> tuple[Patch, ...]:
    """Labels by which the job finds the Checkpoints that belong to it."""
    assert view.job is not None
    wanted = {JOB: view.job.metadata.name, JOB_UID: view.job.metadata.uid}
    now = view.checkpoint.metadata.labels
    if all(now.get(name) == value for name, value in wanted.items()):
        return ()
    return (Patch(ref_of(view.seen.resource), {"metadata": {"labels": wanted}}),)


# Whether it is whole


def _check(view: CheckpointView, folder: str) -> CheckpointOutcome:
    status = view.checkpoint.status
    if view.job is not None and view.job.status.resumption and folder in view.job.status.resumption.rejected:
        return _corrupt(["an attempt that resumed it found it corrupt"], CheckpointChanges())
    report = view.save_report(folder, status.digest)
    metrics = save_metrics(report.metrics) if report else CheckpointChanges()
    if view.late_loss is not None:
        metrics |= CheckpointChanges(validation_loss=view.late_loss)
    if status.verified and (status.verified_by != "Manifest" or _manifest_suffices(view)):
        done = tuple(ref_of(pod) for pod in view.tasks if ended(pod) and not pod["metadata"].get("deletionTimestamp"))
        return CheckpointOutcome(changes=metrics, plan=Plan(delete=done))
    if report is not None and report.verified is True:
        return _verified(view, "Agent", metrics)
    if report is not None and report.verified is False and not _writer_runs(view):
        return _verify(view)
    if report is not None and report.verified is False:
        return _corrupt(["the agent's read-back found a difference"], metrics)
    if _writer_runs(view):
        return CheckpointOutcome(
            health=Health.PROGRESSING, reason="Verifying", message="waiting for the read-back", changes=metrics
        )
    return _verify(view)


def _verify(view: CheckpointView) -> CheckpointOutcome:
    """Let a task verify the save, because no agent will read it back."""
    status = view.checkpoint.status
    assert status.folder is not None
    answer = ask_task(view, "inspect" if _manifest_suffices(view) else "verify", status.folder, status.digest)
    if answer.pod is not None and not status.verified and waits_for_newer_saves(view):
        text = "newer saves are verified first, as checkpoint.maxToKeep of the job may give this one up"
        return _wait("Complete", "Verifying", text, Plan(requeue_after_s=NEXT_LOOK_S))
    if answer.result is None and status.verified:  # by its manifest, which stays true until the data is read
        return CheckpointOutcome(plan=_until_answered(answer, "Complete", "Verifying", "").plan)
    if answer.result is None:
        return _until_answered(answer, "Complete", "Verifying", "a task verifies it")
    metrics = save_metrics(answer.result)
    if answer.succeeded:
        return _verified(view, _task_verdict(view), metrics)
    return _corrupt(answer.result.get("problems") or [answer.problem], metrics)


def _manifest_suffices(view: CheckpointView) -> bool:
    """Whether a task may leave the data unread."""
    return view.checkpoint.spec.verification == "Manifest"


def _task_verdict(view: CheckpointView) -> VerifiedBy:
    return "Manifest" if _manifest_suffices(view) else "Task"


def _writer_runs(view: CheckpointView) -> bool:
    """Whether the attempt that wrote the save still runs, and its agent will report the read-back."""
    job = view.job
    if view.is_reported_no_more:
        return False
    if job is None or job.deleting or job.status.terminal or job.status.attempt is None:
        return False
    attempt = job.status.attempt
    return attempt.ended_at is None and attempt.writer == view.checkpoint.status.writer


def _verified(view: CheckpointView, by: VerifiedBy, changes: CheckpointChanges) -> CheckpointOutcome:
    text = "verified by manifest, its data was not read" if by == "Manifest" else f"verified by {by.lower()}"
    step = changes.get("step") or view.checkpoint.status.step
    return CheckpointOutcome(
        phase="Complete",
        health=Health.READY,
        reason="Verified",
        explanation=text,
        changes=changes | CheckpointChanges(verified_at=view.time, verified_by=by, problems=()),
        conditions=(Condition("Verified", True, f"By{by}", text),),
        plan=Plan(events=(Event("Normal", "Verified", f"step {step} is {text}"),)),
    )


def _corrupt(problems: Sequence[Any], changes: CheckpointChanges) -> CheckpointOutcome:
    texts = tuple(shortened(str(problem)) for problem in problems[:MAX_PROBLEMS]) or ("verification failed",)
    return CheckpointOutcome(
        phase="Corrupt",
        health=Health.STALLED,
        reason="Corrupt",
        message=texts[0],
        changes=changes | CheckpointChanges(problems=texts),
        conditions=(Condition("Verified", False, "Corrupt", texts[0]),),
        plan=Plan(events=(Event("Warning", "Corrupt", texts[0]),)),
    )


def _fail(problem: str) -> CheckpointOutcome:
    return CheckpointOutcome(
        phase="Failed",
        health=Health.STALLED,
        reason="Failed",
        message=problem,
        conditions=(Condition("Verified", False, "Failed", problem),),
        plan=Plan(events=(Event("Warning", "Failed", shortened(problem)),)),
    )


def _wait(phase: CheckpointPhase, reason: str, message: str, plan: Plan | None = None) -> CheckpointOutcome:
    return CheckpointOutcome(
        phase=phase, health=Health.PROGRESSING, reason=reason, message=message, plan=plan or Plan()
    )


def _until_answered(answer: TaskAnswer, phase: CheckpointPhase, reason: str, message: str) -> CheckpointOutcome:
    """Make the task, wait for it and name what its pod waits for, or give up."""
    if answer.problem:
        return _fail(answer.problem)
    if answer.waiting is None:
        create = (answer.pod,) if answer.pod is not None else ()
        return _wait(phase, reason, message, Plan(create=create, requeue_after_s=answer.retry_in_s))
    health = Health.STALLED if answer.waiting.stuck else Health.PROGRESSING
    text = f"{message}: {answer.waiting.line}"
    return CheckpointOutcome(phase=phase, health=health, reason=answer.waiting.reason, message=text)


def _origin(view: CheckpointView) -> Origin | None:
    source = view.checkpoint.spec.source
    if source.save is not None:
        return Origin(name=source.save.job_ref.name, uid=source.save.job_ref.uid, attempt=source.save.attempt)
    if view.job is None:
        return None
    attempt = view.job.status.attempt
    return Origin(name=view.job.metadata.name, uid=view.job.metadata.uid, attempt=attempt.number if attempt else None)
