"""Scheduling gates of gangs: what opens them, and what keeps them shut. Pure functions on raw pods.

Shared by the reconcilers of TrainingJobs and EnginePools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoker.operator.domain.placement.node_capacity import pinned_node
from stoker.operator.domain.plan import Object, Patch
from stoker.operator.domain.pods import PLACEMENT_GATE, ref_of


def opened(pod: Object, affinity: Mapping[str, Any] | None, requests: Mapping[str, int]) -> Patch:
    """Remove our gate alone, with the affinity to one node if there is a choice."""
    gates = [gate for gate in pod["spec"].get("schedulingGates") or () if gate["name"] != PLACEMENT_GATE]
    spec: dict[str, Any] = {"schedulingGates": gates or None}
    if affinity is not None:
        spec["affinity"] = affinity
    return Patch(ref_of(pod), {"spec": spec}, requests)


def foreign_gates(pods: Iterable[Object]) -> str:
    """Names of the gates that are not ours. A node chosen before they go would be held by pods that cannot start."""
    gates = (gate["name"] for pod in pods for gate in pod["spec"].get("schedulingGates") or ())
    return ", ".join(sorted({*gates} - {PLACEMENT_GATE}))


def contradicts(pods: Sequence[Object], nodes: Sequence[str]) -> bool:
    """Whether pods that already have a node would now get another one."""
    held = ((pod["spec"].get("nodeName") or pinned_node(pod), node) for pod, node in zip(pods, nodes, strict=True))
    return any(own is not None and own != node for own, node in held)
