"""The typed result of one pass over a Checkpoint: which fields of the status a decision may change, by keyword."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypedDict

from stoker.operator.api.checkpoint import CheckpointPhase, Layout, Origin, User
from stoker.operator.api.storage import StorageSpec
from stoker.operator.reconcile.outcome import Outcome


class CheckpointChanges(TypedDict, total=False):
    """Fields of the status that a decision changes."""

    tokens: int | None
    loss: str | None
    validation_loss: str | None
    learning_rate: str | None
    elapsed_seconds: int | None
    bytes: int | None
    files: int | None
    pieces: int | None
    layout: Layout | None
    job: Origin | None
    request_id: str | None
    requested_at: str | None
    storage: StorageSpec | None
    folder: str | None
    step: int | None
    digest: str | None
    writer: str | None
    reason: str | None
    saved_at: str | None
    verified_at: str | None
    verified_by: str | None
    problems: tuple[str, ...]
    deleted_at: str | None


class CheckpointFields(CheckpointChanges, total=False):
    """All fields that are written: those of a decision, and those that follow from the view."""

    phase: CheckpointPhase
    accepted_spec: dict[str, Any] | None
    in_use_by: tuple[User, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointOutcome(Outcome):
    """The decision of one pass over a Checkpoint."""

    phase: CheckpointPhase | None = None
    """None: stays as it is."""
    changes: CheckpointChanges = field(default_factory=lambda: CheckpointChanges())
