"""What an engine reports of its own requests for the counts of its revision, from one report to the next."""

from __future__ import annotations

from typing import NamedTuple

from stoker.pod.histogram import Histogram


class EngineCounts(NamedTuple):
    """What an engine's report adds to the one before it, of the requests of all routers."""

    queue_s: Histogram
    """Times in its queue, in seconds."""
    splits: int = 0
    """Requests whose prompt another engine was to compute."""
    failed_splits: int = 0
    """Those of them whose transfer failed."""

    def __bool__(self) -> bool:
        return bool(self.queue_s.counts or self.splits or self.failed_splits)
