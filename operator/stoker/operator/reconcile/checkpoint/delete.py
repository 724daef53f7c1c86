"""Deletion of a Checkpoint.

Only `deletionPolicy: Delete`, or the job's retention, touches data, and never while a resource uses it.

Pure; called by `reconcile`.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.operator.domain.conditions import Condition, Health
from stoker.operator.domain.plan import Event, Plan
from stoker.operator.domain.pods import ref_of
from stoker.operator.reconcile.checkpoint.outcome import CheckpointChanges, CheckpointOutcome
from stoker.operator.reconcile.checkpoint.task import ask_task
from stoker.operator.reconcile.checkpoint.view import CheckpointView
from stoker.operator.reconcile.retention import is_given_up

FINALIZER = "stoker.dev/checkpoint-data"


def owns_data(view: CheckpointView) -> bool:
    """Whether the data goes with the object."""
    found = view.checkpoint
    if found.spec.source.import_ is not None:
        return False
    return found.spec.deletion_policy == "Delete" or is_given_up(found)


def wanted_finalizers(view: CheckpointView) -> tuple[str, ...] | None:
    """The list of finalizers that the policy asks for; None when it is right."""
    now = view.checkpoint.metadata.finalizers
    others = tuple(name for name in now if name != FINALIZER)
    wanted = (*others, FINALIZER) if owns_data(view) else others
    return None if set(wanted) == set(now) else wanted


def expire(view: CheckpointView) -> CheckpointOutcome | None:
    """Guard the data, then delete the object, where the job's retention gave this save up."""
    if not is_given_up(view.checkpoint) or view.users:
        return None
    event = Event("Normal", "Expired", "beyond checkpoint.maxToKeep of its job, and spec.pinned is not set")
    plan = Plan(finalizers=wanted_finalizers(view), delete=(ref_of(view.seen.resource),), events=(event,))
    return CheckpointOutcome(plan=plan)


def delete(view: CheckpointView) -> CheckpointOutcome:
    """Release an object that has a deletion timestamp, after its data where the policy deletes that."""
    found = view.checkpoint
    if FINALIZER not in found.metadata.finalizers:
        return CheckpointOutcome()
    folder = found.status.folder or (found.spec.source.save.folder if found.spec.source.save else None)
    if view.seen.namespace_terminating:
        text = "the data stays: its namespace is being deleted, and no task can run there any more"
        return _release(view, Event("Warning", "Retained", text))
    if not owns_data(view) or folder is None:
        why = "no folder of it is known" if folder is None else "it is imported or spec.deletionPolicy is Retain"
        return _release(view, Event("Normal", "Retained", f"the data stays: {why}"))
    if view.users:
        text = "in use, deleted afterwards: " + ", ".join(f"{user.kind} {user.name}" for user in view.users)
        return _waiting("InUse", text)
    if view.twins:
        return _release(view, Event("Normal", "Retained", f"the data stays: Checkpoint {view.twins[0]} has the same"))
    return _delete_data(view, folder)


def _release(view: CheckpointView, event: Event) -> CheckpointOutcome:
    """Remove our finalizer, and only ours."""
    others = tuple(name for name in view.checkpoint.metadata.finalizers if name != FINALIZER)
    return CheckpointOutcome(plan=Plan(finalizers=others, events=(event,)))


def _delete_data(view: CheckpointView, folder: str) -> CheckpointOutcome:
    """Let a task delete the data, then remove the finalizer."""
    found = view.checkpoint
    digest = found.status.digest or (found.spec.source.save.digest if found.spec.source.save else None)
    answer = ask_task(view, "delete", folder, digest)
    if answer.pod is not None:
        return _waiting("DeletingData", "deleting the data", Plan(create=(answer.pod,)))
    if answer.succeeded:
        released = _release(view, Event("Normal", "Deleted", "the data is deleted"))
        return replace(released, phase="Deleted", changes=CheckpointChanges(deleted_at=view.time))
    if answer.problem:
        return CheckpointOutcome(
            phase="Deleting", health=Health.STALLED, reason="DeletionBlocked", message=answer.problem
        )
    text = f"deleting the data: {answer.waiting.line}" if answer.waiting else "deleting the data"
    return _waiting("DeletingData", text, Plan(requeue_after_s=answer.retry_in_s))


def _waiting(reason: str, message: str, plan: Plan | None = None) -> CheckpointOutcome:
    return CheckpointOutcome(
        phase="Deleting",
        health=Health.PROGRESSING,
        reason=reason,
        message=message,
        conditions=(Condition("Deleting", True, reason, message),),
        plan=plan or Plan(),
    )
