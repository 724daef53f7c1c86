"""The typed result of one pass over an EnginePool, before it becomes a status.

Made by `reconcile` and its helpers; `status` turns it into the status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from stoker.operator.api.enginepool import EngineStatus, PoolPhase, ReplicaStart, RevisionReplicas
from stoker.operator.reconcile.outcome import Outcome


@dataclass(frozen=True)
class Failures:
    """Engines that ended by themselves since all replicas were last ready."""

    count: int = 0
    last: str | None = None
    """Pod, cause and detail of the newest one; kept after the count is back at zero."""
    retry_at: str | None = None
    """When the next pod may be made."""


@dataclass(frozen=True, kw_only=True)
class PoolOutcome(Outcome):
    """State of the pool in one word, its failures, and what to change."""

    phase: PoolPhase = "Pending"
    failures: Failures = Failures()


class PoolFields(TypedDict):
    """All fields of the status that only EnginePools have."""

    phase: PoolPhase
    replicas: int
    ready_replicas: int
    updated_replicas: int
    queued_replicas: int
    selector: str
    revisions: tuple[RevisionReplicas, ...]
    engines: tuple[EngineStatus, ...]
    failures: int
    last_failure: str | None
    retry_at: str | None
    last_start: ReplicaStart | None
    accepted_spec: dict[str, Any] | None
