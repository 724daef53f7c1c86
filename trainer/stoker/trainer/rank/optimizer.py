"""The optimizers on flat shards: Adam and AdamW with the kernel of `Ops`; LAMB is in `lamb`.

Change masters and moments in place. Called by `zero` once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.model.kernels.adam import AdamStep
from stoker.model.kernels.ops import Ops
from stoker.trainer.protocol.config import OptimizationConfig
from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.state_file import DiskState


class HostCopy:
    """The last copy of a bucket's state from or to host memory."""

    def __init__(self) -> None:
        self.event: Any = None
        """Of a stream; None: it has ended."""

    def wait(self) -> None:
        """Block the host until the memory holds the values of the last update."""
        if self.event is not None:
            self.event.synchronize()

    def before_here(self, device: torch.device) -> None:
        """Let what is queued in the current stream from now on wait for it."""
        if self.event is not None:
            torch.cuda.current_stream(device).wait_event(self.event)


@dataclass(frozen=True, eq=False)
class EarlyPiece:
    """A piece of state that is read from host memory before its update."""

    tensors: tuple[Tensor, ...]
    """Device memory: the master, if it is not the weights, and the moments."""
    arrived: Any
    """Event of the copy."""


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """The elements of one bucket that this rank updates, all flat and of one length."""

    bucket: Bucket
    start: int
    """Position of the first element in the bucket."""
    master: Tensor
    """fp32, like the moments."""
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    parameters: Tensor | None
    """Memory into which the masters are rounded; None when it is the masters' own."""
    copied: HostCopy | None = None
    """Of state in host memory: its last copy there."""
    early: Sequence[EarlyPiece] = ()
    """Of state in host memory: its first elements, which were read ahead."""
    disk: DiskState | None = None
    """Of state in a file: the tensors of masters (if they are not the weights) and moments have a length alone."""

    @property
    def decay_end(self) -> int:
        """Elements [0, decay_end) decay."""
        return min(max(self.bucket.plan.decay_end - self.start, 0), self.master.numel())


@dataclass(frozen=True, kw_only=True)
class UpdateNumbers:
    """What all buckets share in one update."""

    step: int
    """Number of this update, from 1; updates that were skipped do not count."""
    learning_rate: float
    scale: Tensor
    """Factor for the gradient: fp32 scalar on the device; one that is not finite changes nothing."""


class Optimizer(Protocol):
    """An update rule. Any cut of the state at whole lines gives the same bits."""

    def update(self, states: Iterable[HeldState], numbers: UpdateNumbers, updated: Callable[[Bucket], None]) -> None:
        """Update masters, moments and parameters of every bucket; call `updated` after each one (collective)."""
        ...


class Adam:
    """Adam and AdamW: `adamw` decays weights directly (decoupled); `adam` adds the decay to the gradient."""

    def __init__(self, config: OptimizationConfig, ops: Ops) -> None:
        self._config = config
        self._ops = ops

    def update(self, states: Iterable[HeldState], numbers: UpdateNumbers, updated: Callable[[Bucket], None]) -> None:
        for state in states:
            self.update_state(state, numbers)
            updated(state.bucket)

    def update_state(self, state: HeldState, numbers: UpdateNumbers) -> None:
        """Update any whole lines of a bucket's state."""
        rule = AdamStep(
            decoupled=self._config.optimizer == "adamw",
            learning_rate=numbers.learning_rate,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            epsilon=self._config.epsilon,
            weight_decay=self._config.weight_decay,
            decay_end=state.decay_end,
            step=numbers.step,
        )
        self._ops.adam_(
            state.master, state.gradient, state.exp_avg, state.exp_avg_sq, state.parameters, rule, numbers.scale
        )
