"""The typed result of one pass over an InferenceDeployment, before it becomes a status.

Made by `reconcile`; `status` turns it into the status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from stoker.operator.api.inferencedeployment import (
    CurrentCheckpoint,
    DeploymentPhase,
    OtherModelStatus,
    PoolSummary,
    RevisionStatus,
    RolloutStatus,
    RouterStatus,
)
from stoker.operator.reconcile.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class DeploymentOutcome(Outcome):
    """State of the deployment in one word, its revisions and routers, and what to change."""

    phase: DeploymentPhase = "Pending"
    revisions: tuple[RevisionStatus, ...] = ()
    current_revision: str | None = None
    rollout: RolloutStatus | None = None
    router: RouterStatus | None = None


class DeploymentFields(TypedDict):
    """All fields of the status that only InferenceDeployments have."""

    phase: DeploymentPhase
    endpoint: str
    models: tuple[str, ...]
    other_models: tuple[OtherModelStatus, ...]
    current_checkpoint: CurrentCheckpoint | None
    model_digest: str | None
    current_revision: str | None
    revisions: tuple[RevisionStatus, ...]
    rollout: RolloutStatus | None
    pools: tuple[PoolSummary, ...]
    router: RouterStatus | None
    ready: str
    accepted_spec: dict[str, Any] | None
