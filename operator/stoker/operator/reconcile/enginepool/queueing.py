"""The schedulers of replicas: which one takes a new replica, and what a replica waits for in its queue. Pure.

A replica keeps the scheduler that it was made for, as its pods name it.

Called by `replicas`, `bind` and `phase`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.operator.api.enginepool import EngineTemplate, Revision
from stoker.operator.api.gang_scheduling import PoolScheduling
from stoker.operator.domain.labels import POOL
from stoker.operator.domain.pods import PodState, pod_state, waiting_reason, waits_in_queue
from stoker.operator.domain.schedulers import Missing, Scheduler, choose, waits_for
from stoker.operator.reconcile.enginepool.replica import Replica
from stoker.operator.reconcile.enginepool.view import PoolView
from stoker.operator.render.engine import replica_name
from stoker.operator.render.replica_group import new_group_name, replica_group
from stoker.operator.render.scheduling import SchedulerGroup


@dataclass(frozen=True)
class Hold:
    """What keeps a replica from being made or started that is no failure of it."""

    reason: str
    line: str


def scheduler_for(view: PoolView, template: EngineTemplate) -> Scheduler | Missing:
    """The scheduler of the next replica of a template.

    Kubernetes' own PodGroup is used with `auto` alone: pods of pools that name no backend stay as they were.
    """
    wanted = template.scheduling or PoolScheduling()
    alone = template.pods_per_replica == 1 or wanted.backend == "stoker"
    return choose(
        wanted.backend,
        wanted.queue_name,
        view.settings.installed,
        kept_together=view.settings.places_gangs or alone,
        section=f"spec.pools[{view.pool.metadata.labels.get(POOL, view.pool.metadata.name)}].scheduling",
    )


def new_group(view: PoolView, revision: Revision, scheduler: Scheduler, index: int) -> SchedulerGroup | None:
    """The group of a replica that is made now; None where the operator is its scheduler."""
    if scheduler == "stoker":
        return None
    name = new_group_name(view.pool, replica_name(view.pool, revision, index), view.now)
    return replica_group(revision.template, scheduler, name)


def group_of(replica: Replica, template: EngineTemplate) -> SchedulerGroup | None:
    """The group of a replica that exists; None where the operator is its scheduler."""
    return replica_group(template, replica.scheduler, replica.groups[0]) if replica.groups else None


def hold_of(view: PoolView) -> Hold | None:
    """Why the first replica that is missing is not made, or the first one in a queue waits; None without one."""
    missing = next(_missing_schedulers(view), None)
    if missing is not None:
        return Hold("SchedulerMissing", missing.message)
    queued = next((found for found in view.serving if found.queued), None)
    return Hold("Queued", _queue_line(view, queued)) if queued is not None else None


def _missing_schedulers(view: PoolView) -> Iterator[Missing]:
    """What keeps replicas that a revision lacks from being made."""
    for revision in view.pool.spec.revisions:
        serving = sum(found.revision == revision.name for found in view.serving)
        if serving < view.wanted.get(revision.name, 0):
            scheduler = scheduler_for(view, revision.template)
            if isinstance(scheduler, Missing):
                yield scheduler


def _queue_line(view: PoolView, replica: Replica) -> str:
    """What the replica waits for, with what its scheduler says of its pods; nothing of those that a gate holds."""
    template = next((found.template for found in view.pool.spec.revisions if found.name == replica.revision), None)
    queue = template.scheduling.queue_name if template is not None and template.scheduling is not None else None
    open_ = [pod for pod in filter(waits_in_queue, replica.pods) if pod_state(pod) is not PodState.GATED]
    reasons = "; ".join(sorted({reason for pod in open_ if (reason := waiting_reason(pod))}))
    return f"replica {replica.name} {waits_for(replica.scheduler, queue)}" + (f": {reasons}" if reasons else "")
