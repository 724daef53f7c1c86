"""Actions of a pipeline schedule: what one rank does, in order, in one optimizer step.

A stage is a run of neighbouring layers. Stage s of a pipeline of p ranks lies on rank s % p, so a rank holds the stages
r, r + p, r + 2p, ... The forward pass of a micro-batch goes through the stages in order, its backward pass through
them in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

ScheduleName = Literal["GPipe", "OneFOneB", "Interleaved", "ZeroBubble"]
"""Names of `parallelism.pipelineSchedule`."""
SEVERAL_STAGES: tuple[ScheduleName, ...] = ("Interleaved", "ZeroBubble")
"""Schedules that may give a rank more than one stage."""


class Kind(StrEnum):
    """What an action does for one micro-batch on one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The gradients of input and weights together."""
    BACKWARD_INPUT = "backward input"
    """The gradient of the input alone; the products for the weights' gradients are kept."""
    BACKWARD_WEIGHT = "backward weight"
    """The products that BACKWARD_INPUT has kept."""
    RECEIVE_ACTIVATION = "receive activation"
    """Post the receive of the stage's input. FORWARD waits for it."""
    SEND_ACTIVATION = "send activation"
    """Start to send the stage's output to the next stage."""
    RECEIVE_GRADIENT = "receive gradient"
    """Post the receive of the gradient of the stage's output."""
    SEND_GRADIENT = "send gradient"
    """Start to send the gradient of the stage's input to the stage before."""
    REDUCE = "reduce"
    """The stage's gradient has all micro-batches: reduce it over the data-parallel ranks."""


COMPUTE = frozenset([Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT])
INPUT_GRADIENT = frozenset([Kind.BACKWARD, Kind.BACKWARD_INPUT])
"""Actions after which the gradient of the stage's input is there."""
WEIGHT_GRADIENT = frozenset([Kind.BACKWARD, Kind.BACKWARD_WEIGHT])
"""Actions after which the micro-batch's activations are free and the weights' gradients are added."""


class Action(NamedTuple):
    """One entry of a rank's list."""

    kind: Kind
    stage: int
    """Number in the whole model."""
    micro_batch: int
    """Number within the step; for REDUCE the last one."""

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


Orders = Sequence[Sequence[Action]]
"""By rank: its actions in order."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that a schedule depends on."""

    ranks: int
    """Pipeline-parallel size, p."""
    stages_per_rank: int = 1
    """v; more than 1 with the schedules of `SEVERAL_STAGES` alone."""
    micro_batches: int = 1
    """Micro-batches of one pipeline in one optimizer step, m."""

    def __post_init__(self) -> None:
        for name in ("ranks", "stages_per_rank", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"pipeline: {name} must be at least 1, got {getattr(self, name)}")

    @property
    def stages(self) -> int:
        """Stages of the whole model."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """The stages of one rank, in the order of the forward pass."""
        return range(rank, self.stages, self.ranks)
