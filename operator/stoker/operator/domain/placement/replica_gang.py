"""The gang of a replica of engines, as its template describes it. Pure, on plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.domain.labels import ROLE, PodRole
from stoker.operator.domain.placement.apart import stand_apart
from stoker.operator.domain.placement.gang import Gang
from stoker.operator.domain.placement.node_capacity import required_terms
from stoker.pod.resources.pod_requests import pod_requests


def gang_of_replica(
    pod: Mapping[str, Any], pods: int, config: Mapping[str, Any], devices: Mapping[str, int] | None = None
) -> Gang:
    """Return the gang: the pods of a pipeline of tensor groups.

    Args:
        pod: template `{metadata, spec}` of each of them.
        config: of the engine.
        devices: what each takes of the devices of its claims.
    """
    spec, parallelism = pod.get("spec") or {}, config.get("parallelism") or {}
    pipeline = int(parallelism.get("pipeline", 1))
    inner = int(parallelism.get("tensor", 1)) * int(parallelism.get("data", 1))
    return Gang.of_ranks(
        pipeline=pipeline,
        data=1,
        inner=inner,
        ranks_per_pod=pipeline * inner // pods,
        requests={**pod_requests(spec), **(devices or {})},
        node_selector=spec.get("nodeSelector") or {},
        tolerations=tuple(spec.get("tolerations") or ()),
        affinity_terms=required_terms(spec.get("affinity")),
        apart=stand_apart(pod, {ROLE: PodRole.ENGINE.value}),
    )
