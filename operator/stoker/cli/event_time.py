"""When an Event was seen. Pure.

Called by `describe` and by what follows warnings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TO_THE_SECOND = len("2026-01-01T12:00:00")


def time_of(event: Mapping[str, Any]) -> str:
    """Return when an event was seen last, as `2026-01-01T12:00:00`.

    Components that write `events.k8s.io`, as the scheduler does, leave `lastTimestamp` empty.
    """
    series = event.get("series") or {}
    created = (event.get("metadata") or {}).get("creationTimestamp")
    times = (event.get("lastTimestamp"), series.get("lastObservedTime"), event.get("eventTime"), created)
    return str(next(filter(None, times), ""))[:_TO_THE_SECOND]
