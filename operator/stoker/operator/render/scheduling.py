"""The part of a gang's pods that is for its scheduler, and the group object that some schedulers need.

Kueue takes plain pods: a queue, a group and its size as labels and annotations; it holds them by its own gate, and each
attempt is a group of its own, so that an eviction is followed by a new place in the queue. Volcano and Kubernetes' own
gang scheduling take a PodGroup object that the pods name.

Pure. Called by `trainer` and by the reconciler of TrainingJobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.operator.api.topology import Topology
from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.job_gang import gang_of_rendering
from stoker.operator.domain.placement.pod_affinity import only_preferred
from stoker.operator.domain.plan import Object
from stoker.operator.domain.schedulers import Installed, Scheduler
from stoker.operator.render.names import stem
from stoker.operator.render.pod import metadata_of

KUEUE = "kueue.x-k8s.io"
VOLCANO_GROUP = "scheduling.volcano.sh/v1beta1"
VOLCANO_POD_GROUP = "scheduling.k8s.io/group-name"
"""Annotation by which a pod names Volcano's PodGroup."""


def levels_of(topology: Sequence[Topology]) -> tuple[Level, ...]:
    """The levels of a gang's or a replica's topology."""
    return tuple(Level(found.key, found.mode) for found in topology)


def for_scheduler(pod: Object, scheduler: Scheduler, job: TrainingJob, attempt: int, rank: int, gang: Gang) -> Object:
    """Return the pod as its scheduler expects it. `stoker`: unchanged."""
    if scheduler == "kueue":
        return _with_metadata(pod, _kueue_labels(job, attempt, rank), dict(_kueue_annotations(job, gang)))
    if scheduler == "volcano":
        named = _with_metadata(pod, {}, {VOLCANO_POD_GROUP: group_name(job, gang)})
        return {**named, "spec": {**named["spec"], "schedulerName": "volcano"}}
    if scheduler == "kubernetes":
        return {**pod, "spec": {**pod["spec"], "schedulingGroup": {"podGroupName": group_name(job, gang)}}}
    return pod


def group_objects(
    job: TrainingJob, resource: Object, scheduler: Scheduler, rendered: Mapping[str, Any], installed: Installed
) -> tuple[Object, ...]:
    """Render the PodGroup of a gang; none for schedulers that need none."""
    gang = gang_of_rendering(rendered)
    labels = {"job": job.metadata.name, "job-uid": job.metadata.uid}
    metadata = metadata_of(resource, group_name(job, gang), "trainer", labels)
    if scheduler == "volcano":
        spec = _volcano_spec(job, gang, rendered["pod"]["spec"])
        return ({"apiVersion": VOLCANO_GROUP, "kind": "PodGroup", "metadata": metadata, "spec": spec},)
    if scheduler == "kubernetes":
        policy = {"schedulingPolicy": {"gang": {"minCount": gang.size}}}
        return ({"apiVersion": installed.pod_groups, "kind": "PodGroup", "metadata": metadata, "spec": policy},)
    return ()


def group_name(job: TrainingJob, gang: Gang) -> str:
    """Name of the PodGroup. It has the gang's size, because Kubernetes' own cannot change it."""
    return f"{stem(job.metadata.name, job.metadata.uid)}-{gang.size}"


def topology_limits(job: TrainingJob, scheduler: Scheduler, rendered: Mapping[str, Any]) -> str:
    """What a gang that is not placed by the operator lacks of `scheduling.topology`; empty if it lacks nothing."""
    topology, gang = job.spec.scheduling.topology, gang_of_rendering(rendered)
    if scheduler == "kueue":
        told = {index for index, _ in _kueue_levels(job, gang)}
        untold = ", ".join(level.key for index, level in enumerate(topology) if index not in told)
        return f"kueue is not told these levels of scheduling.topology: {untold}" if untold else ""
    return affinity_limits(levels_of(topology), gang, rendered["pod"]["spec"], ordered=scheduler == "stoker")


def affinity_limits(levels: Sequence[Level], gang: Gang, spec: Mapping[str, Any], *, ordered: bool = True) -> str:
    """What levels lack that are kept by affinity between the pods of a gang; empty without levels.

    Args:
        spec: of the pods' template.
        ordered: False where the scheduler starts whole gangs.
    """
    if not levels:
        return ""
    effect = "some may start while others find no room" if ordered else "a gang may wait with room for it elsewhere"
    text = f"scheduling.topology is affinity between pods, kept one pod at a time: {effect}"
    weak = ", ".join(only_preferred(spec, levels, gang, ordered=ordered))
    return f"{text}; Required and yet only preferred: {weak}" if weak else text


def _kueue_labels(job: TrainingJob, attempt: int, rank: int) -> dict[str, str]:
    return {
        f"{KUEUE}/queue-name": job.spec.scheduling.queue_name or "",
        f"{KUEUE}/pod-group-name": f"{stem(job.metadata.name, job.metadata.uid)}-a{attempt}",
        f"{KUEUE}/pod-group-pod-index": str(rank),
    }


def _kueue_annotations(job: TrainingJob, gang: Gang) -> Iterator[tuple[str, str]]:
    """Size and topology of the group. A group that lost a pod is over: the next attempt is a new one."""
    yield f"{KUEUE}/pod-group-total-count", str(gang.size)
    yield f"{KUEUE}/retriable-in-group", "false"
    for _, level in _kueue_levels(job, gang):
        yield from level.items()


def _kueue_levels(job: TrainingJob, gang: Gang) -> Iterator[tuple[int, dict[str, str]]]:
    """The levels that Kueue can keep, with its annotations.

    It knows the whole group and equal slices of neighbouring pods: our third level, and the narrowest required one
    whose pods have consecutive numbers (a tensor group; a model replica where there is no pipeline).
    """
    levels = job.spec.scheduling.topology
    sizes = (gang.parts, gang.parts if gang.stages == 1 else 0)
    sliced = [index for index, size in enumerate(sizes) if size > 1 and index < len(levels)]
    required = [index for index in sliced if levels[index].mode == "Required"]
    for index in required[:1]:
        key, size = levels[index].key, str(sizes[index])
        yield index, {f"{KUEUE}/podset-slice-required-topology": key, f"{KUEUE}/podset-slice-size": size}
    if len(levels) > 2:
        yield 2, {f"{KUEUE}/podset-{levels[2].mode.lower()}-topology": levels[2].key}


def _volcano_spec(job: TrainingJob, gang: Gang, pod: Mapping[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"minMember": gang.size}
    if job.spec.scheduling.queue_name:
        spec["queue"] = job.spec.scheduling.queue_name
    if pod.get("priorityClassName"):
        spec["priorityClassName"] = pod["priorityClassName"]
    return spec


def _with_metadata(pod: Object, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Object:
    metadata = pod["metadata"]
    merged = {
        **metadata,
        "labels": {**metadata["labels"], **labels},
        "annotations": {**(metadata.get("annotations") or {}), **annotations},
    }
    return {**pod, "metadata": merged}
