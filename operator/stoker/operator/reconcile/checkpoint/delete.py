"""Deleting a Checkpoint: only `deletionPolicy: Delete`, or the job's retention, touches data, and never while somebody uses it."""

from __future__ import annotations

from stoker.operator.domain.conditions import Condition, Health, summary
from stoker.operator.domain.plan import Event, Plan
from stoker.operator.domain.pods import ref_of
from stoker.operator.reconcile.checkpoint.task import ask
from stoker.operator.reconcile.checkpoint.view import CheckpointView, settle
from stoker.operator.reconcile.trainingjob.saves import EXPIRED

FINALIZER = "stoker.dev/checkpoint-data"


def owns_data(view: CheckpointView) -> bool:
    """The object's end is the data's end."""
    found = view.checkpoint
    if found.spec.source.import_ is not None:
        return False
    return found.spec.deletion_policy == "Delete" or EXPIRED in found.metadata.labels


def wanted_finalizers(view: CheckpointView) -> tuple[str, ...] | None:
    """The finalizer list that the policy asks for; None when it is right."""
    now = view.checkpoint.metadata.finalizers
    others = tuple(name for name in now if name != FINALIZER)
    wanted = (*others, FINALIZER) if owns_data(view) else others
    return None if set(wanted) == set(now) else wanted


def expire(view: CheckpointView) -> Plan | None:
    """The job's retention gave this save up: guard the data, then delete the object."""
    if EXPIRED not in view.checkpoint.metadata.labels or view.users or view.checkpoint.spec.pinned:
        return None
    event = Event("Normal", "Expired", "beyond checkpoint.maxToKeep of its job")
    return Plan(finalizers=wanted_finalizers(view), delete=(ref_of(view.seen.resource),), events=(event,))


def delete(view: CheckpointView) -> Plan:
    """The object has a deletion timestamp."""
    found = view.checkpoint
    if FINALIZER not in found.metadata.finalizers:
        return Plan()
    others = tuple(name for name in found.metadata.finalizers if name != FINALIZER)
    folder = found.status.folder or (found.spec.source.save.folder if found.spec.source.save else None)
    if view.seen.namespace_terminating:
        text = "the data stays: its namespace is being deleted, and no task can run there any more"
        return Plan(finalizers=others, events=(Event("Warning", "Retained", text),))
    if not owns_data(view) or folder is None:
        return Plan(finalizers=others, events=(Event("Normal", "Retained", "the data stays"),))
    if view.users:
        text = "waits until it is not used any more: " + ", ".join(f"{user.kind} {user.name}" for user in view.users)
        return _waiting(view, "InUse", text)
    if view.twins:
        text = f"the data stays: Checkpoint {view.twins[0]} has the same"
        return Plan(finalizers=others, events=(Event("Normal", "Retained", text),))
    return _delete_data(view, folder, others)


def _delete_data(view: CheckpointView, folder: str, finalizers: tuple[str, ...]) -> Plan:
    """A task deletes it; `finalizers` are those that stay."""
    found = view.checkpoint
    digest = found.status.digest or (found.spec.source.save.digest if found.spec.source.save else None)
    answer = ask(view, "delete", folder, digest)
    if answer.pod is not None:
        return _waiting(view, "DeletingData", "deleting the data", Plan(create=(answer.pod,)))
    if answer.succeeded:
        event = Event("Normal", "Deleted", "the data is deleted")
        deleted = {"phase": "Deleted", "deleted_at": view.time}
        return settle(view, deleted, (), Plan(finalizers=finalizers, events=(event,)))
    if answer.problem:
        changes = {"phase": "Deleting", "message": answer.problem[:1024]}
        return settle(view, changes, summary(Health.STALLED, "DeletionBlocked", answer.problem))
    text = f"deleting the data: {answer.waiting.line}" if answer.waiting else "deleting the data"
    return _waiting(view, "DeletingData", text, Plan(requeue_after_s=answer.retry_in_s))


def _waiting(view: CheckpointView, reason: str, message: str, plan: Plan | None = None) -> Plan:
    conditions = (*summary(Health.PROGRESSING, reason, message), Condition("Deleting", True, reason, message))
    return settle(view, {"phase": "Deleting", "message": message[:1024]}, conditions, plan)
