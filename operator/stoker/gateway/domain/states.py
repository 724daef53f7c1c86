"""States of jobs and checkpoints in the REST API, from the phases of the resources."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class JobState(StrEnum):
    """State of a training job. `phase` of the resource says more."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    CHECKPOINTING = "CHECKPOINTING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class CheckpointState(StrEnum):
    """State of a checkpoint."""

    SAVING = "SAVING"
    COMPLETE = "COMPLETE"
    CORRUPT = "CORRUPT"
    DELETED = "DELETED"
    FAILED = "FAILED"


JOB_STATES: Mapping[str, JobState] = {
    "Pending": JobState.PENDING,
    "Starting": JobState.PENDING,
    "Running": JobState.RUNNING,
    "Checkpointing": JobState.CHECKPOINTING,
    "Restarting": JobState.PENDING,
    "Suspending": JobState.CHECKPOINTING,
    "Suspended": JobState.SUSPENDED,
    "Cancelling": JobState.CHECKPOINTING,
    "Completed": JobState.COMPLETED,
    "Failed": JobState.FAILED,
    "Cancelled": JobState.CANCELLED,
}
CHECKPOINT_STATES: Mapping[str, CheckpointState] = {
    "Pending": CheckpointState.SAVING,
    "Saving": CheckpointState.SAVING,
    "Complete": CheckpointState.COMPLETE,
    "Corrupt": CheckpointState.CORRUPT,
    "Deleting": CheckpointState.DELETED,
    "Deleted": CheckpointState.DELETED,
    "Failed": CheckpointState.FAILED,
}
ENDED = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
ACTIVE_PHASES = frozenset({"Starting", "Running", "Checkpointing", "Restarting", "Suspending", "Cancelling"})
"""Phases in which a job has pods, or gets new ones."""


def phase_of(found: Mapping[str, Any]) -> str:
    return str((found.get("status") or {}).get("phase") or "Pending")


def job_state(job: Mapping[str, Any]) -> JobState:
    """The state of a TrainingJob; a phase of a newer operator counts as PENDING."""
    return JOB_STATES.get(phase_of(job), JobState.PENDING)


def gets_no_more_pods(job: Mapping[str, Any]) -> bool:
    """Whether a job goes no further by itself."""
    return goes_no_further(job_state(job), job.get("spec") or {})


def goes_no_further(state: JobState, spec: Mapping[str, Any]) -> bool:
    """Whether a job has ended, or is suspended; not one that was resumed or cancelled just now."""
    run = spec.get("run") or {}
    stays = bool(run.get("suspend")) and not run.get("cancel")
    return state in ENDED or (state is JobState.SUSPENDED and stays)


def checkpoint_state(checkpoint: Mapping[str, Any]) -> CheckpointState:
    return CHECKPOINT_STATES.get(phase_of(checkpoint), CheckpointState.SAVING)


def condition(found: Mapping[str, Any], name: str) -> bool:
    """Whether a condition of the resource is True."""
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == name and one.get("status") == "True" for one in conditions)
