"""ZeRO stages 0 to 3 over flat buckets: which rank holds which fp32 state, and when data moves.

Stage 1: gradients are reduce-scattered, each rank updates its shard of the fp32 masters, updated parameters are
all-gathered. Stage 2: the same, and every micro-batch's gradient is reduced at once, so that no rank keeps more than
its shard of the sum. Stage 3: parameters are sharded too, and gathered for their use (`gathered_weights`). Stage 0: the
reduced gradient is gathered and every rank updates everything. Reduction of a bucket starts inside backward, when its
last gradient of the last micro-batch has arrived. The next forward waits for the gather of updated parameters, bucket
by bucket. On GPUs only the constructor and `set_shards` block the host.

Owns the buckets' state. Called by the training step; `snapshot` reads it for saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from stoker.model.kernels.grad_destination import set_grad_destination
from stoker.trainer.rank.bucket import EVERY_UNIT, Bucket, Reduction
from stoker.trainer.rank.bucket_state import BucketState, HeldBucket, ZeroSettings, hold_bucket, used_with
from stoker.trainer.rank.clip import GradientNorm
from stoker.trainer.rank.frozen import Fill
from stoker.trainer.rank.gathered_weights import GatheredWeights, ShardedBucket
from stoker.trainer.rank.gradient_wire import WireBuffers
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.offload import OffloadedUpdate
from stoker.trainer.rank.offloaded_lamb import OffloadedLamb
from stoker.trainer.rank.optimizer import Optimizer, UpdateNumbers
from stoker.trainer.rank.pipeline.tied_table import TiedTable

WIRE_DEPTH = 2
"""Gradients on their way: on GPUs send buffers per layout, one is filled while the other is sent.

On CPUs the number of buckets whose reduction may be in flight from stage 2 on, so that they are never the whole model.
"""


class Zero:
    """Parameters, gradients and optimizer state of one rank.

    Hooks on the parameters deliver gradients. A step calls `begin_step`; `ready` before each bucket is used;
    `end_micro_batch` after each backward; then `finish_reduce`, `gradient_norm`, `update`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        mesh: Mesh,
        optimizer: Optimizer,
        norm: GradientNorm,
        settings: ZeroSettings,
        *,
        fill: Fill | None = None,
        used_once: Collection[str] = (),
    ) -> None:
        """`fill` is needed when the parameters are empty (on the meta device).

        `used_once`: buckets whose parameters are each used once in a forward pass, so that a kernel may write
        their gradients to a destination.
        """
        self.mesh = mesh
        self.settings = settings
        self._optimizer = optimizer
        self._norm = norm
        self.ties: list[TiedTable] = []
        """Tables of which another rank of the pipeline holds a copy."""
        self._keep: Callable[[Callable[[], None]], None] | None = None
        self._hooks: list[RemovableHandle] = []
        self._places: dict[int, tuple[BucketState, int]] = {}
        wires = WireBuffers(WIRE_DEPTH if mesh.gradient.eager else None)
        made: Any = (settings, norm, wires, fill)
        self.held = [hold_bucket(bucket, mesh.reduction(bucket.reduction), *made) for bucket in buckets]
        """The state of all buckets, frozen ones included."""
        self.states = [state for state in self.held if isinstance(state, BucketState)]
        """Those that are trained."""
        for state in self.states:
            self._hook_gradients(state, state.bucket.name in used_once)
        units = list(dict.fromkeys(bucket.unit for bucket in buckets))
        self._by_unit = {
            unit: [state for state in self.states if state.bucket.unit in (unit, EVERY_UNIT)] for unit in units
        }
        self._by_bucket = {state.bucket.name: state for state in self.states}
        self._sent: deque[BucketState] = deque()
        self.gathered = self._gathered_weights()
        """Stage 3 on several ranks: the weights in use."""

    def _gathered_weights(self) -> GatheredWeights | None:
        by_unit: dict[str, list[ShardedBucket]] = {}
        for state in self.held:
            if state.shards_weights:
                by_unit.setdefault(used_with(state.bucket), []).append(state.sharded())
        return GatheredWeights(by_unit) if by_unit else None

    def _hook_gradients(self, state: BucketState, used_once: bool) -> None:
        def hook(index: int) -> Callable[[Tensor], None]:
            def accumulate(parameter: Tensor) -> None:
                gradient, parameter.grad = parameter.grad, None
                if gradient is None:
                    return  # it was put off, and comes through `add_gradient`
                if self._keep is not None and state.bucket.is_late:
                    self._keep(partial(self._add, state, index, gradient))
                else:
                    self._add(state, index, gradient)

            return accumulate

        for index, parameter in enumerate(state.bucket.parameters):
            if not parameter.requires_grad:
                continue
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook(index)))  # type: ignore[no-untyped-call]
            self._places[id(parameter)] = (state, index)
            if used_once:
                set_grad_destination(parameter, partial(self._destination, state, index))

    def _destination(self, state: BucketState, index: int) -> Tensor | None:
        holds = self._keep is not None and state.bucket.is_late
        return None if holds else state.grad_destination(index)

    def _add(self, state: BucketState, index: int, gradient: Tensor) -> None:
        if state.add(index, gradient):
            self._close(state)

    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient of the current micro-batch that did not come from autograd."""
        self._add(*self._places[id(parameter)], gradient)

    @contextmanager
    def hold(self, keep: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Give the gradients that arrive inside for late buckets to `keep`: callbacks, each of which adds one."""
        assert self._keep is None, "one backward pass at a time"
        self._keep = keep
        try:
            yield
        finally:
            self._keep = None

    def close(self) -> None:
        """Remove the hooks from the parameters.

        They refer to this object, and the garbage collector does not find that cycle.
        """
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        if self.settings.disk is not None:
            self.settings.disk.file.close()

    def begin_step(self, num_micro_batches: int) -> None:
        """Discard the last step's gradients."""
        for state in self.states:
            state.begin_step(num_micro_batches)

    def ready(self, unit: str) -> None:
        """Wait until the parameters of a unit have their new values. Call it before forward uses them."""
        for state in self._by_unit[unit if unit in self._by_unit else EVERY_UNIT]:  # a unit of shared parameters alone
            state.wait_parameters()
        if self.gathered is not None:
            self.gathered.use(unit)

    def end_micro_batch(self, stage: int | None = None, *, late: bool | None = None) -> None:
        """Close the buckets in which some parameter got no gradient. Call it after each backward.

        `stage`: of this pipeline stage alone. `late`: only the buckets with (without) late gradients.
        """
        for state in self.states:
            bucket = state.bucket
            if stage not in (None, bucket.stage) or late not in (None, bucket.is_late):
                continue
            if not state.closed:
                self._close(state)
            state.closed = False
            state.micro_batches_left -= 1
        if self.gathered is not None:
            self.gathered.end_backward()

    def check_complete(self, stage: int) -> None:
        """Assert that the gradient of a pipeline stage has all micro-batches of the step."""
        left = {state.bucket.name: state.micro_batches_left for state in self.states if state.bucket.stage == stage}
        assert not any(left.values()), f"stage {stage}: micro-batches are missing: {left}"

    def _close(self, state: BucketState) -> None:
        last = state.micro_batches_left == 1
        state.end_micro_batch(last)
        if last and state.communicator.eager:
            self._read_ahead(state)
        if self.settings.stage < 2 or self.mesh.gradient.eager:
            return
        self._sent.append(state)
        if len(self._sent) > WIRE_DEPTH:  # else the gradients in flight are as large as the model
            self._sent.popleft().finish_sending()

    def finish_reduce(self) -> None:
        """Wait until every bucket's gradient is the sum over all ranks and micro-batches."""
        self._sent.clear()
        for state in self.states:
            state.finish_reduce()
            if not state.communicator.eager:
                self._read_ahead(state)
        for tie in self.ties:
            tie.add_gradients()

    def _read_ahead(self, state: BucketState) -> None:
        """State in host memory: start to read it while other buckets are still in backward."""
        if isinstance(self._optimizer, OffloadedUpdate | OffloadedLamb):
            state.read_ahead(self._optimizer.read_ahead)

    def gradient_norm(self) -> Tensor:
        """Norm of the whole gradient, each parameter counted once; fp64 scalar on the device (collective)."""
        kinds = dict.fromkeys(state.bucket.reduction for state in self.states)
        sums = [(self.mesh.reduction(kind), self._square_sum(kind)) for kind in kinds]
        if self.mesh.is_one_model:
            return torch.stack([total for _, total in sums]).sum().sqrt()
        # Each sum is the same on all ranks of its communicator and its replicas: the first of them passes it on.
        mine = [total if communicator.rank == communicator.replica == 0 else total * 0 for communicator, total in sums]
        return self.mesh.world.exchange(torch.stack(mine).sum()).sum().sqrt()

    def _square_sum(self, kind: Reduction) -> Tensor:
        """Sum of the squared gradient over all buckets of one kind and the ranks of its communicator."""
        states = [state for state in self.states if state.bucket.reduction == kind]
        plans = [state.bucket.plan for state in states]
        return self._norm.square_sum([state.squares for state in states], plans, self.mesh.reduction(kind))

    def update(self, step: int, learning_rate: float, scale: Tensor) -> None:
        """Update this rank's state with the gradient times `scale`, and start to gather the parameters.

        `scale`: fp32 scalar on the device; one that is not finite changes nothing. `step` counts updates from 1.
        """
        numbers = UpdateNumbers(step=step, learning_rate=learning_rate, scale=scale)
        held = (state.held_state() for state in self.states)
        if self.gathered is not None:
            self.gathered.discard()
        self._optimizer.update(held, numbers, lambda bucket: self._by_bucket[bucket.name].start_gather())
        if self.gathered is not None:
            self.gathered.prepare_forward()

    def wait_parameters(self) -> None:
        """Wait until every parameter has its new value. Needed before anything but the next forward reads them.

        At stage 3 it only waits for gathers in flight.
        """
        for state in self.states:
            state.wait_parameters()
        if self.gathered is not None:
            self.gathered.wait()

    def set_shards(self, fill: Callable[[HeldBucket, dict[str, Tensor]], None]) -> None:
        """Let `fill` write this rank's shards of every state kind, then update all ranks' parameters (collective)."""
        for trained in self.states:
            trained.wait_update()
            trained.wait_host()
        for state in self.held:
            fill(state, state.begin_fill() if isinstance(state, BucketState) else state.shards())
            state.spread_shards()
        if self.gathered is not None:
            self.gathered.discard()
        self.wait_parameters()
