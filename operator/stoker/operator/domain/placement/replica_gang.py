"""The gang of a replica of engines, as its template describes it. Pure, on plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.domain.placement.gang import Gang
from stoker.operator.domain.placement.node_capacity import pod_requests, required_terms


def gang_of_replica(pod: Mapping[str, Any], pods: int, devices: Mapping[str, int] | None = None) -> Gang:
    """Return the gang: the pods of one tensor group.

    Args:
        pod: template `{metadata, spec}` of each of them.
        devices: what each takes of the devices of its claims.
    """
    spec = pod.get("spec") or {}
    return Gang(
        parts=pods,
        requests={**pod_requests(spec), **(devices or {})},
        node_selector=spec.get("nodeSelector") or {},
        tolerations=tuple(spec.get("tolerations") or ()),
        affinity_terms=required_terms(spec.get("affinity")),
    )
