"""The nodes of a gang: all pods get theirs at once, or the job says what is missing.

Pods of a gang that has to wait are made with a scheduling gate. When `domain/placement` finds a node for each, every
pod gets its node as a required affinity and loses its gate. Those of a gang that has room are made on their nodes
(`at_once`). A gang that was placed and is not fully scheduled in time (another user's pod took the room) gives its room
back and is placed anew, as a new attempt that counts against nothing.

Pure. Called by `reconcile` once all pods of the attempt exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from stoker.operator.api.trainingjob_status import Attempt
from stoker.operator.domain.clock import rest_s
from stoker.operator.domain.conditions import Condition, Health
from stoker.operator.domain.placement.device_catalog import DeviceNeeds, needs_of
from stoker.operator.domain.placement.job_gang import gang_of_rendering
from stoker.operator.domain.placement.node_capacity import affinity_to, pinned_node
from stoker.operator.domain.placement.place import Placement, levels_not_kept, place
from stoker.operator.domain.placement.unplaceable import Unplaceable
from stoker.operator.domain.plan import Object, Patch, Plan
from stoker.operator.domain.pods import PodState, is_gated, pod_state, waiting_reason
from stoker.operator.domain.queue.applicant import Turn
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.gates import contradicts, foreign_gates, opened
from stoker.operator.reconcile.trainingjob.attempt import gang_size, moment, scheduler_of
from stoker.operator.reconcile.trainingjob.blame import avoided_nodes
from stoker.operator.reconcile.trainingjob.follow import follow
from stoker.operator.reconcile.trainingjob.give_back import ROOM_TAKEN, give_back
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome, changed_attempt
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.attempt_group import attempt_group
from stoker.operator.render.scheduling import levels_of, topology_limits

LIMITED = "PlacementLimited"
"""Condition while pods start without a choice of nodes, because the operator sees none."""
_WITHOUT_NODES = Condition(
    LIMITED, True, "NoNodes", "the operator has no view of nodes: each pod is scheduled by itself"
)
CLAIMS = "ResourceClaims"
"""Reason while devices of claims are not counted, or not exactly."""


def bind(view: TrainingView) -> JobOutcome | None:
    """Place the gang while some of its pods are gated; afterwards watch that all of them are scheduled."""
    attempt = view.attempt
    if attempt is None or attempt.ended_at is not None or len(view.gang) < gang_size(view):
        return None
    if any(map(is_gated, view.gang)):
        return _open_gates(view, attempt)
    found = _watch_scheduling(view, attempt) or _follow_placed(view, attempt)
    return replace(found, conditions=(*found.conditions, _limited(view, attempt)))


def _follow_placed(view: TrainingView, attempt: Attempt) -> JobOutcome:
    """Follow the gang, whose time counts from the first pass that finds all of its pods on nodes."""
    found = follow(view)
    followed = found.changes.get("attempt")
    if followed is None or attempt.placed_at is not None or not any(map(pinned_node, view.gang)):
        return found
    if others := foreign_gates(view.gang):
        return give_back(view, attempt, f"the pods have other scheduling gates: {others}")
    placed = _as_made(view)
    if placed is None:
        return give_back(view, attempt, "the pods were made on nodes that do not keep the required topology")
    conditions = (*_relaxed(placed), _used_again(placed, avoided_nodes(view.job.status)))
    changes = found.changes | JobChanges(attempt=changed_attempt(followed, placed_at=view.time))
    return replace(found, conditions=conditions, changes=changes)


def _as_made(view: TrainingView) -> Placement | None:
    """The placement that the pods have; None where a required level does not hold."""
    nodes = tuple(pinned_node(pod) or str(pod["spec"].get("nodeName") or "") for pod in view.gang)
    if view.seen.nodes is None:
        return Placement(nodes)
    labels = {node.name: node.labels for node in view.seen.nodes}
    levels = levels_of(view.job.spec.scheduling.topology)
    unkept = levels_not_kept(gang_of_rendering(_rendered(view)), nodes, levels, labels)
    if any(level.mode == "Required" for level in unkept):
        return None
    return Placement(nodes, tuple(level.key for level in unkept))


def _open_gates(view: TrainingView, attempt: Attempt) -> JobOutcome:
    if view.seen.nodes is None:
        patches = tuple(opened(pod, None, {}) for pod in view.gang if is_gated(pod))
        return _placed(view, attempt, patches, _WITHOUT_NODES)
    if others := foreign_gates(view.gang):
        return _waiting(view, "SchedulingGated", f"placed when the pods' other scheduling gates are gone: {others}")
    turn = view.seen.turn
    devices = _devices(view)
    gang = gang_of_rendering(_rendered(view), devices.amounts)
    avoided = avoided_nodes(view.job.status)
    levels = levels_of(view.job.spec.scheduling.topology)
    found = place(gang, view.seen.nodes, levels, avoided)
    if isinstance(found, Unplaceable) and avoided:
        found = place(gang, view.seen.nodes, levels)
    if isinstance(found, Unplaceable):
        return _waiting(view, found.reason, _in_queue(turn, found.line))
    if turn is not None and turn.nodes is None:
        return _waiting(view, "Queued", _in_queue(turn, _held_back(turn)))
    if contradicts(view.gang, found.nodes):
        return give_back(view, attempt, ROOM_TAKEN)
    chosen = zip(view.gang, found.nodes, strict=True)
    affinity = _rendered(view)["pod"]["spec"].get("affinity")
    patches = tuple(opened(pod, affinity_to(node, affinity), gang.requests) for pod, node in chosen if is_gated(pod))
    return _placed(view, attempt, patches, *_relaxed(found), _used_again(found, avoided), _counted(devices))


def _in_queue(turn: Turn | None, line: str) -> str:
    """The reason for a wait, after the place in the queue where others wait too."""
    return line if turn is None or turn.total == 1 else f"{turn.line}: {line}"


def _held_back(turn: Turn) -> str:
    return f"room is kept for {turn.kept_for}" if turn.kept_for else "others start first"


def _limited(view: TrainingView, attempt: Attempt) -> Condition:
    """Say where a placement was asked for that the scheduler of the gang does not keep."""
    if attempt.scheduler:
        text = _topology_limits(view, attempt)
        return Condition(LIMITED, True if text else None, "Scheduler", text)
    if not view.settings.places_gangs and (text := _topology_limits(view, attempt)):
        return Condition(LIMITED, True, "NoNodes", f"the operator has no view of nodes: {text}")
    if attempt.placed_at is not None and not any(map(pinned_node, view.gang)):
        return _WITHOUT_NODES
    return _counted(_devices(view))


def _topology_limits(view: TrainingView, attempt: Attempt) -> str:
    group = attempt_group(view.job, scheduler_of(attempt), attempt.number, _rendered(view))
    return topology_limits(group, _rendered(view)["pod"]["spec"])


def _devices(view: TrainingView) -> DeviceNeeds:
    return needs_of(view.seen.devices, view.job.metadata.namespace, _rendered(view)["pod"]["spec"])


def _counted(devices: DeviceNeeds) -> Condition:
    """Say what of the devices that pods claim is not counted, or not exactly."""
    return Condition(LIMITED, True if devices.doubts else None, CLAIMS, shortened("; ".join(devices.doubts)))


def _rendered(view: TrainingView) -> Mapping[str, Any]:
    pinned = view.job.status.pinned
    assert pinned is not None, "an attempt is opened together with its pinned rendering"
    return pinned.rendered or {}


def _relaxed(found: Placement) -> Iterator[Condition]:
    text = f"preferred levels that do not hold for every pod: {', '.join(found.relaxed)}"
    yield Condition("TopologyRelaxed", True if found.relaxed else None, "Preferred", text)


def _used_again(found: Placement, avoided: Collection[str]) -> Condition:
    again = sorted({*found.nodes} & {*avoided})
    text = f"attempts failed on {', '.join(again)} before, and no other nodes have room"
    return Condition("BlamedNodesUsed", True if again else None, "NoOtherRoom", text)


def _placed(view: TrainingView, attempt: Attempt, patches: tuple[Patch, ...], *conditions: Condition) -> JobOutcome:
    placed = changed_attempt(attempt, phase=attempt.phase or "Pending", placed_at=view.time)
    return JobOutcome(
        phase="Pending",
        health=Health.PROGRESSING,
        reason="Placed",
        message=f"{len(view.gang)} pods are placed",
        conditions=conditions,
        changes=JobChanges(attempt=placed),
        plan=Plan(patch=patches, requeue_after_s=float(view.job.spec.scheduling.gang_timeout_seconds)),
    )


def _waiting(view: TrainingView, reason: str, message: str) -> JobOutcome:
    """Keep the gates. Everything else of a pass goes on: Checkpoints of earlier saves, retention."""
    return replace(follow(view), reason=reason, message=message)


def _watch_scheduling(view: TrainingView, attempt: Attempt) -> JobOutcome | None:
    """Give the room back when the time of the gang is over; before that look again at the end of it."""
    late = [pod for pod in view.gang if pod_state(pod) is PodState.PENDING and not pod["spec"].get("nodeName")]
    if attempt.placed_at is None or not late or not any(map(pinned_node, late)):
        return None
    seconds = view.job.spec.scheduling.gang_timeout_seconds
    left_s = rest_s(moment(attempt.placed_at), seconds, view.now)
    if left_s > 0:
        return _requeued(follow(view), left_s)
    reasons = sorted({reason for pod in late if (reason := waiting_reason(pod))})
    return give_back(view, attempt, f"{_names(late)} not scheduled in {seconds} s: {'; '.join(reasons)}")


def _requeued(outcome: JobOutcome, after_s: float) -> JobOutcome:
    waits = [after_s, *([outcome.plan.requeue_after_s] if outcome.plan.requeue_after_s is not None else [])]
    return replace(outcome, plan=replace(outcome.plan, requeue_after_s=min(waits)))


def _names(pods: Iterable[Object]) -> str:
    first, *others = [str(pod["metadata"]["name"]) for pod in pods]
    return f"{first} and {len(others)} more were" if others else f"{first} was"
