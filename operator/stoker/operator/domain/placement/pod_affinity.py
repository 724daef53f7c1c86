"""Closeness without a view of nodes: affinity between the pods of a unit, which the scheduler keeps one pod at a time.

The scheduler takes the first pod of a unit anywhere and the others beside it, so a required level may end with a pod
that finds no room, where `place` would have chosen another domain. Pure; called by renderers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.operator.domain.labels import MODEL_REPLICA, TENSOR_GROUP
from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.plan import Object

WEIGHTS = (100, 50, 25)
"""Of preferred levels, narrowest first: pods of a tensor group exchange most."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def kept_together(pod: Object, levels: Sequence[Level], gang: Gang, number: int, own: Mapping[str, str]) -> Object:
    """Return a pod of a gang with affinity to the others of each unit that a level names, and labels to find them.

    Args:
        levels: narrowest first, as `place` takes them.
        number: of the pod in the gang.
        own: labels that all pods of the gang have, and no others.
    """
    terms = list(_terms(levels, gang, number, own))
    if not terms:
        return pod
    labels = {name: value for _, _, selected in terms for name, value in selected.items()}
    metadata = {**pod["metadata"], "labels": {**pod["metadata"]["labels"], **labels}}
    return {**pod, "metadata": metadata, "spec": {**pod["spec"], "affinity": _joined(pod["spec"], terms)}}


def _terms(
    levels: Sequence[Level], gang: Gang, number: int, own: Mapping[str, str]
) -> Iterator[tuple[Level, int, dict[str, str]]]:
    """Each level whose unit has other pods, with its weight and the labels of the unit."""
    group = number // gang.parts
    units = (
        (gang.parts, {TENSOR_GROUP: str(group)}),
        (gang.parts * gang.stages, {MODEL_REPLICA: str(group % gang.replicas)}),
        (gang.size, dict[str, str]()),
    )
    for level, weight, (size, labels) in zip(levels, WEIGHTS, units, strict=False):
        if size > 1:
            yield level, weight, {**own, **labels}


def _joined(spec: Mapping[str, Any], terms: Sequence[tuple[Level, int, dict[str, str]]]) -> dict[str, Any]:
    """The affinity of the user's template with these terms behind its own."""
    affinity = spec.get("affinity") or {}
    old = affinity.get("podAffinity") or {}
    found = [
        (level, weight, {"labelSelector": {"matchLabels": labels}, "topologyKey": level.key})
        for level, weight, labels in terms
    ]
    required = [term for level, _, term in found if level.mode == "Required"]
    preferred = [
        {"weight": weight, "podAffinityTerm": term} for level, weight, term in found if level.mode == "Preferred"
    ]
    new = {_REQUIRED: [*(old.get(_REQUIRED) or ()), *required], _PREFERRED: [*(old.get(_PREFERRED) or ()), *preferred]}
    return {**affinity, "podAffinity": {**old, **{name: terms for name, terms in new.items() if terms}}}
