"""What the retention of a job means for its saves. Pure.

Called by the reconcilers of Checkpoint and InferenceDeployment; `trainingjob.saves` marks the saves.
"""

from __future__ import annotations

from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.domain.labels import EXPIRED


def is_given_up(found: Checkpoint) -> bool:
    """Whether `checkpoint.maxToKeep` gave the save up, and nothing has pinned it since."""
    return EXPIRED in found.metadata.labels and not found.spec.pinned
