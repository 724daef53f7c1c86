"""A scheduler of single pods that reads affinity between pods as Kubernetes' does, and chooses at random otherwise.

It stands for kube-scheduler in properties: every choice that it may make is one that kube-scheduler may make.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from stoker.operator.domain.placement.node_affinity import meets
from stoker.operator.domain.placement.node_capacity import NodeCapacity, required_terms
from stoker.operator.domain.plan import Object

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def schedule(
    pods: Sequence[Object], nodes: Sequence[NodeCapacity], requests: Mapping[str, int], random: Random
) -> dict[str, str]:
    """Return nodes by the names of the pods that get one, in a random order, until no pod can be scheduled.

    Args:
        requests: of each pod.
    """
    chosen: dict[str, str] = {}
    by_name = {node.name: node for node in nodes}
    waiting = list(pods)
    random.shuffle(waiting)
    while True:
        scheduled = [(found, by_name[chosen[_name(found)]]) for found in pods if _name(found) in chosen]
        options = ((found, _feasible(found, nodes, scheduled, requests)) for found in waiting)
        pick = next(((found, fitting) for found, fitting in options if fitting), None)
        if pick is None:
            return chosen
        chosen[_name(pick[0])] = random.choice(pick[1]).name
        waiting.remove(pick[0])


def _feasible(
    pod: Object,
    nodes: Iterable[NodeCapacity],
    scheduled: Sequence[tuple[Object, NodeCapacity]],
    requests: Mapping[str, int],
) -> list[NodeCapacity]:
    return [
        node
        for node in nodes
        if _has_room(node, [at for _, at in scheduled], requests)
        and meets(node.labels, node.name, required_terms(pod["spec"].get("affinity")))
        and _has_its_others(pod, node, scheduled)
    ]


def _has_room(node: NodeCapacity, taken: Sequence[NodeCapacity], requests: Mapping[str, int]) -> bool:
    used = taken.count(node) + 1
    return all(node.free.get(resource, 0) >= used * need for resource, need in requests.items())


def _has_its_others(pod: Object, node: NodeCapacity, scheduled: Sequence[tuple[Object, NodeCapacity]]) -> bool:
    """Whether the required terms hold. A pod counts where it matches all of them; without any, the first one may go."""
    terms = ((pod["spec"].get("affinity") or {}).get("podAffinity") or {}).get(_REQUIRED) or []
    keys = [term["topologyKey"] for term in terms]
    if any(key not in node.labels for key in keys):
        return False
    places = [at.labels for other, at in scheduled if terms and _matches_all(terms, other)]
    counted = {(key, labels[key]) for labels in places for key in keys if key in labels}
    if all((key, node.labels[key]) in counted for key in keys):
        return True
    return not counted and _matches_all(terms, pod)


def _matches_all(terms: Iterable[Mapping[str, Any]], pod: Object) -> bool:
    labels = pod["metadata"]["labels"].items()
    return all(term["labelSelector"]["matchLabels"].items() <= labels for term in terms)


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])
