"""Whether the pods of one gang keep each other off a node: host ports, and affinity against their own labels.

Pure, on raw pods. Read once for each gang; what pods of others keep off a node is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stoker.operator.domain.placement.node_affinity import meets

_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def stand_apart(pod: Mapping[str, Any], own: Mapping[str, str]) -> bool:
    """Return whether no two of these pods fit on one node.

    Args:
        pod: template `{metadata, spec}` of each of them.
        own: labels that the operator gives all of them.
    """
    spec = pod.get("spec") or {}
    labels = {**((pod.get("metadata") or {}).get("labels") or {}), **own}
    return _takes_host_port(spec) or any(_selects(term, labels) for term in _against_a_node(spec))


def _takes_host_port(spec: Mapping[str, Any]) -> bool:
    """In the network of the host, every port of a container is one of the host."""
    sidecars = (found for found in spec.get("initContainers") or () if found.get("restartPolicy") == "Always")
    running = (*(spec.get("containers") or ()), *sidecars)
    ports = [port for container in running for port in container.get("ports") or ()]
    return any(port.get("hostPort") or spec.get("hostNetwork") for port in ports)


def _against_a_node(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    against = (spec.get("affinity") or {}).get("podAntiAffinity") or {}
    yield from (term for term in against.get(_REQUIRED) or () if term.get("topologyKey") == _HOSTNAME)


def _selects(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a term is about pods with these labels in their own namespace, as far as that is known."""
    selector, namespaces = term.get("labelSelector"), term.get("namespaceSelector")
    if selector is None or term.get("namespaces") or namespaces not in (None, {}):
        return False
    if any(key in labels for key in term.get("mismatchLabelKeys") or ()):
        return False
    pairs = (selector.get("matchLabels") or {}).items()
    equal = [{"key": key, "operator": "In", "values": [value]} for key, value in pairs]
    wanted = [*(selector.get("matchExpressions") or ()), *equal]
    return not wanted or meets(labels, "", [{"matchExpressions": wanted}])
