"""A gang that waits for its nodes, what others hold, and the turn that the queue gives to each. Values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property

from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import PodUse


@dataclass(frozen=True, kw_only=True)
class Applicant:
    """A gang that waits."""

    name: str
    """`namespace/name` of its job: unique."""
    namespace: str
    gang: Gang
    levels: tuple[Level, ...] = ()
    avoid: frozenset[str] = frozenset()
    """Nodes that are used only where no others have room."""
    priority: int = 0
    """Of its pods, from their priority class."""
    returning: bool = False
    """The job ran before; a restart does not lose its place to jobs of the same priority that never ran."""
    since: str = ""
    """Creation of the job, as the cluster writes times."""

    @cached_property
    def shape(self) -> str:
        """Equal for gangs that any nodes treat alike."""
        wanted = [asdict(self.gang), [asdict(level) for level in self.levels], sorted(self.avoid)]
        return json.dumps(wanted, sort_keys=True, default=str)

    @cached_property
    def demand(self) -> dict[str, int]:
        """What the whole gang takes."""
        return {resource: need * self.gang.size for resource, need in self.gang.requests.items()}


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What the pods of one run take: they end together, and when is not known."""

    namespace: str
    uses: tuple[PodUse, ...]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The answer of the queue to one gang."""

    position: int
    """Counted from 1."""
    total: int
    nodes: tuple[str, ...] | None = None
    """Nodes by pod number, for a gang that may start now; None for one that waits."""
    kept_for: str = ""
    """The job ahead that room is kept for, where that is why the gang waits."""
    is_head: bool = False
    """Whether it is the gang that room is kept for."""

    @property
    def line(self) -> str:
        """`Queued 3 of 7`; large numbers are rounded, since each change of them is a write of the status."""
        return f"Queued {_rounded(self.position)} of {_rounded(self.total)}"


EXACT = 20
"""Positions up to here are shown as they are."""


def _rounded(number: int) -> str:
    return str(number) if number <= EXACT else f"about {number // 10 * 10}"
