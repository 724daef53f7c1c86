"""The time that replicas of a revision wait in the queue of their scheduler. It counts against no deadline. Pure.

Called by `rollout` and `canary`.
"""

from __future__ import annotations

import math
from datetime import datetime

from stoker.operator.domain.labels import SCHEDULER
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import created_at, label, scheduled_at, waits_in_queue
from stoker.operator.reconcile.enginepool.replica import revision_of
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView


def queued_s(view: DeploymentView, revision: str | None, begin: datetime) -> float:
    """The longest wait since `begin` among the replicas of a revision that exist; infinite while one waits.

    One that failed and was made anew counts with its own wait alone, so that failures do not hold a deadline up.
    """
    given = [pod for pod in view.engines if revision_of(pod) == revision and label(pod, SCHEDULER)]
    if any(map(waits_in_queue, given)):
        return math.inf
    return max((_wait_s(pod, begin) for pod in given), default=0.0)


def _wait_s(pod: Object, begin: datetime) -> float:
    created, scheduled = created_at(pod), scheduled_at(pod)
    if created is None or scheduled is None:
        return 0.0
    return max((scheduled - max(created, begin)).total_seconds(), 0.0)
