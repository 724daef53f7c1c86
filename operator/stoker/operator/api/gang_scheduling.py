"""The scheduler that a gang is given to, and its queue: of a job's attempt, of a replica of engines."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from stoker.operator.api.topology import Levels
from stoker.operator.api.value import QueueName, Seconds, Value, rule, rules

QUEUE_FITS_BACKEND = rule(
    "has(self.queueName) ? self.backend != 'stoker' : self.backend != 'kueue'",
    "queueName is needed with backend kueue, and unknown to stoker",
    shown="queueName is needed with backend kueue, and unknown to stoker, got backend {self.backend}",
    field=".queueName",
)


class GangScheduling(Value):
    """Choice of a scheduler for a gang."""

    model_config = ConfigDict(json_schema_extra=rules(QUEUE_FITS_BACKEND))

    backend: Literal["auto", "stoker", "kueue", "volcano"] = "stoker"
    """`auto`: Kueue, if queueName is set, or Volcano, if installed, else `stoker`."""
    queue_name: QueueName | None = None
    """Queue of Kueue or Volcano."""


class PoolScheduling(GangScheduling):
    """Placement of a replica's pods."""

    topology: Levels = ()
    """For its tensor groups, model replicas and all its pods; narrowest first."""
    gang_timeout_seconds: Seconds = 60
    """Time after which placed pods that are not all scheduled are placed anew."""
