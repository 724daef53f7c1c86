"""The gang of a TrainingJob's attempt as its scheduler is told about it, and the PodGroup that some need.

For Kueue each attempt is a group of its own, so that an eviction is followed by a new place in the queue. PodGroups are
used again by later attempts of the same size, because Kubernetes' own cannot change it.

Pure. Called by `trainer` and by the reconciler of TrainingJobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.domain.placement.job_gang import gang_of_rendering
from stoker.operator.domain.plan import Object
from stoker.operator.domain.schedulers import Installed, Scheduler
from stoker.operator.render.names import stem
from stoker.operator.render.pod import metadata_of
from stoker.operator.render.scheduling import SchedulerGroup, group_objects, levels_of


def attempt_group(job: TrainingJob, scheduler: Scheduler, attempt: int, rendered: Mapping[str, Any]) -> SchedulerGroup:
    """Return the group of an attempt.

    Args:
        rendered: `status.pinned.rendered`.
    """
    gang, wanted = gang_of_rendering(rendered), job.spec.scheduling
    part = f"a{attempt}" if scheduler == "kueue" else str(gang.size)
    return SchedulerGroup(
        scheduler=scheduler,
        name=f"{stem(job.metadata.name, job.metadata.uid)}-{part}",
        gang=gang,
        queue=wanted.queue_name,
        levels=levels_of(wanted.topology),
    )


def attempt_group_objects(
    job: TrainingJob, resource: Object, group: SchedulerGroup, rendered: Mapping[str, Any], installed: Installed
) -> tuple[Object, ...]:
    """Render the PodGroup of an attempt; none for schedulers that need none."""
    labels = {"job": job.metadata.name, "job-uid": job.metadata.uid}
    metadata = metadata_of(resource, group.name, "trainer", labels)
    return group_objects(group, metadata, (rendered.get("pod") or {}).get("spec") or {}, installed)
