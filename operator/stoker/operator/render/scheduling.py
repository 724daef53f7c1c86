"""The part of a gang's pods that is for its scheduler, and the group object that some schedulers need.

Kueue takes plain pods: a queue, a group and its size as labels and annotations; it holds them by its own gate. Volcano
and Kubernetes' own gang scheduling take a PodGroup object that the pods name.

Pure. Called by the renderings of trainers and engines, and by their reconcilers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.operator.api.topology import Topology
from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.pod_affinity import kept_together, only_preferred
from stoker.operator.domain.plan import Object
from stoker.operator.domain.schedulers import Installed, Scheduler

KUEUE = "kueue.x-k8s.io"
VOLCANO_GROUP = "scheduling.volcano.sh/v1beta1"
VOLCANO_POD_GROUP = "scheduling.k8s.io/group-name"
"""Annotation by which a pod names Volcano's PodGroup."""


@dataclass(frozen=True, kw_only=True)
class SchedulerGroup:
    """A gang as its scheduler is told about it."""

    scheduler: Scheduler
    name: str
    """Of the group. For Kueue each one is used once: a group that lost a pod is over."""
    gang: Gang
    queue: str | None = None
    levels: tuple[Level, ...] = ()


def levels_of(topology: Sequence[Topology]) -> tuple[Level, ...]:
    """The levels of a gang's or a replica's topology."""
    return tuple(Level(found.key, found.mode) for found in topology)


def for_scheduler(pod: Object, group: SchedulerGroup, rank: int, own: Mapping[str, str]) -> Object:
    """Return the pod as its scheduler expects it.

    Args:
        rank: of the pod in the gang.
        own: labels that all pods of the gang have, and no others, for schedulers that keep it together by affinity.
    """
    if group.scheduler == "kueue":
        return _with_metadata(pod, _kueue_labels(group, rank), dict(_kueue_annotations(group)))
    ordered = group.scheduler == "stoker"
    pod = kept_together(pod, group.levels, group.gang, rank, own, ordered=ordered)
    if group.scheduler == "volcano":
        named = _with_metadata(pod, {}, {VOLCANO_POD_GROUP: group.name})
        return {**named, "spec": {**named["spec"], "schedulerName": "volcano"}}
    if group.scheduler == "kubernetes":
        return {**pod, "spec": {**pod["spec"], "schedulingGroup": {"podGroupName": group.name}}}
    return pod


def group_objects(
    group: SchedulerGroup, metadata: Mapping[str, Any], spec: Mapping[str, Any], installed: Installed
) -> tuple[Object, ...]:
    """Render the PodGroup of a gang; none for schedulers that need none.

    Args:
        spec: of the gang's pods.
    """
    if group.scheduler == "volcano":
        body = {"apiVersion": VOLCANO_GROUP, "kind": "PodGroup", "metadata": metadata}
        return ({**body, "spec": _volcano_spec(group, spec)},)
    if group.scheduler == "kubernetes":
        policy = {"schedulingPolicy": {"gang": {"minCount": group.gang.size}}}
        return ({"apiVersion": installed.pod_groups, "kind": "PodGroup", "metadata": metadata, "spec": policy},)
    return ()


def topology_limits(group: SchedulerGroup, spec: Mapping[str, Any]) -> str:
    """What a gang that is not placed by the operator lacks of `scheduling.topology`; empty if it lacks nothing.

    Args:
        spec: of the pods' template.
    """
    if group.scheduler == "kueue":
        told = {index for index, _ in _kueue_levels(group)}
        untold = ", ".join(level.key for index, level in enumerate(group.levels) if index not in told)
        return f"kueue is not told these levels of scheduling.topology: {untold}" if untold else ""
    return _affinity_limits(group.levels, group.gang, spec, ordered=group.scheduler == "stoker")


def _affinity_limits(levels: Sequence[Level], gang: Gang, spec: Mapping[str, Any], *, ordered: bool) -> str:
    """What levels lack that are kept by affinity between the pods of a gang; empty without levels.

    Args:
        ordered: False where the scheduler starts whole gangs.
    """
    if not levels:
        return ""
    effect = "some may start while others find no room" if ordered else "a gang may wait with room for it elsewhere"
    text = f"scheduling.topology is affinity between pods, kept one pod at a time: {effect}"
    weak = ", ".join(only_preferred(spec, levels, gang, ordered=ordered))
    return f"{text}; Required and yet only preferred: {weak}" if weak else text


def _kueue_labels(group: SchedulerGroup, rank: int) -> dict[str, str]:
    return {
        f"{KUEUE}/queue-name": group.queue or "",
        f"{KUEUE}/pod-group-name": group.name,
        f"{KUEUE}/pod-group-pod-index": str(rank),
    }


def _kueue_annotations(group: SchedulerGroup) -> Iterator[tuple[str, str]]:
    """Size and topology of the group. A group that lost a pod is over: the pods after it are a new one."""
    yield f"{KUEUE}/pod-group-total-count", str(group.gang.size)
    yield f"{KUEUE}/retriable-in-group", "false"
    for _, level in _kueue_levels(group):
        yield from level.items()


def _kueue_levels(group: SchedulerGroup) -> Iterator[tuple[int, dict[str, str]]]:
    """The levels that Kueue can keep, with its annotations.

    It knows the whole group and equal slices of neighbouring pods: our third level, and the narrowest required one
    whose pods have consecutive numbers (a tensor group; a model replica where there is no pipeline).
    """
    levels, gang = group.levels, group.gang
    sizes = (gang.parts, gang.parts if gang.stages == 1 else 0)
    sliced = [index for index, size in enumerate(sizes) if size > 1 and index < len(levels)]
    required = [index for index in sliced if levels[index].mode == "Required"]
    for index in required[:1]:
        key, size = levels[index].key, str(sizes[index])
        yield index, {f"{KUEUE}/podset-slice-required-topology": key, f"{KUEUE}/podset-slice-size": size}
    if len(levels) > 2:
        yield 2, {f"{KUEUE}/podset-{levels[2].mode.lower()}-topology": levels[2].key}


def _volcano_spec(group: SchedulerGroup, pod: Mapping[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"minMember": group.gang.size}
    if group.queue:
        spec["queue"] = group.queue
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
