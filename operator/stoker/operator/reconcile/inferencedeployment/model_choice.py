"""The model that an InferenceDeployment serves: the Checkpoint or folder that `spec.model` resolves to now. Pure.

Called by `reconcile`.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.inferencedeployment import CheckpointSelector, CurrentCheckpoint
from stoker.operator.api.value import comparable
from stoker.operator.domain.labels import JOB, JOB_UID
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView
from stoker.operator.reconcile.retention import is_given_up
from stoker.operator.render.engine import ModelSource, checkpoint_source, uri_source


@dataclass(frozen=True)
class NoModel:
    """The reason why `spec.model` resolves to nothing."""

    reason: str
    message: str
    stalled: bool = False
    """Waiting does not help: the user must change the spec or the Checkpoint."""


@dataclass(frozen=True)
class ModelChoice:
    """The weights that a new revision would serve."""

    source: ModelSource
    checkpoint: CurrentCheckpoint | None


def choose_model(view: DeploymentView) -> ModelChoice | NoModel:
    """Resolve `spec.model`. Of Checkpoints only verified ones are served."""
    model = view.deployment.spec.model
    if model.uri is not None:
        reference = model.uri_secret_ref
        source = uri_source(model.uri, reference.name if reference else None)
        if reference and view.settings.sees_secrets and reference.name not in _names(view, "Secret"):
            return NoModel("SecretMissing", f"Secret {reference.name} does not exist (spec.model.uriSecretRef)")
        if source.claim is not None and source.claim not in _names(view, "PersistentVolumeClaim"):
            return NoModel("ClaimMissing", f"PersistentVolumeClaim {source.claim} does not exist (spec.model.uri)")
        return ModelChoice(source, None)
    if model.checkpoint_ref is not None:
        return _choose_by_name(view, model.checkpoint_ref.name)
    assert model.checkpoint_selector is not None, "admission asks for exactly one"
    return _choose_by_selector(view, model.checkpoint_selector)


def checkpoint_choice(view: DeploymentView, uid: str | None) -> ModelChoice | None:
    """The choice of the Checkpoint of an earlier revision, as long as it can be served."""
    found = next((item for item in view.checkpoints if item.metadata.uid == uid and _is_usable(item)), None)
    return _choice_of(found) if found is not None else None


def _choose_by_name(view: DeploymentView, name: str) -> ModelChoice | NoModel:
    found = next((item for item in view.checkpoints if item.metadata.name == name), None)
    if found is None:
        return NoModel("CheckpointMissing", f"Checkpoint {name} does not exist (spec.model.checkpointRef)")
    if found.status.phase in {"Corrupt", "Failed", "Deleted", "Deleting"}:
        text = f"Checkpoint {name} is {found.status.phase} (spec.model.checkpointRef)"
        return NoModel(f"Checkpoint{found.status.phase}", text, stalled=True)
    if found.deleting:
        text = f"Checkpoint {name} is being deleted (spec.model.checkpointRef)"
        return NoModel("CheckpointDeleting", text, stalled=True)
    if is_given_up(found):
        text = f"Checkpoint {name} is beyond checkpoint.maxToKeep of its job, and not pinned (spec.model.checkpointRef)"
        return NoModel("CheckpointExpired", text)
    if not _is_usable(found):
        return NoModel("CheckpointNotVerified", f"Checkpoint {name} is not verified yet (spec.model.checkpointRef)")
    return _choice_of(found)


def _choose_by_selector(view: DeploymentView, selector: CheckpointSelector) -> ModelChoice | NoModel:
    usable = [found for found in view.checkpoints if _is_usable(found) and _belongs_to_job(found, selector)]
    if not usable:
        text = f"no verified checkpoint of TrainingJob {selector.job_ref.name} yet (spec.model.checkpointSelector)"
        return NoModel("WaitingForCheckpoint", text)
    if selector.policy == "newest":
        return _choice_of(max(usable, key=_save_order))
    scored = [found for found in usable if _loss_of(found, selector) is not None]
    if not scored:
        text = (
            f"no verified checkpoint of TrainingJob {selector.job_ref.name} has a {selector.metric or 'validationLoss'}"
        )
        return NoModel("WaitingForCheckpoint", text)
    return _choice_of(min(scored, key=lambda found: (_loss_of(found, selector) or 0.0, -(found.status.step or 0))))


def _choice_of(found: Checkpoint) -> ModelChoice:
    status = found.status
    assert status.storage is not None
    assert status.folder is not None
    assert status.digest is not None
    source = checkpoint_source(status.storage, status.job.name if status.job else "", status.folder, status.digest)
    current = CurrentCheckpoint(
        name=found.metadata.name,
        uid=found.metadata.uid,
        folder=status.folder,
        step=status.step,
        digest=status.digest,
    )
    return ModelChoice(source, current)


def _is_usable(found: Checkpoint) -> bool:
    status = found.status
    gone = found.deleting or is_given_up(found) or status.phase != "Complete"
    return status.verified and not gone and None not in (status.storage, status.folder, status.digest)


def _belongs_to_job(found: Checkpoint, selector: CheckpointSelector) -> bool:
    labels = found.metadata.labels
    wanted = selector.job_ref
    return labels.get(JOB) == wanted.name and wanted.uid in (None, labels.get(JOB_UID))


def _save_order(found: Checkpoint) -> tuple[int, str, str]:
    return found.status.step or 0, found.status.saved_at or "", found.metadata.name


def _loss_of(found: Checkpoint, selector: CheckpointSelector) -> float | None:
    return comparable(found.status.loss if selector.metric == "loss" else found.status.validation_loss)


def _names(view: DeploymentView, kind: str) -> set[str]:
    return {found["metadata"]["name"] for found in view.seen.of_kind(kind)}
