"""A gang: pods that start together or not at all, and the grid of ranks that they carry.

Immutable. Made by the reconciler of each kind, read by `place`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

UNITS = ("tensor group", "model replica", "gang")
"""The units that a topology keeps together, narrowest first."""
EXPERT_GROUP = "expert group"
"""The narrowest unit of a gang whose experts lie over more ranks than a tensor group has."""


@dataclass(frozen=True, kw_only=True)
class Gang:
    """Pods with equal requests in a grid [stage, replica, part], numbered with the last axis innermost."""

    requests: Mapping[str, int]
    """Of one pod, in the units of `quantity.amount`."""
    parts: int = 1
    """Pods of one tensor group, or of one expert group where that is larger."""
    stages: int = 1
    """Tensor groups of one model replica: its pipeline."""
    replicas: int = 1
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    affinity_terms: Sequence[Mapping[str, Any]] = ()
    """`nodeSelectorTerms` of the required node affinity."""
    unit: str = UNITS[0]
    """Name of the narrowest unit, for messages."""
    apart: bool = False
    """Whether no two pods fit on one node, whatever is free."""

    @classmethod
    def of_ranks(cls, *, pipeline: int, data: int, inner: int, ranks_per_pod: int, **fields: Any) -> Self:
        """Return the gang of a rank grid `[pipeline, data, inner]`.

        Args:
            data: replicate x shard.
            inner: the ranks that exchange most: context x tensor, or the experts' groups over them.

        A pod may carry a piece of a tensor group, several groups of a stage, or several stages. Where the ranks of a
        pod match none of these, each pod stands for itself.
        """
        pods = pipeline * data * inner // ranks_per_pod
        for parts, stages in ((inner // ranks_per_pod, pipeline), (1, pipeline), (1, pods)):
            replicas = pods // (parts * stages) if parts else 0
            if replicas and parts * stages * replicas == pods and _fits(parts, replicas, data, inner, ranks_per_pod):
                return cls(parts=parts, stages=stages, replicas=replicas, **fields)
        return cls(replicas=pods, **fields)

    @cached_property
    def wanted(self) -> tuple[tuple[str, int], ...]:
        """What one pod takes of a node: its requests, and a place among the node's pods. Read for every node."""
        return tuple((resource, need) for resource, need in {**self.requests, "pods": 1}.items() if need)

    @property
    def size(self) -> int:
        """Number of pods."""
        return self.parts * self.stages * self.replicas

    def pods_by_replica(self) -> Iterator[int]:
        """Pod numbers with the replica outermost: pods that exchange most stand side by side."""
        for replica in range(self.replicas):
            for stage in range(self.stages):
                first = (stage * self.replicas + replica) * self.parts
                yield from range(first, first + self.parts)


def _fits(parts: int, replicas: int, data: int, inner: int, ranks_per_pod: int) -> bool:
    """Whether a pod's ranks are a whole part of a tensor group, whole groups of one stage, or whole stages."""
    if parts > 1 or inner == ranks_per_pod:
        return parts * ranks_per_pod == inner and replicas == data
    if replicas > 1 or data * inner == ranks_per_pod:
        return ranks_per_pod % inner == 0 and replicas * ranks_per_pod == data * inner
    return ranks_per_pod % (data * inner) == 0


@dataclass(frozen=True)
class Level:
    """One level of a topology: the node label whose value names a domain, and whether a unit must stay inside."""

    key: str
    mode: Literal["Required", "Preferred"] = "Required"
