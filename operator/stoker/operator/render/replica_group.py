"""The gang of a replica as its scheduler is told about it, and the PodGroup that some need.

Each replica that is made is a group of its own, so that the one after an eviction gets a new place in the queue. Its
PodGroup belongs to its leader and goes with it.

Pure. Called by the reconciler of EnginePools.
"""

from __future__ import annotations

from datetime import datetime

from stoker.operator.api.enginepool import EnginePool, EngineTemplate
from stoker.operator.domain.placement.replica_gang import gang_of_replica
from stoker.operator.domain.plan import Object
from stoker.operator.domain.schedulers import Installed, Scheduler
from stoker.operator.render.engine import pool_labels, topology_of
from stoker.operator.render.names import LONGEST_STEM, short_hash
from stoker.operator.render.pod import metadata_of
from stoker.operator.render.scheduling import SchedulerGroup, group_objects


def replica_group(template: EngineTemplate, scheduler: Scheduler, name: str) -> SchedulerGroup:
    """Return the group of a replica."""
    return SchedulerGroup(
        scheduler=scheduler,
        name=name,
        gang=gang_of_replica(template.pod, template.pods_per_replica, template.config),
        queue=template.scheduling.queue_name if template.scheduling is not None else None,
        levels=topology_of(template),
    )


def new_group_name(pool: EnginePool, replica: str, now: datetime) -> str:
    """Return the name of the group of a replica that is made now. Those of earlier replicas of its name are others."""
    made = short_hash(f"{pool.metadata.uid} {replica} {now.isoformat()}", 10)
    return f"{replica[:LONGEST_STEM].rstrip('-')}-{made}"


def replica_group_objects(
    pool: EnginePool, leader: Object, group: SchedulerGroup, template: EngineTemplate, installed: Installed
) -> tuple[Object, ...]:
    """Render the PodGroup of a replica; none for schedulers that need none."""
    owner = {"apiVersion": "v1", "kind": "Pod", "metadata": leader["metadata"]}
    metadata = metadata_of(owner, group.name, "engine", pool_labels(pool))
    metadata["ownerReferences"] = [{**found, "blockOwnerDeletion": False} for found in metadata["ownerReferences"]]
    return group_objects(group, metadata, template.pod.get("spec") or {}, installed)
