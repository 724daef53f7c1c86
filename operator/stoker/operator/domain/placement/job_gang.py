"""The gang of a TrainingJob, as its pinned rendering describes it. Pure, on plain data."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

from stoker.operator.domain.labels import JOB, JOB_UID, ROLE, PodRole
from stoker.operator.domain.placement.apart import stand_apart
from stoker.operator.domain.placement.gang import EXPERT_GROUP, UNITS, Gang
from stoker.operator.domain.placement.node_capacity import required_terms
from stoker.pod.resources.pod_requests import pod_requests


def gang_of_rendering(rendered: Mapping[str, Any], devices: Mapping[str, int] | None = None) -> Gang:
    """Return the gang: the requests of its pods and the grid of its ranks.

    Experts lie over shard x tensor: a group of them is a run of neighbours there, so the ranks that exchange most are
    the smallest run that holds whole tensor groups and whole expert groups.

    Args:
        rendered: `status.pinned.rendered`, with `pod` and `config`.
        devices: what each pod takes of the devices of its claims.
    """
    spec, config = rendered["pod"]["spec"], rendered["config"]
    sizes, ranks = config["parallelism"], config["gang"]["ranks_per_node"]
    tensor, expert = sizes.get("tensor", 1), sizes.get("expert", 1)
    inner = sizes.get("context", 1) * lcm(tensor, expert)
    world = config["gang"]["nodes"] * ranks
    return Gang.of_ranks(
        pipeline=sizes.get("pipeline", 1),
        data=world // (sizes.get("pipeline", 1) * inner),
        inner=inner,
        ranks_per_pod=ranks,
        unit=UNITS[0] if inner == sizes.get("context", 1) * tensor else EXPERT_GROUP,
        requests={**pod_requests(spec), **(devices or {})},
        node_selector=spec.get("nodeSelector") or {},
        tolerations=tuple(spec.get("tolerations") or ()),
        affinity_terms=required_terms(spec.get("affinity")),
        apart=stand_apart(rendered["pod"], _own_labels(config.get("job") or {})),
    )


def _own_labels(job: Mapping[str, Any]) -> dict[str, str]:
    """The labels of the operator that all pods of a gang have."""
    found = {ROLE: PodRole.TRAINER.value, JOB: job.get("name"), JOB_UID: job.get("uid")}
    return {name: str(value) for name, value in found.items() if value is not None}
