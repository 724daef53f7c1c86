"""The object that a storage needs and that does not exist: its claim, or the Secret of its bucket. Pure.

Called by the reconcilers of TrainingJob, Checkpoint and InferenceDeployment.
"""

from __future__ import annotations

from typing import NamedTuple

from stoker.operator.api.storage import StorageSpec
from stoker.operator.domain.plan import Observed
from stoker.operator.domain.settings import Settings


class Missing(NamedTuple):
    """Why pods that use the storage cannot start."""

    reason: str
    message: str


def missing_of(storage: StorageSpec, field: str, seen: Observed, settings: Settings) -> Missing | None:
    """Find what is missing; `field` is the storage's path in the manifest, for the message."""
    if storage.claim_name is not None:
        if storage.claim_name in _names(seen, "PersistentVolumeClaim"):
            return None
        text = f"PersistentVolumeClaim {storage.claim_name} does not exist ({field}.claimName)"
        return Missing("ClaimMissing", text)
    reference = storage.s3.credentials_secret_ref if storage.s3 else None
    if reference is None or not settings.sees_secrets or reference.name in _names(seen, "Secret"):
        return None
    return Missing("SecretMissing", f"Secret {reference.name} does not exist ({field}.s3.credentialsSecretRef)")


def _names(seen: Observed, kind: str) -> set[str]:
    return {found["metadata"]["name"] for found in seen.of_kind(kind)}
