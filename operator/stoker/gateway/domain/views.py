"""Answers of the REST API from resources. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.gateway.domain.sections import from_spec
from stoker.gateway.domain.serving import pool_states, revision_states, rollout_state
from stoker.gateway.domain.states import checkpoint_state, condition, job_state, phase_of
from stoker.gateway.models import Checkpoint, CheckpointMetadata, CheckpointRef, Deployment, Job, JobAnswer, Progress

Object = Mapping[str, Any]


def job_view(found: Object) -> Job:
    """A TrainingJob."""
    metadata, status, spec = found["metadata"], found.get("status") or {}, found.get("spec") or {}
    own: dict[str, Any] = {
        "job_id": metadata["uid"],
        "job_name": metadata["name"],
        "namespace": metadata["namespace"],
        "status": job_state(found),
        "phase": phase_of(found),
        "message": str(status.get("message") or ""),
        "created_at": metadata["creationTimestamp"],
        "updated_at": _updated_at(found),
        "started_at": status.get("startedAt"),
        "finished_at": status.get("finishedAt"),
        "metrics": _progress(status),
        "attempt": (status.get("attempt") or {}).get("number"),
        "world_size": status.get("worldSize"),
        "newest_verified_checkpoint": _saved(status.get("newestVerifiedCheckpoint")),
        "resource_version": metadata["resourceVersion"],
        "spec": spec,
    }
    return Job.model_validate({**own, **from_spec(spec, status.get("dataParallel"))})


def job_answer(found: Object) -> JobAnswer:
    """A TrainingJob after an action."""
    metadata = found["metadata"]
    return JobAnswer(
        job_id=metadata["uid"], job_name=metadata["name"], namespace=metadata["namespace"], status=job_state(found)
    )


def checkpoint_view(found: Object) -> Checkpoint:
    """A Checkpoint."""
    metadata, status, spec = found["metadata"], found.get("status") or {}, found.get("spec") or {}
    job = job_of(found)
    return Checkpoint(
        checkpoint_id=metadata["uid"],
        checkpoint_name=metadata["name"],
        namespace=metadata["namespace"],
        job_id=job.get("uid"),
        job_name=job.get("name"),
        step=status.get("step"),
        timestamp=status.get("savedAt") or metadata["creationTimestamp"],
        status=checkpoint_state(found),
        phase=phase_of(found),
        message=str(status.get("message") or ""),
        verified=condition(found, "Verified"),
        in_use=condition(found, "InUse"),
        in_use_by=[f"{one.get('kind')}/{one.get('name')}" for one in status.get("inUseBy") or ()],
        attempt=job.get("attempt"),
        pinned=bool(spec.get("pinned")),
        folder=status.get("folder"),
        digest=status.get("digest"),
        size_bytes=status.get("bytes"),
        files=status.get("files"),
        shards=status.get("pieces"),
        metadata=_checkpoint_metadata(status),
        resource_version=metadata["resourceVersion"],
    )


def job_of(checkpoint: Object) -> Mapping[str, Any]:
    """Name and uid of the job that a Checkpoint belongs to; empty for an import."""
    source = (checkpoint.get("spec") or {}).get("source") or {}
    named = source.get("jobRef") or (source.get("save") or {}).get("jobRef") or {}
    return {**named, **((checkpoint.get("status") or {}).get("job") or {})}


def deployment_view(found: Object) -> Deployment:
    """An InferenceDeployment."""
    metadata, status = found["metadata"], found.get("status") or {}
    return Deployment(
        deployment_id=metadata["uid"],
        deployment_name=metadata["name"],
        namespace=metadata["namespace"],
        phase=phase_of(found),
        message=str(status.get("message") or ""),
        ready=status.get("ready"),
        endpoint=status.get("endpoint"),
        checkpoint=_served(status.get("currentCheckpoint")),
        models=list(status.get("models") or ()),
        current_revision=status.get("currentRevision"),
        pools=pool_states(status),
        revisions=revision_states(status),
        rollout=rollout_state(status),
        created_at=metadata["creationTimestamp"],
        resource_version=metadata["resourceVersion"],
        spec=found.get("spec") or {},
    )


def _progress(status: Object) -> Progress:
    found = status.get("progress") or {}
    return Progress(
        step=found.get("step"),
        total_steps=found.get("totalSteps"),
        consumed_tokens=found.get("tokens"),
        loss=_measured(found.get("loss")),
        validation_loss=_measured(found.get("validationLoss")),
        learning_rate=_measured(found.get("learningRate")),
        gradient_norm=_measured(found.get("gradientNorm")),
        tokens_per_second=_measured(found.get("tokensPerSecond")),
        eta_seconds=found.get("etaSeconds"),
        restarts=status.get("restarts") or 0,
        lost_steps=status.get("lostSteps") or 0,
    )


def _checkpoint_metadata(status: Object) -> CheckpointMetadata:
    return CheckpointMetadata(
        loss=_measured(status.get("loss")),
        validation_loss=_measured(status.get("validationLoss")),
        learning_rate=_measured(status.get("learningRate")),
        global_step=status.get("step"),
        consumed_tokens=status.get("tokens"),
        elapsed_time_seconds=status.get("elapsedSeconds"),
    )


def _saved(found: Object | None) -> CheckpointRef | None:
    if not found or found.get("step") is None:
        return None
    name = found.get("name")
    return CheckpointRef(checkpoint_name=name, step=found["step"], verified=bool(found.get("verified")))


def _served(found: Object | None) -> CheckpointRef | None:
    """The checkpoint of a deployment: the operator serves none that is not verified, and notes no word of it."""
    return _saved({**found, "verified": True}) if found else None


def _measured(text: Any) -> float | None:
    """A measured number. JSON has no NaN: what is not finite is null."""
    if text is None:
        return None
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if abs(value) != float("inf") and value == value else None


def _updated_at(found: Object) -> str:
    """The newest time in the object: of a condition, of the progress, or of its creation."""
    status = found.get("status") or {}
    times = [str(one.get("lastTransitionTime") or "") for one in status.get("conditions") or ()]
    times += [str((status.get("progress") or {}).get("progressedAt") or ""), str(status.get("finishedAt") or "")]
    return max([str(found["metadata"]["creationTimestamp"]), *times])
