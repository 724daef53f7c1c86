"""ZeRO stages 0 and 1 over flat buckets: who holds which fp32 state, and when bytes move.

Stage 1: gradients are reduce-scattered, each rank updates its shard of the fp32 masters, updated parameters are all-gathered.
Stage 0: the same sums, but the reduced gradient is gathered and every rank updates everything. Both give the same bits.
Reduction of a bucket starts inside backward, when its last gradient of the last micro-batch is there; the gather of updated parameters
is waited for by the next forward, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.trainer.bucket import Bucket
from stoker.trainer.clip import global_norm
from stoker.trainer.communicator import DONE, Communicator, Pending
from stoker.trainer.gradient_sum import GradientSum
from stoker.trainer.optimizer import Adam

STATE_KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
"""What is kept per parameter element: fp32 master weight and the two moments."""


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    stage: int
    """0 or 1."""
    compute_dtype: torch.dtype
    """Dtype of the parameters that forward and backward use."""
    any_data_parallel: bool
    """Add micro-batch gradients by recursive halving, so that the sum does not depend on the number of ranks."""


class Zero:
    """Parameters, gradients and optimizer state of one rank. Hooks on the parameters feed it; drive a step with
    `begin_step`, one `end_micro_batch` after each backward, `reduce`, `update`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        units: Mapping[str, nn.Module],
        communicator: Communicator,
        optimizer: Adam,
        settings: ZeroSettings,
    ) -> None:
        self.communicator = communicator
        self.settings = settings
        self.states = [BucketState(bucket, communicator, settings) for bucket in buckets]
        self._optimizer = optimizer
        self._micro_batches_left = 0
        for state in self.states:
            self._hook_gradients(state)
            if state.bucket.name in units:
                units[state.bucket.name].register_forward_pre_hook(_waits(state))

    def _hook_gradients(self, state: BucketState) -> None:
        def hook(index: int) -> Callable[[Tensor], None]:
            def accumulate(parameter: Tensor) -> None:
                assert parameter.grad is not None
                complete = state.gradients.add(index, parameter.grad)
                parameter.grad = None
                if complete:
                    self._close(state)

            return accumulate

        for index, parameter in enumerate(state.bucket.parameters):
            parameter.register_post_accumulate_grad_hook(hook(index))  # type: ignore[no-untyped-call]

    def begin_step(self, num_micro_batches: int) -> None:
        """Forget the last step's gradients."""
        self._micro_batches_left = num_micro_batches
        for state in self.states:
            state.begin_step(num_micro_batches)

    def before_forward(self) -> None:
        """Wait for the parameters that belong to no block (embedding, norm, head); blocks wait for their own."""
        self.states[0].wait_parameters()

    def end_micro_batch(self) -> None:
        """After backward: close the buckets in which some parameter got no gradient."""
        for state in self.states:
            if not state.closed:
                self._close(state)
            state.closed = False
        self._micro_batches_left -= 1

    def _close(self, state: BucketState) -> None:
        state.gradients.end_micro_batch()
        state.closed = True
        if self._micro_batches_left == 1:
            state.start_reduce()

    def reduce(self) -> float:
        """Finish the reduction; the norm of the whole gradient."""
        for state in self.states:
            state.finish_reduce()
        shards = [state.owned(state.gradient) for state in self.states]
        return float(global_norm(shards, [state.bucket.plan for state in self.states], self.communicator))

    def update(self, step: int, learning_rate: float, scale: float) -> None:
        """Update this rank's state with the gradient times `scale`, and start to gather the parameters. `step` counts from 1."""
        for state in self.states:
            if scale != 1.0:
                state.gradient.mul_(scale)
            self._optimizer.update(
                state.master,
                state.gradient,
                state.exp_avg,
                state.exp_avg_sq,
                decay_end=state.decay_end,
                step=step,
                learning_rate=learning_rate,
            )
            state.start_gather()

    def wait_parameters(self) -> None:
        """Until every parameter has its new value (before anything but the next forward reads them)."""
        for state in self.states:
            state.wait_parameters()

    def set_shards(self, fill: Callable[[BucketState, dict[str, Tensor]], None]) -> None:
        """Let `fill` write this rank's shards of every state kind, then bring all ranks' parameters up to date (collective)."""
        for state in self.states:
            fill(state, state.shards())
            state.spread_shards()
        self.wait_parameters()


class BucketState:
    """One bucket's master weights, moments and gradient on this rank: its shard at stage 1, everything at stage 0."""

    def __init__(self, bucket: Bucket, communicator: Communicator, settings: ZeroSettings) -> None:
        self.bucket = bucket
        self.gradients = GradientSum(bucket, settings.any_data_parallel)
        self.closed = False
        self._communicator = communicator
        self._whole = settings.stage == 0
        self._reducing: Pending = DONE
        self._gathering: Pending = DONE
        self.master = self._build_master(settings.compute_dtype)
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.gradient = self.master.new_empty(0)
        """The reduced gradient, as long as `master`, between `finish_reduce` and `begin_step`."""

    def _build_master(self, compute_dtype: torch.dtype) -> Tensor:
        """fp32 masters of what the parameters hold now. In fp32 they are the parameters' own memory."""
        master = self.bucket.master_copy()
        self.bucket.adopt(master.to(compute_dtype))  # no copy when it is fp32 already
        held = master if self._whole else self._communicator.shard(master)
        return held if compute_dtype == torch.float32 or held.numel() == master.numel() else held.clone()

    @property
    def decay_end(self) -> int:
        """End of the decayed region inside of `master`."""
        if self._whole:
            return self.bucket.plan.decay_end
        start, end = self.bucket.plan.shard(self._communicator.rank)
        return min(max(self.bucket.plan.decay_end, start), end) - start

    def owned(self, held: Tensor) -> Tensor:
        """This rank's shard of one of the state tensors."""
        return self._communicator.shard(held) if self._whole else held

    def shards(self) -> dict[str, Tensor]:
        """This rank's shard by state kind, as views: valid until the next update changes them."""
        return dict(zip(STATE_KINDS, (self.owned(held) for held in self._held()), strict=True))

    def _held(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq

    def begin_step(self, num_micro_batches: int) -> None:
        self.closed = False
        self.gradients.begin_step(num_micro_batches)

    def start_reduce(self) -> None:
        self._reducing = self._communicator.reduce_scatter(self.gradients.total())

    def finish_reduce(self) -> None:
        self._reducing.wait()
        self._reducing = DONE
        total = self.gradients.total()
        if self._whole:
            self._communicator.all_gather(total).wait()
        self.gradient = total if self._whole else self._communicator.shard(total)

    def start_gather(self) -> None:
        """Bring the updated masters into the parameters of every rank."""
        if self._whole:
            _assign(self.bucket.flat, self.master)
            return
        _assign(self._communicator.shard(self.bucket.flat), self.master)
        self._gathering = self._communicator.all_gather(self.bucket.flat)

    def wait_parameters(self) -> None:
        self._gathering.wait()
        self._gathering = DONE

    def spread_shards(self) -> None:
        if self._whole:
            for held in self._held():
                self._communicator.all_gather(held).wait()
        self.start_gather()


def _assign(parameters: Tensor, master: Tensor) -> None:
    if parameters.data_ptr() != master.data_ptr():
        parameters.copy_(master)


def _waits(state: BucketState) -> Callable[..., Any]:
    def wait(*_: object) -> None:
        state.wait_parameters()

    return wait
