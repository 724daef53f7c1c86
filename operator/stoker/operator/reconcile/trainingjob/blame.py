"""Nodes that a job's attempts failed on again and again: the next gang is placed without them.

A node is blamed when an attempt ended by something that broken hardware does: a killed, hanging or failing rank, or
numbers that are not finite. Evictions and lost nodes blame none, for Kubernetes takes care of those.

Pure. Called by `bind`, `start` and `status`.
"""

from __future__ import annotations

from collections import Counter

from stoker.operator.api.trainingjob_status import Failure, TrainingJobStatus
from stoker.pod.causes import Action, Cause

BLAMED_TIMES = 2
"""Attempts of the job's history that have to end on a node before it is avoided."""
MAX_AVOIDED = 16
_SUSPICIOUS = frozenset({Cause.RANK_KILLED, Cause.HANG, Cause.RANK_FAILED, Cause.NON_FINITE})


def avoided_nodes(status: TrainingJobStatus) -> tuple[str, ...]:
    """Return the nodes that are blamed often enough, most often first; they stay avoided while the history shows it."""
    attempts = (*((status.attempt,) if status.attempt else ()), *status.attempts)
    ends = {attempt.number: attempt.failure for attempt in attempts}
    blamed = Counter(failure.node for failure in ends.values() if failure is not None and _blames(failure))
    often = sorted((-times, node) for node, times in blamed.items() if node and times >= BLAMED_TIMES)
    return tuple(node for _, node in often[:MAX_AVOIDED])


def _blames(failure: Failure) -> bool:
    return failure.cause in _SUSPICIOUS and failure.action == Action.RETRY
