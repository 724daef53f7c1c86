"""Checkpoint: whether a save is complete, verified and used. Pure.

A save becomes known by its own spec (made by the job's reconcile), by the answer to a request (`source.jobRef`) or by an import. Verified is what the
agent read back; where no agent will say so any more, a task pod reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from stoker.operator.api.checkpoint import Layout, Origin
from stoker.operator.api.value import measured
from stoker.operator.domain.conditions import Condition, Health, summary
from stoker.operator.domain.labels import JOB, JOB_UID
from stoker.operator.domain.plan import Call, Event, Observed, Patch, Plan
from stoker.operator.domain.pods import ended, ref_of
from stoker.operator.domain.settings import Settings
from stoker.operator.domain.unsupported import unsupported
from stoker.operator.reconcile.checkpoint.delete import delete, expire, wanted_finalizers
from stoker.operator.reconcile.checkpoint.task import TaskAnswer, ask
from stoker.operator.reconcile.checkpoint.view import CheckpointView, Word, look, settle

REPEAT_CALL_S = 10.0


def reconcile_checkpoint(seen: Observed, settings: Settings, now: datetime) -> Plan:
    """What should change next; a converged checkpoint gives an empty plan."""
    view = look(seen, settings, now)
    if view.checkpoint.deleting:
        return delete(view)
    refused = unsupported("Checkpoint", seen.resource["spec"])
    if refused:
        text = "; ".join(refused)
        return settle(view, {"message": text}, summary(Health.STALLED, "NotSupported", text))
    plan = expire(view) or _advance(view)
    return plan if plan.finalizers is not None else replace(plan, finalizers=wanted_finalizers(view))


def _advance(view: CheckpointView) -> Plan:
    status = view.checkpoint.status
    if status.phase in {"Failed", "Corrupt"}:
        return settle(view, {}, ())
    if status.folder is None:
        return _find(view)
    return _judge(view)


# Where the data is


def _find(view: CheckpointView) -> Plan:
    source = view.checkpoint.spec.source
    if source.save is not None:
        save = source.save
        word = view.word_about(save.folder, save.digest)
        return _found(view, save.folder, save.step, save.digest, save.writer, save.reason, word)
    if source.import_ is not None:
        return _import(view)
    return _request(view)


def _found(
    view: CheckpointView, folder: str, step: int, digest: str, writer: str, reason: str, word: Word | None
) -> Plan:
    """The save is committed: record where it is and what is known of it."""
    changes = {
        "phase": "Complete",
        "storage": view.storage,
        "folder": folder,
        "step": step,
        "digest": digest,
        "writer": writer,
        "reason": reason,
        "saved_at": view.time,
        "message": "waiting for the read-back",
        "job": _origin(view),
        **_facts(word.facts if word else {}),
    }
    return settle(view, changes, summary(Health.PROGRESSING, "Verifying", "waiting for the read-back"))


def _import(view: CheckpointView) -> Plan:
    """A task reads the folder and verifies it."""
    wanted = view.checkpoint.spec.source.import_
    assert wanted is not None
    claim, text = wanted.storage.claim_name, "a task reads the folder"
    if claim not in {found["metadata"]["name"] for found in view.seen.of_kind("PersistentVolumeClaim")}:
        missing = f"PersistentVolumeClaim {claim} does not exist (spec.source.import.storage)"
        return _wait(view, "Pending", "ClaimMissing", missing)
    answer = ask(view, "import", wanted.folder, wanted.digest)
    place = {"storage": wanted.storage, "folder": wanted.folder}
    if answer.result is None:
        return _until_answered(view, answer, "Pending", "Importing", text)
    if not answer.succeeded:
        return _corrupt(view, answer.result.get("problems") or [answer.problem], place)
    changes = {
        "phase": "Complete",
        **place,
        "step": answer.result.get("step"),
        "digest": answer.result.get("digest"),
        "writer": wanted.folder.rpartition(".")[2],
        "reason": "import",
        "saved_at": view.time,
        **_facts(answer.result),
    }
    return _verified(view, "Task", changes)


def _request(view: CheckpointView) -> Plan:
    """Ask the running job to save now, until it says that it has."""
    wanted = view.checkpoint.spec.source.job_ref
    assert wanted is not None
    if view.job is None:
        return _wait(view, "Pending", "JobMissing", f"TrainingJob {wanted.name} does not exist (spec.source.jobRef)")
    plan = Plan(patch=_label_patch(view))
    uid = view.checkpoint.metadata.uid
    answer = view.requests.get(uid) or {}
    word = _answered(view, uid, answer)
    if word is not None:
        writer = word.folder.rpartition(".")[2]
        return _found(view, word.folder, word.step, word.digest, writer, "request", word)
    if answer.get("state") == "Failed":
        return _fail(view, f"the job could not save: {answer.get('detail') or 'no reason given'}")
    if view.job.status.terminal:
        return _fail(view, f"TrainingJob {wanted.name} is {view.job.status.phase}: it saves nothing any more")
    if not view.leader_running:
        return _wait(view, "Pending", "JobNotRunning", f"TrainingJob {wanted.name} is not running", plan)
    if not view.leader_reports:
        return _wait(view, "Pending", "JobStarting", f"TrainingJob {wanted.name} starts", plan)
    return _call(view, plan, acknowledged=bool(answer))


def _answered(view: CheckpointView, uid: str, answer: Mapping[str, Any]) -> Word | None:
    """The save that was made for this request. One save may answer several requests, and carries the id of the first."""
    word = next((word for word in view.words if word.id == uid), None)
    if word is None and answer.get("state") == "Done" and answer.get("folder"):
        return view.word_about(str(answer["folder"]), None)
    return word


def _call(view: CheckpointView, plan: Plan, *, acknowledged: bool) -> Plan:
    assert view.leader is not None
    status = view.checkpoint.status
    changes: dict[str, Any] = {
        "phase": "Saving",
        "message": "the job was asked to save",
        "request_id": view.checkpoint.metadata.uid,
    }
    due = status.requested_at is None or view.now >= datetime.fromisoformat(status.requested_at) + timedelta(
        seconds=REPEAT_CALL_S
    )
    if not acknowledged and due:
        body = {"id": view.checkpoint.metadata.uid, "reason": "request"}
        plan = replace(plan, calls=(Call(ref_of(view.leader), "POST", "/checkpoint", body),))
        changes["requested_at"] = view.time
    plan = replace(plan, requeue_after_s=REPEAT_CALL_S)
    return settle(view, changes, summary(Health.PROGRESSING, "Saving", "the job was asked to save"), plan)


def _label_patch(view: CheckpointView) -> tuple[Patch, ...]:
    """Labels by which the job finds the Checkpoints that belong to it."""
    assert view.job is not None
    wanted = {JOB: view.job.metadata.name, JOB_UID: view.job.metadata.uid}
    now = view.checkpoint.metadata.labels
    if all(now.get(name) == value for name, value in wanted.items()):
        return ()
    return (Patch(ref_of(view.seen.resource), {"metadata": {"labels": wanted}}),)


# Whether it is whole


def _judge(view: CheckpointView) -> Plan:
    status = view.checkpoint.status
    assert status.folder is not None
    if view.job is not None and view.job.status.resumption and status.folder in view.job.status.resumption.rejected:
        return _corrupt(view, ["an attempt that resumed it found it corrupt"], {})
    word = view.word_about(status.folder, status.digest)
    facts = _facts(word.facts) if word else {}
    if status.verified:
        done = tuple(ref_of(pod) for pod in view.tasks if ended(pod) and not pod["metadata"].get("deletionTimestamp"))
        return settle(view, facts, (), Plan(delete=done))
    if word is not None and word.verified is True:
        return _verified(view, "Agent", facts)
    if word is not None and word.verified is False and not _writer_runs(view):
        return _verify(view)
    if word is not None and word.verified is False:
        return _corrupt(view, ["the agent's read-back found a difference"], facts)
    if _writer_runs(view):
        return settle(view, facts, summary(Health.PROGRESSING, "Verifying", "waiting for the read-back"))
    return _verify(view)


def _verify(view: CheckpointView) -> Plan:
    """Nobody else will read it back: a task does."""
    status = view.checkpoint.status
    assert status.folder is not None
    answer = ask(view, "verify", status.folder, status.digest)
    if answer.result is None:
        return _until_answered(view, answer, "Complete", "Verifying", "a task verifies it")
    facts = _facts(answer.result)
    if answer.succeeded:
        return _verified(view, "Task", facts)
    return _corrupt(view, answer.result.get("problems") or [answer.problem], facts)


def _writer_runs(view: CheckpointView) -> bool:
    """The attempt that wrote the save is still running, so that its agent will say whether it reads back."""
    job = view.job
    if job is None or job.deleting or job.status.terminal or job.status.attempt is None:
        return False
    attempt = job.status.attempt
    return attempt.ended_at is None and attempt.writer == view.checkpoint.status.writer


def _verified(view: CheckpointView, by: str, changes: dict[str, Any]) -> Plan:
    text = f"verified by {by.lower()}"
    status = {**changes, "verified_at": view.time, "verified_by": by, "message": None, "problems": ()}
    conditions = (*summary(Health.READY, "Verified", text), Condition("Verified", True, f"By{by}", text))
    step = changes.get("step") or view.checkpoint.status.step
    return settle(view, status, conditions, Plan(events=(Event("Normal", "Verified", f"step {step} is {text}"),)))


def _corrupt(view: CheckpointView, problems: list[Any], changes: dict[str, Any]) -> Plan:
    texts = tuple(str(problem)[:1024] for problem in problems[:8]) or ("verification failed",)
    status = {**changes, "phase": "Corrupt", "message": texts[0], "problems": texts}
    conditions = (*summary(Health.STALLED, "Corrupt", texts[0]), Condition("Verified", False, "Corrupt", texts[0]))
    return settle(view, status, conditions, Plan(events=(Event("Warning", "Corrupt", texts[0]),)))


def _fail(view: CheckpointView, problem: str) -> Plan:
    text = problem[:1024]
    conditions = (*summary(Health.STALLED, "Failed", text), Condition("Verified", False, "Failed", text))
    event = Event("Warning", "Failed", text)
    return settle(view, {"phase": "Failed", "message": text}, conditions, Plan(events=(event,)))


def _wait(view: CheckpointView, phase: str, reason: str, message: str, plan: Plan | None = None) -> Plan:
    return settle(view, {"phase": phase, "message": message}, summary(Health.PROGRESSING, reason, message), plan)


def _until_answered(view: CheckpointView, answer: TaskAnswer, phase: str, reason: str, message: str) -> Plan:
    """Make the task, wait for it, say what its pod waits for, or give up."""
    if answer.problem:
        return _fail(view, answer.problem)
    if answer.waiting is None:
        create = (answer.pod,) if answer.pod is not None else ()
        return _wait(view, phase, reason, message, Plan(create=create, requeue_after_s=answer.retry_in_s))
    text = f"{message}: {answer.waiting.line}"[:1024]
    health = Health.STALLED if answer.waiting.stuck else Health.PROGRESSING
    return settle(view, {"phase": phase, "message": text}, summary(health, answer.waiting.reason, text))


def _origin(view: CheckpointView) -> Origin | None:
    source = view.checkpoint.spec.source
    if source.save is not None:
        return Origin(name=source.save.job_ref.name, uid=source.save.job_ref.uid, attempt=source.save.attempt)
    if view.job is None:
        return None
    attempt = view.job.status.attempt
    return Origin(name=view.job.metadata.name, uid=view.job.metadata.uid, attempt=attempt.number if attempt else None)


def _facts(raw: Any) -> dict[str, Any]:
    """Figures of a save, from an agent's report or a task's result. What they do not say is left out: it may be known already."""
    layout = raw.get("layout")
    found = {
        "tokens": _count(raw.get("tokens")),
        "loss": measured(raw.get("loss")),
        "validation_loss": measured(raw.get("validation_loss")),
        "learning_rate": measured(raw.get("learning_rate")),
        "elapsed_seconds": _count(raw.get("elapsed_s")),
        "bytes": _count(raw.get("bytes")),
        "files": _count(raw.get("files")),
        "pieces": _count(raw.get("pieces")),
        "layout": _layout(layout) if isinstance(layout, dict) else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _count(value: float | None) -> int | None:
    """Whole, and in the range of the status' field: an adopted manifest may say anything."""
    return int(value) if value is not None and 0 <= value < 2**63 else None


def _layout(raw: dict[str, Any]) -> Layout:
    known = {name: raw[name] for name in Layout.model_fields if type(raw.get(name)) is int and 0 <= raw[name] < 2**31}
    return Layout(**known)
