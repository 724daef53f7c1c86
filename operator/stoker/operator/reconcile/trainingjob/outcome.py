"""The typed result of one pass over a TrainingJob: which fields of the status a decision may change, by keyword."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from stoker.operator.api.pod_fields import PodCounts
from stoker.operator.api.trainingjob_status import (
    Attempt,
    ElasticSize,
    Failure,
    Goodput,
    PendingRequest,
    Pinned,
    Progress,
    Resumption,
    SavedStep,
    Startup,
    Straggler,
    TrainingPhase,
)
from stoker.operator.reconcile.outcome import Outcome


class JobChanges(TypedDict, total=False):
    """Fields of the status that a decision changes."""

    started_at: str | None
    finished_at: str | None
    attempt: Attempt | None
    attempts: tuple[Attempt, ...]
    restarts: int
    failures_without_progress: int
    lost_steps: int
    progress: Progress | None
    data_parallel: int | None
    world_size: int | None
    last_failure: Failure | None
    resumption: Resumption | None
    requests: tuple[PendingRequest, ...]
    pinned: Pinned | None
    elastic: ElasticSize | None


class JobFields(JobChanges, total=False):
    """All fields that are written: those of a decision, and those that follow from the view."""

    phase: TrainingPhase
    accepted_spec: dict[str, Any] | None
    best_step: int
    avoided_nodes: tuple[str, ...]
    goodput: Goodput | None
    stragglers: tuple[Straggler, ...]
    pods: PodCounts | None
    checkpoints: int
    latest_checkpoint: SavedStep | None
    newest_verified_checkpoint: SavedStep | None
    best_verified_checkpoint: SavedStep | None


class AttemptChanges(TypedDict, total=False):
    """Fields of an attempt that change during its life."""

    phase: str | None
    placed_at: str | None
    ended_at: str | None
    end: str | None
    last_step: int | None
    announced_step: int | None
    failure: Failure | None
    startup: Startup | None


@dataclass(frozen=True, kw_only=True)
class JobOutcome(Outcome):
    """The decision of one pass over a TrainingJob."""

    phase: TrainingPhase | None = None
    """None: stays as it is."""
    changes: JobChanges = field(default_factory=lambda: JobChanges())


def changed_attempt(attempt: Attempt, **changes: Unpack[AttemptChanges]) -> Attempt:
    """The attempt with some fields changed."""
    return attempt.model_copy(update={**changes})


class FailureChanges(TypedDict, total=False):
    """Fields of a failure that change after it was recorded."""

    action: str | None


def changed_failure(failure: Failure, **changes: Unpack[FailureChanges]) -> Failure:
    """The failure with some fields changed."""
    return failure.model_copy(update={**changes})
