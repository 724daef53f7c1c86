"""Failed steps: they tell ranks that are still in step from ranks that have parted. Pure; used by threads.

What one request does to a step it does on every rank: each computes the same from the same numbers. Ranks that failed
in the same step, after the same number of exchanges, can go on together. If one of them failed alone or elsewhere, the
others wait for it, or hold other tokens.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

PATIENCE_S = 10.0
"""From the first rank's failure in a step to the last one's."""


class StepFailure(NamedTuple):
    """How a rank failed in a step."""

    calls: int
    """Exchanges with the other ranks before it."""
    error: str
    noticed_s: float


class StepFailures:
    """Failures of a group of `size` ranks."""

    def __init__(self, size: int, patience_s: float = PATIENCE_S) -> None:
        self.size, self.patience_s = size, patience_s
        self._steps: dict[int, dict[int, StepFailure]] = {}
        """Step -> rank -> its failure, of steps in which not all ranks have failed alike."""
        self._lock = threading.Lock()

    def report(self, rank: int, step: int, failure: StepFailure) -> None:
        """Note that a rank failed in a step; steps are counted from the start."""
        with self._lock:
            self._steps.setdefault(step, {})[rank] = failure

    def settled(self, step: int) -> bool:
        """Whether all ranks have failed in this step in the same place. It is then forgotten."""
        with self._lock:
            failures = self._steps.get(step, {})
            if not self._alike(failures):
                return False
            del self._steps[step]
            return True

    def parted(self, now_s: float) -> str | None:
        """The rank that failed where others did not, and its error; None while all may still be in step."""
        with self._lock:
            for failures in self._steps.values():
                rank, failure = min(failures.items(), key=lambda item: item[1].noticed_s)
                if not self._alike(failures) and now_s - failure.noticed_s > self.patience_s:
                    return f"rank {rank}: {failure.error} (in a step in which other ranks did not fail there)"
        return None

    def _alike(self, failures: dict[int, StepFailure]) -> bool:
        return len(failures) == self.size and len({failure.calls for failure in failures.values()}) == 1
