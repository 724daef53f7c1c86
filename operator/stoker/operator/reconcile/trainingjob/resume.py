"""The start of an attempt: the weights that `modelFrom` names, and the job's newest verified checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.metadata import read
from stoker.operator.api.pod_fields import Volume
from stoker.operator.api.trainingjob_status import Attempt, SavedStep
from stoker.operator.reconcile.missing_storage import missing_of
from stoker.operator.reconcile.trainingjob.view import TrainingView, saved_step
from stoker.operator.render.pod import CHECKPOINT_FOLDER
from stoker.operator.render.storage import storage_root
from stoker.operator.render.trainer import Resume, StartCheckpoint, start_folder


@dataclass(frozen=True)
class Blocked:
    """The reason why an attempt cannot start, and whether only a person can help."""

    reason: str
    message: str
    stalled: bool = False


@dataclass(frozen=True)
class Choice:
    """The save to resume; both None for a start from scratch or from `modelFrom`'s weights."""

    saved: SavedStep | None
    resume: Resume | None


def resolve_start(view: TrainingView) -> StartCheckpoint | Blocked | None:
    """Find the objects that a start needs: claims, the volumes' sources, the Checkpoint of `modelFrom`.

    None where `modelFrom` names no Checkpoint.
    """
    absent = missing_of(view.storage, "spec.checkpoint.storage", view.seen, view.settings)
    if absent is not None:
        return Blocked(absent.reason, absent.message)
    missing = _missing_volume(view)
    if missing is not None:
        return missing
    source = view.job.spec.model_from
    token = source.hub.token_secret_ref if source and source.hub else None
    if token and view.settings.sees_secrets and token.name not in _names(view, "Secret"):
        return Blocked("SecretMissing", f"Secret {token.name} does not exist (spec.modelFrom.hub.tokenSecretRef)")
    return _resolve_checkpoint(view, source.checkpoint.name) if source and source.checkpoint else None


def _resolve_checkpoint(view: TrainingView, name: str) -> StartCheckpoint | Blocked:
    found = _checkpoint(view, name)
    if found is None:
        return Blocked("CheckpointMissing", f"Checkpoint {name} does not exist (spec.modelFrom.checkpoint)")
    status = found.status
    if status.phase in {"Corrupt", "Deleted", "Failed"}:
        text = f"Checkpoint {name} is {status.phase} (spec.modelFrom.checkpoint)"
        return Blocked(f"Checkpoint{status.phase}", text, stalled=True)
    if found.deleting and view.attempt is None:  # later its data waits for the job
        return Blocked(
            "CheckpointDeleting", f"Checkpoint {name} is being deleted (spec.modelFrom.checkpoint)", stalled=True
        )
    if not status.verified or status.storage is None or status.folder is None or status.digest is None:
        return Blocked("CheckpointNotVerified", f"Checkpoint {name} is not verified yet (spec.modelFrom.checkpoint)")
    return StartCheckpoint(
        storage=status.storage,
        folder=status.folder,
        step=status.step or 0,
        digest=status.digest,
        default_path=status.job.name if status.job else "",
    )


def choose_resume(view: TrainingView, start: StartCheckpoint | None, opened: Attempt | None = None) -> Choice | Blocked:
    """Pick the newest verified checkpoint of the job; newer saves that are still being verified are waited for.

    `opened` is an attempt whose choice is written already; it is repeated as it was.
    """
    if opened is not None:
        return _repeated(view, opened)
    verified = view.newest_verified
    step = verified.status.step or 0 if verified else -1
    pending = [found for found in view.checkpoints if _undecided(view, found) and _step_of(found) > step]
    if pending:
        newest = max(_step_of(found) for found in pending)
        return Blocked("VerifyingCheckpoint", f"the save of step {newest} is being verified")
    if verified is not None:
        return Choice(saved_step(verified), _own(view, saved_step(verified)))
    source = view.job.spec.model_from
    if start is not None and source is not None and source.checkpoint is not None and source.checkpoint.state == "All":
        folder = start_folder(view.job.spec, start)
        saved = SavedStep(
            name=source.checkpoint.name, folder=start.folder, step=start.step, digest=start.digest, verified=True
        )
        return Choice(saved, Resume(folder, start.step, start.digest))
    return Choice(None, None)


def _repeated(view: TrainingView, opened: Attempt) -> Choice | Blocked:
    saved = opened.resumed_from
    if saved is None:
        return Choice(None, None)
    source = view.job.spec.model_from
    if source is None or source.checkpoint is None or saved.name != source.checkpoint.name:
        return Choice(saved, _own(view, saved))
    start = resolve_start(view)
    if not isinstance(start, StartCheckpoint):
        return start or Choice(None, None)
    return Choice(saved, Resume(start_folder(view.job.spec, start), saved.step, saved.digest))


def _own(view: TrainingView, saved: SavedStep) -> Resume:
    root = storage_root(view.storage, view.job.metadata.name, CHECKPOINT_FOLDER)
    return Resume(f"{root}/{saved.folder}", saved.step, saved.digest)


def _undecided(view: TrainingView, found: Checkpoint) -> bool:
    """Whether a save of this job is committed, but neither verified nor given up.

    A request that no attempt has answered is not waited for.
    """
    if found.status.verified or found.status.phase in {"Corrupt", "Failed", "Deleted", "Deleting"} or found.deleting:
        return False
    rejected = view.job.status.resumption.rejected if view.job.status.resumption else ()
    folder = found.spec.source.save.folder if found.spec.source.save else found.status.folder
    return folder is not None and folder not in rejected


def _step_of(found: Checkpoint) -> int:
    return found.spec.source.save.step if found.spec.source.save else found.status.step or 0


def _missing_volume(view: TrainingView) -> Blocked | None:
    """The first volume that cannot be mounted; pods would wait for it, and clusters do not report for what."""
    for index, volume in enumerate(view.job.spec.workers.volumes):
        for kind, name in _required(volume):
            if kind == "Secret" and not view.settings.sees_secrets:
                continue
            if name not in _names(view, kind):
                return Blocked("VolumeMissing", f"{kind} {name} does not exist (spec.workers.volumes[{index}])")
    return None


def _required(volume: Volume) -> Iterator[tuple[str, str]]:
    if volume.config_map is not None and not volume.config_map.optional:
        yield "ConfigMap", volume.config_map.name
    if volume.secret is not None and not volume.secret.optional:
        yield "Secret", volume.secret.secret_name
    if volume.persistent_volume_claim is not None:
        yield "PersistentVolumeClaim", volume.persistent_volume_claim.claim_name


def _names(view: TrainingView, kind: str) -> set[str]:
    return {found["metadata"]["name"] for found in view.seen.of_kind(kind)}


def _checkpoint(view: TrainingView, name: str) -> Checkpoint | None:
    found = next((item for item in view.seen.of_kind("Checkpoint") if item["metadata"]["name"] == name), None)
    return read(Checkpoint, found) if found else None
