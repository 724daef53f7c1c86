"""The input and the output of one review of a pool. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stoker.operator.domain.autoscaling.demand import Demand
from stoker.operator.domain.autoscaling.evidence import Evidence
from stoker.operator.domain.autoscaling.prediction import EngineShape, Goals
from stoker.operator.domain.autoscaling.step_curve import StepCurve

MAX_AGE_S = 15.0
"""An input that is older counts as unknown."""
REVIEW_S = 5.0
"""Time between two reviews."""

Mode = Literal["slo", "load"]
Reason = Literal[
    "Bounds", "Unknown", "Load", "Missed", "Proven", "Sufficient", "Proving", "AtMax", "WaitingForRoom",
    "InfeasibleGoal", "Idle", "Wake", "Burst", "RoleFlip",
]  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """The user's settings of a pool, and what the cluster has room for."""

    min: int
    max: int
    mode: Mode = "slo"
    goals: Goals = field(default_factory=Goals)
    scale_down_after_s: float = 300.0
    puts_late_behind: bool = False
    """Whether routers let requests that would be late wait behind the others."""
    placeable: int | None = None
    """Replicas for which there is room, those that exist included; None where that is not known."""
    beside_other: int | None = None
    """The most replicas beside the other pool of a pair, where not both can have what they need."""


@dataclass(frozen=True)
class Measured:
    """95th percentiles of the last minute in seconds; None where too few requests ended."""

    first_token_s: float | None = None
    gap_s: float | None = None
    late_share: float = 0.0
    """Share of the requests whose goal was missed before an engine had them: refused, or kept waiting by routers."""


Others = Literal["idle", "unknown", "busy"]
"""What the other pools of a deployment do; a replica can serve alone, so a pool at zero shows no work of its own."""


@dataclass(frozen=True)
class PoolInput:
    """A pool at one moment."""

    replicas: int
    """As `/scale` has it, with the borrowed ones and without the lent ones."""
    ready: int = 0
    unknown: tuple[str, ...] = ()
    """One line for each input that is absent or too old."""
    demand: Demand | None = None
    """With the forecast rate. None: nothing was ever measured; a measured absence of requests has rate 0."""
    rate: float = 0.0
    """Requests per second now."""
    curve: StepCurve | None = None
    shape: EngineShape | None = None
    measured: Measured = Measured()
    evidence: Evidence = field(default_factory=Evidence)
    arrivals: tuple[int, ...] = ()
    """Requests of each slot of the last minutes, oldest first, whatever the number of replicas."""
    running: int = 0
    waiting: int = 0
    """Requests in the queues of engines, and those with a goal that wait in routers."""
    held: int = 0
    """Requests that routers hold because no engine is ready."""
    kv_use: float = 0.0
    """Share of the cache in use, the mean of the engines."""
    startup_s: float = 120.0
    """P90 from a pod's creation until it is ready."""
    borrowed: int = 0
    """Replicas of another pool that serve this one."""
    lent: int = 0
    """Replicas of this pool that serve another one."""
    relief: int = 0
    """Replicas with which it can do a part of the other pool's work, too, where that one cannot have what it needs."""
    copies: int = 1
    """Of the model in a replica, each with a cache and requests of its own."""
    others: Others = "idle"
    """Pools go to zero together: the last replica of one stays while another one serves, or where that is unknown."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, as measured."""
        return not (self.rate or self.running or self.waiting or self.held)


@dataclass(frozen=True)
class Change:
    """A change of the number of replicas."""

    at_s: float
    before: int
    after: int

    @property
    def up(self) -> bool:
        return self.after > self.before


@dataclass(frozen=True)
class Memory:
    """What a review leaves for the next one of the same pool."""

    needs: tuple[tuple[float, int], ...] = ()
    """(time, replicas needed) with falling needs: the largest since each time, for the proof that fewer suffice."""
    since_s: float | None = None
    """Since when needs were known without a break."""
    changes: tuple[Change, ...] = ()
    short_s: float | None = None
    """Since when the present work needs more replicas than there are."""
    late_s: float | None = None
    """Since when a goal is missed although the prediction meets it."""
    missed_at: int = 0
    """Replicas at which a goal was missed although the prediction met it."""
    missed_rate: float = 0.0
    missed_s: float = 0.0
    """When that was."""


@dataclass(frozen=True)
class Decision:
    """The result of a review."""

    at_s: float
    before: int
    after: int
    reason: Reason
    message: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    """What it was computed from, rounded for people."""
    needed: int | None = None
    infeasible: str | None = None
    """A goal that no number of replicas within the limits reaches, with the best figure."""
    flips: int = 0
    """Replicas, out of the change, that come from the other pool by a change of their role; negative: that go there."""
