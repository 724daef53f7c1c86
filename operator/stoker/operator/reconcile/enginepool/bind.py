"""The nodes of replicas: all pods of one get theirs at once, or the pool says what is missing.

As for the gangs of jobs: pods are made with a scheduling gate, get their nodes as a required affinity, and lose the
gate. A replica whose pods are not all scheduled in time gives its room back and is made anew. Replicas stand in no
queue of ours: they take room as it comes.

Pods that another scheduler starts get no nodes here. Those that name a PodGroup lose their gate once it is applied.

Pure. Called by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from stoker.operator.api.enginepool import EngineTemplate
from stoker.operator.api.gang_scheduling import PoolScheduling
from stoker.operator.domain.clock import rest_s
from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.labels import PLACED_AT
from stoker.operator.domain.placement.device_catalog import needs_of
from stoker.operator.domain.placement.node_capacity import NodeCapacity, PodUse, affinity_to, remaining
from stoker.operator.domain.placement.place import Placement, place
from stoker.operator.domain.placement.replica_gang import gang_of_replica
from stoker.operator.domain.placement.unplaceable import Unplaceable
from stoker.operator.domain.plan import Event, Object, Patch
from stoker.operator.domain.pods import PodState, is_gated, pod_state
from stoker.operator.domain.schedulers import Missing
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.enginepool.queueing import group_of, scheduler_for
from stoker.operator.reconcile.enginepool.replica import Replica
from stoker.operator.reconcile.enginepool.view import PoolView
from stoker.operator.reconcile.gates import contradicts, foreign_gates, opened
from stoker.operator.render.engine import topology_of
from stoker.operator.render.replica_group import replica_group, replica_group_objects
from stoker.operator.render.scheduling import topology_limits

GANG_TIMEOUT = "GangTimeout"
GROUP_SPLIT = "PodGroupSplit"
"""Reason of the event when pods of a replica have different groups, so that its scheduler would never start them."""
LIMITED = "PlacementLimited"
"""Condition while levels of `scheduling.topology` are asked for that are not kept, or not fully."""
RELAXED = "TopologyRelaxed"
"""Condition while preferred levels do not hold for every pod that was placed last."""


@dataclass(frozen=True)
class Binding:
    """What one pass decides about nodes."""

    patches: tuple[Patch, ...] = ()
    apply: tuple[Object, ...] = ()
    """PodGroups that have to exist before the patches."""
    given_back: tuple[Replica, ...] = ()
    """Replicas that are made anew, because their room was taken."""
    waiting: str | None = None
    """Why the first replica without nodes has none."""
    conditions: tuple[Condition, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after_s: float | None = None

    def then(self, other: Binding) -> Binding:
        """Both decisions; what waits longest is told."""
        waits = [found for found in (self.requeue_after_s, other.requeue_after_s) if found is not None]
        return Binding(
            (*self.patches, *other.patches),
            (*self.apply, *other.apply),
            (*self.given_back, *other.given_back),
            self.waiting or other.waiting,
            (*self.conditions, *other.conditions),
            (*self.events, *other.events),
            min(waits, default=None),
        )


@dataclass(frozen=True)
class _Room:
    """Free capacity after the replicas that were placed so far."""

    nodes: tuple[NodeCapacity, ...]
    binding: Binding = field(default_factory=Binding)


def bind(view: PoolView) -> Binding:
    """Place the replicas whose pods all exist and wait; watch that those that were placed are scheduled."""
    gated = [found for found in view.serving if found.complete and any(map(is_gated, found.pods))]
    watched = _watch_scheduling(view).then(_watch_groups(view))
    for found in gated:
        watched = watched.then(_start_group(view, found))
    waiting = [found for found in gated if found.scheduler == "stoker"]
    if view.seen.nodes is None:
        patches = tuple(opened(pod, None, {}) for found in waiting for pod in found.pods if is_gated(pod))
        return watched.then(Binding(patches, conditions=_limits(view)))
    room = _Room(view.seen.nodes)
    for found in waiting:
        room = _place_replica(view, found, room)
    return watched.then(room.binding).then(Binding(conditions=_limits(view)))


def _watch_groups(view: PoolView) -> Binding:
    """Make replicas anew whose pods were made as members of different groups, by two operators one after the other."""
    split = tuple(found for found in view.serving if len(found.groups) > 1)
    texts = (f"replica {found.name}: pods are of groups {' and '.join(found.groups)}; made anew" for found in split)
    return Binding(given_back=split, events=tuple(Event("Warning", GROUP_SPLIT, text) for text in texts))


def _start_group(view: PoolView, replica: Replica) -> Binding:
    """Apply the PodGroup of a replica and open the gates of its pods; nothing for one that is placed here."""
    template = _template(view, replica)
    group = group_of(replica, template) if template is not None else None
    if template is None or group is None:
        return Binding()
    objects = replica_group_objects(view.pool, replica.first, group, template, view.settings.installed)
    return Binding(tuple(opened(pod, None, {}) for pod in replica.pods if is_gated(pod)), objects)


def _place_replica(view: PoolView, replica: Replica, room: _Room) -> _Room:
    template = _template(view, replica)
    if template is None:
        return room  # its revision is gone, and so will it be
    if others := foreign_gates(replica.pods):
        text = f"placed when the pods' other scheduling gates are gone: {others}"
        return replace(room, binding=room.binding.then(Binding(waiting=text)))
    spec = template.pod.get("spec") or {}
    devices = needs_of(view.seen.devices, view.pool.metadata.namespace, spec)
    gang = gang_of_replica(template.pod, template.pods_per_replica, template.config, devices.amounts)
    found = place(gang, room.nodes, topology_of(template))
    if isinstance(found, Unplaceable):
        return replace(room, binding=room.binding.then(Binding(waiting=found.line)))
    if contradicts(replica.pods, found.nodes):
        text = f"replica {replica.name}: the room of pods that already have their nodes was taken; placed anew"
        given = Binding(given_back=(replica,), events=(Event("Warning", GANG_TIMEOUT, text),))
        return replace(room, binding=room.binding.then(given))
    taken = remaining(room.nodes, [PodUse(node, gang.requests) for node in found.nodes])
    affinity = spec.get("affinity")
    patches = tuple(
        _stamped(opened(pod, affinity_to(node, affinity), gang.requests), view.time)
        for pod, node in zip(replica.pods, found.nodes, strict=True)
        if is_gated(pod)
    )
    return _Room(taken, room.binding.then(Binding(patches, conditions=_relaxed(found))))


def _template(view: PoolView, replica: Replica) -> EngineTemplate | None:
    return next((found.template for found in view.pool.spec.revisions if found.name == replica.revision), None)


def _stamped(patch: Patch, time: str) -> Patch:
    body: Mapping[str, Any] = {**patch.body, "metadata": {"annotations": {PLACED_AT: time}}}
    return replace(patch, body=body)


def _relaxed(found: Placement) -> tuple[Condition, ...]:
    text = f"preferred levels that do not hold for every pod: {', '.join(found.relaxed)}"
    return (Condition(RELAXED, True if found.relaxed else None, "Preferred", text),)


def _limits(view: PoolView) -> tuple[Condition, ...]:
    own = [found for found in _templates(view) if scheduler_for(view, found) == "stoker"]
    given = [text for found in _templates(view) if found not in own and (text := _untold(view, found))]
    if given:
        return (Condition(LIMITED, True, "Scheduler", given[0]),)
    if not view.settings.places_gangs and (limits := [text for text in map(_without_nodes, own) if text]):
        return (Condition(LIMITED, True, "NoNodes", f"the operator has no view of nodes: {limits[0]}"),)
    placed = [found for found in own if _is_placed(found)]
    needs = (needs_of(view.seen.devices, view.pool.metadata.namespace, found.pod.get("spec") or {}) for found in placed)
    doubts = dict.fromkeys(doubt for found in needs for doubt in found.doubts)
    return (Condition(LIMITED, True if doubts else None, "ResourceClaims", shortened("; ".join(doubts))),)


def _templates(view: PoolView) -> list[EngineTemplate]:
    return [revision.template for revision in view.pool.spec.revisions]


def _without_nodes(template: EngineTemplate) -> str:
    """What the levels of a replica lack that are kept by affinity between its pods."""
    return topology_limits(replica_group(template, "stoker", ""), template.pod.get("spec") or {})


def _untold(view: PoolView, template: EngineTemplate) -> str:
    """What the levels lack of a replica that another scheduler starts."""
    scheduler = scheduler_for(view, template)
    if isinstance(scheduler, Missing):
        return ""
    return topology_limits(replica_group(template, scheduler, ""), template.pod.get("spec") or {})


def _is_placed(template: EngineTemplate) -> bool:
    """Whether the pods of its replicas get their nodes from here."""
    return template.pods_per_replica > 1 or template.scheduling is not None


def _watch_scheduling(view: PoolView) -> Binding:
    """Give the room of replicas back whose pods got their nodes and were not all scheduled in time."""
    found = Binding()
    for replica in view.serving:
        left_s = _time_left_s(view, replica)
        if left_s is None:
            continue
        if left_s > 0:
            found = found.then(Binding(requeue_after_s=left_s))
        else:
            late = ", ".join(pod["metadata"]["name"] for pod in _unscheduled(replica))
            seconds = f"{_gang_timeout_s(view, replica)} s (scheduling.gangTimeoutSeconds)"
            text = f"replica {replica.name}: not scheduled in {seconds}: {late}; placed anew"
            found = found.then(Binding(given_back=(replica,), events=(Event("Warning", GANG_TIMEOUT, text),)))
    return found


def _time_left_s(view: PoolView, replica: Replica) -> float | None:
    """Seconds until its pods must all be scheduled; None where nothing is waited for."""
    stamps = [at for pod in _unscheduled(replica) if (at := _placed_at(pod)) is not None]
    if _template(view, replica) is None or not stamps:
        return None
    return rest_s(min(stamps), _gang_timeout_s(view, replica), view.now)


def _gang_timeout_s(view: PoolView, replica: Replica) -> int:
    template = _template(view, replica)
    return ((template.scheduling if template else None) or PoolScheduling()).gang_timeout_seconds


def _placed_at(pod: Object) -> datetime | None:
    """When the pod got its node; None also where a user has made the annotation no time."""
    try:
        found = datetime.fromisoformat((pod["metadata"].get("annotations") or {})[PLACED_AT])
    except (KeyError, ValueError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _unscheduled(replica: Replica) -> list[Object]:
    return [pod for pod in replica.pods if pod_state(pod) is PodState.PENDING and not pod["spec"].get("nodeName")]
