"""A gang that has room when its pods are made: they are made on their nodes, without a gate.

That saves the API server a patch of each pod. A gang that has to wait, or whose placement may change while it waits, is
made with gates, and `bind` places it.

The nodes of pods that exist are fixed. Where the making of a gang was cut short, the rest is placed around them; where
that does not work, or the API server refuses a pod, the gang gives all of its room back and waits with gates.

Pure. Called by `start`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.api.trainingjob_status import Attempt
from stoker.operator.domain.clock import rest_s
from stoker.operator.domain.labels import NODE_RANK
from stoker.operator.domain.placement.job_gang import gang_of_rendering
from stoker.operator.domain.placement.node_capacity import pinned_node
from stoker.operator.domain.placement.place import Placement, place
from stoker.operator.domain.placement.place_rest import place_rest
from stoker.operator.domain.pods import created_at, is_gated, label_number
from stoker.operator.reconcile.trainingjob.attempt import gang_size, scheduler_of
from stoker.operator.reconcile.trainingjob.blame import avoided_nodes
from stoker.operator.reconcile.trainingjob.give_back import ROOM_TAKEN, gave_back, give_back
from stoker.operator.reconcile.trainingjob.outcome import JobOutcome
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.scheduling import levels_of
from stoker.operator.render.trainer import is_placed

Nodes = tuple[str, ...]
"""Of the gang's pods, by number."""


def nodes_at_once(view: TrainingView, attempt: Attempt) -> Nodes | JobOutcome | None:
    """Return the nodes to make the missing pods on; None to make them with gates, or the end of the attempt."""
    if view.seen.nodes is None or not _is_placed_here(view, attempt):
        return None
    held = _held(view)
    if held is None or (not held and not _may_skip_gates(view)):
        return None
    if not held:
        found = place(*_wanted(view))
        return found.nodes if isinstance(found, Placement) else None
    if reason := _cannot_be_whole(view):
        return give_back(view, attempt, reason)
    gang, nodes, levels, avoided = _wanted(view)
    rest = place_rest(gang, nodes, held, levels, avoided)
    return rest.nodes if rest is not None else give_back(view, attempt, ROOM_TAKEN)


def _is_placed_here(view: TrainingView, attempt: Attempt) -> bool:
    return scheduler_of(attempt) == "stoker" and is_placed(view.job, gang_size(view), view.settings)


def _held(view: TrainingView) -> Mapping[int, str] | None:
    """The nodes of the pods that exist, by number; None where one waits with our gate or was given no node."""
    nodes = {label_number(pod, NODE_RANK): pinned_node(pod) for pod in view.gang if not is_gated(pod)}
    held = {number: node for number, node in nodes.items() if node is not None}
    return held if len(held) == len(view.gang) else None


def _may_skip_gates(view: TrainingView) -> bool:
    """Whether nothing but room decides about the gang.

    The size of an elastic run may change while it waits, devices of claims are known once a pod is seen, and gates of
    others (Kueue may add its own to any pod) have to go before room is taken. A gang whose room was taken waits.
    """
    spec = _rendered(view)["pod"]["spec"]
    others = spec.get("schedulingGates") or spec.get("resourceClaims") or view.settings.installed.kueue
    return not (others or view.job.spec.run.elastic or gave_back(view))


def _wanted(view: TrainingView) -> tuple[Any, ...]:
    """The arguments of `place`."""
    levels = levels_of(view.job.spec.scheduling.topology)
    return gang_of_rendering(_rendered(view)), view.seen.nodes, levels, avoided_nodes(view.job.status)


def _cannot_be_whole(view: TrainingView) -> str:
    """Why no more pods are made of a gang that lacks some; empty where they are."""
    if view.seen.refusal is not None:
        return f"{len(view.gang)} of {gang_size(view)} pods were made: {view.seen.refusal}"
    seconds = view.job.spec.scheduling.gang_timeout_seconds
    made = min((at for pod in view.gang if (at := created_at(pod)) is not None), default=view.now)
    late = not rest_s(made, seconds, view.now)
    return f"{len(view.gang)} of {gang_size(view)} pods were made in {seconds} s" if late else ""


def _rendered(view: TrainingView) -> Mapping[str, Any]:
    pinned = view.job.status.pinned
    assert pinned is not None, "an attempt is opened together with its pinned rendering"
    return pinned.rendered or {}
