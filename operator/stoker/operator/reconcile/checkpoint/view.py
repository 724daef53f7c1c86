"""The observation of a Checkpoint, sorted once: its job, the pods that report it, its tasks, its users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stoker.operator.api.checkpoint import Checkpoint, User
from stoker.operator.api.metadata import read
from stoker.operator.api.storage import StorageSpec
from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.api.value import measured
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.labels import ATTEMPT, JOB_UID, NODE_RANK, ROLE, PodRole
from stoker.operator.domain.plan import Object, Observed
from stoker.operator.domain.pods import PodState, ended, exit_of, is_owned, label, pod_state
from stoker.operator.domain.settings import Settings
from stoker.operator.domain.start_validation import start_validation
from stoker.operator.reconcile.intent import Intent, read_in_force
from stoker.operator.render.storage import settled


@dataclass(frozen=True)
class ReportedSave:
    """One save as one pod of the job reports it: in `/status` while it runs, in its termination message afterwards."""

    id: str
    folder: str
    step: int
    digest: str
    verified: bool | None
    metrics: Mapping[str, Any]
    """Numbers of the report: tokens, loss, bytes, layout, ..."""


@dataclass(frozen=True)
class CheckpointView:
    """Read-only; every decision of the reconcile is a function of it."""

    checkpoint: Checkpoint
    """With the spec in force, which is not the present one while an edit is refused."""
    intent: Intent
    seen: Observed
    settings: Settings
    now: datetime
    job: TrainingJob | None
    leader: Object | None
    """Pod 0 of the job's current attempt."""
    saves: tuple[ReportedSave, ...]
    requests: Mapping[str, Any]
    """The leader's answers to save requests, by id."""
    late_loss: str | None
    """Validation loss of these weights that a later attempt of the job found before its first step."""
    leader_reports: bool
    """Whether the leader's agent has answered at least once, so that it can take a request."""
    tasks: tuple[Object, ...]
    users: tuple[User, ...]
    siblings: tuple[Object, ...]
    """Other Checkpoints of the namespace, while this one waits for its verification or is being deleted."""

    @property
    def time(self) -> str:
        return timestamp(self.now)

    @property
    def storage(self) -> StorageSpec | None:
        source = self.checkpoint.spec.source
        if source.save is not None:
            return source.save.storage
        if source.import_ is not None:
            return source.import_.storage
        if self.checkpoint.status.storage is not None:
            return self.checkpoint.status.storage
        if self.job is None:
            return None
        return settled(self.job.spec.checkpoint.storage, self.job.metadata.name)

    @property
    def leader_running(self) -> bool:
        return self.leader is not None and pod_state(self.leader) is PodState.RUNNING

    @property
    def is_reported_no_more(self) -> bool:
        """Whether the leader reports newer saves alone: this one was made long ago, while the operator was away."""
        source, status = self.checkpoint.spec.source, self.checkpoint.status
        step = source.save.step if source.save else status.step
        steps = [save.step for save in self.saves if save.folder.endswith(f".{status.writer}")]
        return self.leader_reports and step is not None and min(steps, default=step) > step

    @property
    def twins(self) -> tuple[str, ...]:
        """Names of other Checkpoints with the same data: an import, or a second request that the same save answered."""
        mine = _place(self.checkpoint)
        others = [read(Checkpoint, found) for found in self.siblings] if mine is not None else []
        return tuple(found.metadata.name for found in others if _place(found) == mine and not found.deleting)

    def save_report(self, folder: str, digest: str | None) -> ReportedSave | None:
        """The report of a save; one with the result of a read-back comes first."""
        about = [save for save in self.saves if save.folder == folder and digest in (None, save.digest)]
        return max(about, key=lambda save: save.verified is not None, default=None)


def checkpoint_view(seen: Observed, settings: Settings, now: datetime) -> CheckpointView:
    """The observation, sorted."""
    checkpoint, intent = read_in_force(Checkpoint, seen.resource)
    job = _job(seen, checkpoint)
    pods = [pod for pod in seen.of_kind("Pod") if job is not None and is_owned(pod, job.metadata.uid)]
    trainers = [pod for pod in pods if label(pod, ROLE) == PodRole.TRAINER]
    number = str(job.status.attempt.number) if job is not None and job.status.attempt else ""
    leader = next((p for p in trainers if label(p, ATTEMPT) == number and label(p, NODE_RANK) == "0"), None)
    report = seen.reports.get(leader["metadata"]["uid"]) if leader is not None else None
    return CheckpointView(
        checkpoint=checkpoint,
        intent=intent,
        seen=seen,
        settings=settings,
        now=now,
        job=job,
        leader=leader,
        saves=tuple(_saves(trainers, seen)),
        requests=dict((report or {}).get("requests") or {}),
        late_loss=_late_loss(checkpoint, job, trainers, seen) if job is not None else None,
        leader_reports=report is not None,
        tasks=tuple(pod for pod in seen.of_kind("Pod") if is_owned(pod, checkpoint.metadata.uid)),
        users=tuple(sorted(_users(seen, checkpoint), key=lambda user: (user.kind, user.name))),
        siblings=seen.of_kind("Checkpoint"),
    )


def _job(seen: Observed, checkpoint: Checkpoint) -> TrainingJob | None:
    """The job that wrote the save or is asked for it, by uid where that is known."""
    source = checkpoint.spec.source
    wanted = source.save.job_ref if source.save else source.job_ref
    if wanted is None:
        return None
    uid = wanted.uid or checkpoint.metadata.labels.get(JOB_UID)
    for found in seen.of_kind("TrainingJob"):
        if found["metadata"]["name"] == wanted.name and uid in (None, found["metadata"]["uid"]):
            return read_in_force(TrainingJob, found)[0]
    return None


def _saves(trainers: list[Object], seen: Observed) -> Iterator[ReportedSave]:
    for pod in trainers:
        report = seen.reports.get(pod["metadata"]["uid"])
        for raw in (report or {}).get("saves") or ():
            if raw.get("state") == "Committed" and raw.get("digest"):
                verified = raw.get("verified")
                known = verified if isinstance(verified, bool) else None
                yield ReportedSave(
                    str(raw.get("id")), str(raw["folder"]), int(raw["step"]), str(raw["digest"]), known, raw
                )
        message = exit_of(pod).message if ended(pod) else None
        for save in message.saves if message else ():
            yield ReportedSave(save.id, save.folder, save.step, save.digest, save.verified, save.metrics)


def _late_loss(checkpoint: Checkpoint, job: TrainingJob, trainers: list[Object], seen: Observed) -> str | None:
    attempts = (*((job.status.attempt,) if job.status.attempt else ()), *job.status.attempts)
    resumed = {str(found.number): found.resumed_from.folder for found in attempts if found.resumed_from}
    for pod in trainers:
        found = start_validation(pod, seen.reports.get(pod["metadata"]["uid"]))
        same = resumed.get(label(pod, ATTEMPT)) == checkpoint.status.folder
        if found is not None and same and found.step == checkpoint.status.step:
            return measured(found.loss)
    return None


def _place(checkpoint: Checkpoint) -> tuple[str, str, str] | None:
    """Claim or bucket, path and folder of the data; None while they are not known."""
    source, status = checkpoint.spec.source, checkpoint.status
    known = source.save or source.import_
    storage, folder = (known.storage, known.folder) if known else (status.storage, status.folder)
    if storage is None or folder is None:
        return None
    if storage.s3 is not None:
        endpoint = (storage.s3.endpoint or "").rstrip("/")
        return f"{endpoint} {storage.s3.bucket}", storage.s3.prefix or "", folder
    return storage.claim_name or "", storage.path or "", folder


def _users(seen: Observed, checkpoint: Checkpoint) -> Iterator[User]:
    name = checkpoint.metadata.name
    for found in seen.of_kind("TrainingJob"):
        if _job_uses(found, name):
            yield User(kind="TrainingJob", name=found["metadata"]["name"])
    for found in seen.of_kind("InferenceDeployment"):
        if _deployment_uses(found, name):
            yield User(kind="InferenceDeployment", name=found["metadata"]["name"])


def _job_uses(found: Object, name: str) -> bool:
    status = found.get("status") or {}
    if status.get("phase") in {"Completed", "Failed", "Cancelled"}:
        return False
    attempt = status.get("attempt") or {}
    resumed = (attempt.get("resumedFrom") or {}).get("name") if not attempt.get("endedAt") else None
    started_from = ((found["spec"].get("modelFrom") or {}).get("checkpoint") or {}).get("name")
    return name in {resumed, started_from}


def _deployment_uses(found: Object, name: str) -> bool:
    status = found.get("status") or {}
    specs = (found["spec"], status.get("acceptedSpec") or {})
    named = {((spec.get("model") or {}).get("checkpointRef") or {}).get("name") for spec in specs}
    named.add((status.get("currentCheckpoint") or {}).get("name"))
    serving = {status.get("currentRevision"), (status.get("rollout") or {}).get("toRevision")}
    for revision in status.get("revisions") or ():
        if revision.get("share") or revision.get("name") in serving:
            named.add((revision.get("checkpoint") or {}).get("name"))
    return name in named
