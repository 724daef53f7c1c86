"""The use of GPUs, as DCGM's exporter or the agents of pods measure it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from stoker.gateway.domain.capacity import NO_CLAIMS, gpus_of_pod
from stoker.gateway.domain.claimed_gpus import ClaimedGpus
from stoker.gateway.domain.metric_task import port_of
from stoker.gateway.observations import GpuFigures
from stoker.pod.gpu_metrics import MEMORY_TOTAL, MEMORY_USED, UTILIZATION

Object = Mapping[str, Any]
ROLES = ("trainer", "engine")
"""Values of the label `stoker.dev/role` of pods whose programs measure GPUs."""
FIELDS = {UTILIZATION: "utilization", MEMORY_USED: "memory_used", MEMORY_TOTAL: "memory_total"}


@dataclass(frozen=True)
class GpuUse:
    """Measured use of the GPUs, with the reason for what is not measured."""

    by_node: Mapping[str, Sequence[GpuFigures]] = field(default_factory=dict)
    why_not: str = ""

    @property
    def utilization(self) -> float | None:
        """Mean over the GPUs that have it."""
        found = [gpu.utilization for gpu in self._gpus() if gpu.utilization is not None]
        return sum(found) / len(found) if found else None

    @property
    def memory_utilization(self) -> float | None:
        """The used part of all memory, of the GPUs that have both."""
        found = [(gpu.memory_used, gpu.memory_total) for gpu in self._gpus()]
        both = [(used, total) for used, total in found if used is not None and total]
        return sum(used for used, _ in both) / sum(total for _, total in both) if both else None

    @property
    def measured(self) -> int:
        """Number of GPUs with figures."""
        return len(self._gpus())

    def _gpus(self) -> list[GpuFigures]:
        return [gpu for gpus in self.by_node.values() for gpu in gpus]


@dataclass(frozen=True)
class GpuAgent:
    """A pod with GPUs whose program measures them."""

    node: str
    namespace: str
    pod: str
    port: int


def gpu_agents(pods: Iterable[Object], claimed: ClaimedGpus = NO_CLAIMS) -> list[GpuAgent]:
    """The running pods of trainers and engines that hold GPUs, by node and name."""
    found = []
    for pod in pods:
        metadata, node, port = pod["metadata"], (pod.get("spec") or {}).get("nodeName"), port_of(pod)
        running = (pod.get("status") or {}).get("phase") == "Running"
        ours = (metadata.get("labels") or {}).get("stoker.dev/role") in ROLES
        if running and ours and node and port and gpus_of_pod(pod, claimed):
            found.append(GpuAgent(node, metadata["namespace"], metadata["name"], port))
    return sorted(found, key=lambda one: (one.node, one.namespace, one.pod))


def figures_of(metrics: str) -> list[tuple[str, GpuFigures]]:
    """The GPUs in a program's metrics, each with its place on the PCI bus.

    Raises:
        ValueError: the text is no metrics.
    """
    found: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name, uuid = FIELDS.get(sample.name), sample.labels.get("uuid")
            if name and uuid and math.isfinite(sample.value) and sample.value >= 0:
                place = sample.labels.get("pci_bus_id", "")
                found.setdefault(uuid, {"place": place, "gpu": uuid})[name] = sample.value
    return [(figures.pop("place"), GpuFigures(**figures)) for figures in found.values()]


def joined(readings: Iterable[tuple[str, Sequence[tuple[str, GpuFigures]]]]) -> dict[str, list[GpuFigures]]:
    """Node -> its GPUs, in the order of their places, from the readings of its pods. A GPU that two see counts once."""
    by_node: dict[str, dict[str, tuple[str, GpuFigures]]] = {}
    for node, gpus in readings:
        by_node.setdefault(node, {}).update({figures.gpu: (place, figures) for place, figures in gpus})
    return {
        node: [figures for _, figures in sorted(found.values(), key=lambda one: (one[0], one[1].gpu))]
        for node, found in by_node.items()
        if found
    }
