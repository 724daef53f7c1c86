"""Closeness without a view of nodes: affinity between the pods of a unit, which the scheduler keeps one pod at a time.

Kubernetes counts a running pod only where it matches every required term of the pod to be scheduled. So terms that
select different units would each hold for none: required terms of one pod always select the same pods. Where one unit
is required, its pods select each other, and the first of them may go anywhere. Where several are, each pod goes to the
first pod of the narrowest unit that it does not lead itself, in the domains of that unit and of all wider ones.

The first pod of a unit is scheduled without a look at the others, so the last ones may find no room where `place` would
have chosen another domain. Pure; called by renderers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.operator.domain.labels import MODEL_REPLICA, NODE_RANK, TENSOR_GROUP
from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import with_node_labels
from stoker.operator.domain.plan import Object

WEIGHTS = (100, 50, 25)
"""Of preferred levels, narrowest first: pods of a tensor group exchange most."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True)
class _Unit:
    """The unit of one level."""

    level: Level
    weight: int
    size: int
    labels: Mapping[str, str]
    """Labels that its pods have, and no other pods."""
    leader: int
    """Number of its first pod."""


def kept_together(
    pod: Object, levels: Sequence[Level], gang: Gang, number: int, own: Mapping[str, str], *, ordered: bool = True
) -> Object:
    """Return a pod of a gang with affinity to the others of each unit that a level names, and labels to find them.

    Args:
        levels: narrowest first, as `place` takes them.
        number: of the pod in the gang, which its label `NODE_RANK` has.
        own: labels that all pods of the gang have, and no others.
        ordered: whether a pod may wait until another one is scheduled. A scheduler of whole gangs may look at the
            waiting pod first each time, and never start the gang.
    """
    units = _units(levels, gang, number, own)
    if not units:
        return pod
    spec, kept = pod["spec"], _kept(units, pod["spec"], ordered=ordered)
    terms = _required_terms([unit for unit in kept if unit.size > 1], number, own)
    preferred = [unit for unit in units if unit.size > 1 and unit not in kept]
    affinity = _joined(spec.get("affinity") or {}, terms, preferred)
    if kept:
        affinity = with_node_labels([unit.level.key for unit in kept], affinity)
    labels = {name: value for unit in units for name, value in unit.labels.items()}
    metadata = {**pod["metadata"], "labels": {**pod["metadata"]["labels"], **labels}}
    return {**pod, "metadata": metadata, "spec": {**spec, "affinity": affinity}}


def only_preferred(
    spec: Mapping[str, Any], levels: Sequence[Level], gang: Gang, *, ordered: bool = True
) -> tuple[str, ...]:
    """Keys of the required levels that affinity between pods can only prefer.

    Args:
        spec: of the gang's pods, before `kept_together`.
    """
    units = _units(levels, gang, 0, {})
    kept = _kept(units, spec, ordered=ordered)
    return tuple(unit.level.key for unit in units if unit.level.mode == "Required" and unit not in kept)


def _units(levels: Sequence[Level], gang: Gang, number: int, own: Mapping[str, str]) -> tuple[_Unit, ...]:
    """The unit of each level that a pod belongs to, narrowest first."""
    group = number // gang.parts
    replica = group % gang.replicas
    found = (
        (gang.parts, {TENSOR_GROUP: str(group)}, group * gang.parts),
        (gang.parts * gang.stages, {MODEL_REPLICA: str(replica)}, replica * gang.parts),
        (gang.size, dict[str, str](), 0),
    )
    return tuple(
        _Unit(level, weight, size, {**own, **labels}, leader)
        for level, weight, (size, labels, leader) in zip(levels, WEIGHTS, found, strict=False)
    )


def _kept(units: Sequence[_Unit], spec: Mapping[str, Any], *, ordered: bool) -> tuple[_Unit, ...]:
    """The units of required levels that hold; a unit of one pod needs a node with the level's label alone.

    No pod of the gang matches required terms of the user's own, so terms of ours beside them would never hold.
    """
    required = [unit for unit in units if unit.level.mode == "Required"]
    several = sorted({unit.size for unit in required} - {1})
    if ((spec.get("affinity") or {}).get("podAffinity") or {}).get(_REQUIRED):
        several = []
    sizes = {1, *(several if ordered else several[:1])}
    return tuple(unit for unit in required if unit.size in sizes)


def _required_terms(kept: Sequence[_Unit], number: int, own: Mapping[str, str]) -> list[dict[str, Any]]:
    """Terms that all select the same pods, for each of the levels that they select them for."""
    if len({unit.size for unit in kept}) == 1:
        return [_term(unit.level, unit.labels) for unit in kept]
    for index, unit in enumerate(kept):
        if unit.leader != number:
            first = {**own, NODE_RANK: str(unit.leader)}
            return [_term(wider.level, first) for wider in kept[index:]]
    return []


def _joined(
    affinity: Mapping[str, Any], required: Sequence[dict[str, Any]], preferred: Sequence[_Unit]
) -> dict[str, Any]:
    """The affinity of the user's template with these terms behind its own."""
    old = affinity.get("podAffinity") or {}
    wishes = [{"weight": unit.weight, "podAffinityTerm": _term(unit.level, unit.labels)} for unit in preferred]
    new = {_REQUIRED: [*(old.get(_REQUIRED) or ()), *required], _PREFERRED: [*(old.get(_PREFERRED) or ()), *wishes]}
    found = {**old, **{name: terms for name, terms in new.items() if terms}}
    return {**affinity, **({"podAffinity": found} if found else {})}


def _term(level: Level, labels: Mapping[str, str]) -> dict[str, Any]:
    return {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": level.key}
