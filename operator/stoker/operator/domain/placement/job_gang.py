"""The gang of a TrainingJob, as its pinned rendering describes it. Pure, on plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.domain.placement.gang import Gang
from stoker.operator.domain.placement.node_capacity import pod_requests, required_terms


def gang_of_rendering(rendered: Mapping[str, Any], devices: Mapping[str, int] | None = None) -> Gang:
    """Return the gang: the requests of its pods and the grid of its ranks.

    Args:
        rendered: `status.pinned.rendered`, with `pod` and `config`.
        devices: what each pod takes of the devices of its claims.
    """
    spec, config = rendered["pod"]["spec"], rendered["config"]
    sizes, ranks = config["parallelism"], config["gang"]["ranks_per_node"]
    inner = sizes.get("context", 1) * sizes.get("tensor", 1)
    world = config["gang"]["nodes"] * ranks
    return Gang.of_ranks(
        pipeline=sizes.get("pipeline", 1),
        data=world // (sizes.get("pipeline", 1) * inner),
        inner=inner,
        ranks_per_pod=ranks,
        requests={**pod_requests(spec), **(devices or {})},
        node_selector=spec.get("nodeSelector") or {},
        tolerations=tuple(spec.get("tolerations") or ()),
        affinity_terms=required_terms(spec.get("affinity")),
    )
