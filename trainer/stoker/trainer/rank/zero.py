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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from stoker.model.kernels.grad_destination import set_grad_destination
from stoker.trainer.rank.bucket import EVERY_UNIT, Bucket, Reduction
from stoker.trainer.rank.clip import GradientNorm
from stoker.trainer.rank.communicator import DONE, Communicator, Pending
from stoker.trainer.rank.frozen import WEIGHTS, Fill, FrozenState, initial_values
from stoker.trainer.rank.gathered_weights import GatheredWeights, ShardedBucket
from stoker.trainer.rank.gradient_sum import GradientSum
from stoker.trainer.rank.gradient_wire import GradientWire, Loan, WireBuffers
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.offload import host_memory, updated_here
from stoker.trainer.rank.optimizer import HeldState, HostCopy, Optimizer, UpdateNumbers
from stoker.trainer.rank.ordered_sum import sum_in_order
from stoker.trainer.rank.pipeline.tied_table import TiedTable
from stoker.trainer.rank.state_file import DiskState, StateFile

MOMENTS = ("optimizer.exp_avg", "optimizer.exp_avg_sq")
STATE_KINDS = (WEIGHTS, *MOMENTS)
"""State per parameter element: fp32 master weight and the two moments."""
ADAPTER_KINDS = ("adapter", *MOMENTS)
"""The same of an adapter, which is served as a change of a weight."""
WIRE_DEPTH = 2
"""Gradients on their way: on GPUs send buffers per layout, one is filled while the other is sent.

On CPUs the number of buckets whose reduction may be in flight from stage 2 on, so that they are never the whole model.
"""


@dataclass(frozen=True)
class DiskPlace:
    """Where optimizer state is kept in a file."""

    file: StateFile
    piece: int
    """Elements of a row that are read and written at once."""


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    stage: int
    """0 to 3."""
    compute_dtype: torch.dtype
    """Dtype of the parameters that forward and backward use."""
    offload: bool = False
    """Optimizer state is in host memory, or in a file."""
    disk: DiskPlace | None = None
    """The file, if it is in one."""
    any_data_parallel: bool
    """Add micro-batch gradients by recursive halving, so that the sum does not depend on the number of ranks."""

    def shards_weights(self, unit: str, ranks: int) -> bool:
        """Whether each rank keeps only its shard of a bucket's parameters. What every unit uses stays whole."""
        return self.stage == 3 and ranks > 1 and unit != EVERY_UNIT

    def sends_each(self, ranks: int, num_micro_batches: int) -> bool:
        """Whether each micro-batch's gradient is sent alone, in the compute dtype; else this rank first sums them."""
        return ranks > 1 and (num_micro_batches == 1 or (self.stage >= 2 and not self.any_data_parallel))


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
        self.held = [_state(bucket, mesh.reduction(bucket.reduction), *made) for bucket in buckets]
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
        if state.gradients.add(index, gradient):
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
        state.end_micro_batch(state.micro_batches_left == 1)
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
        for tie in self.ties:
            tie.add_gradients()

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


class BucketState:
    """One bucket's master weights, moments and gradient on this rank: a shard of them, at stage 0 all of them."""

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        settings: ZeroSettings,
        norm: GradientNorm,
        wires: WireBuffers,
        fill: Fill | None,
    ) -> None:
        self.bucket = bucket
        self.kinds = ADAPTER_KINDS if bucket.holds_adapters else STATE_KINDS
        self.closed = False
        self.micro_batches_left = 0
        """Of this step, the current one included."""
        self._communicator = communicator
        self._settings = settings
        self._wires = wires
        self._whole = settings.stage == 0
        self.shards_weights = settings.shards_weights(bucket.unit, communicator.size)
        self._reducing: Pending = DONE
        self._gathering: Pending = DONE
        self._copying: Pending = DONE
        self._loan: Loan | None = None
        self._num_sent = 0
        self._updating: Pending = DONE
        self.copied = HostCopy() if settings.offload and settings.disk is None else None
        """Of state in host memory: its last copy there."""
        self.disk: DiskState | None = None
        """State in a file. The tensors here then have a length alone."""
        self._filling: tuple[Tensor, Tensor, Tensor] | None = None
        self.master = self._build_master(fill)
        self.weights = self.master.to(settings.compute_dtype) if self.shards_weights else self.master.new_empty(0)
        """Stage 3: this rank's shard of the parameters; the masters themselves when those are fp32 too."""
        self._received = self.master.new_empty(0)
        self.exp_avg = self._placed(torch.zeros_like(self.master))
        self.exp_avg_sq = self._placed(torch.zeros_like(self.master))
        if settings.compute_dtype != torch.float32:  # else the masters are the weights
            self.master = self._placed(self.master)
        if settings.disk is not None:
            self._move_to_disk(settings.disk)
        self.squares = norm.new_squares(bucket.plan.shard_numel, bucket.device)
        """Squares of this rank's shard of the reduced gradient, in the form of `GradientNorm`."""
        self._total = partial(norm.total, self.squares)
        self.gradients: GradientSum | GradientWire = GradientSum(bucket, settings.any_data_parallel)
        self._sum = self.gradients
        self._wire = GradientWire(bucket, wires)
        self.gradient = self._received
        """The reduced gradient, as long as `master`, between `finish_reduce` and `begin_step`."""

    def _build_master(self, fill: Fill | None) -> Tensor:
        """fp32 masters of the parameters' values, or of those that `fill` writes.

        With fp32 parameters they are the same memory.
        """
        dtype = self._settings.compute_dtype
        master = initial_values(self.bucket, fill)
        if self.shards_weights:
            self.bucket.release(dtype)
            return self._communicator.shard(master).clone()
        self.bucket.adopt(master.to(dtype))  # no copy when it is fp32 already
        held = master if self._whole else self._communicator.shard(master)
        return held if dtype == torch.float32 or held.numel() == master.numel() else held.clone()

    def _placed(self, held: Tensor) -> Tensor:
        """State where it stays: on the device, or with offload in host memory."""
        return host_memory(held) if self._settings.offload and self._settings.disk is None else held

    def _move_to_disk(self, place: DiskPlace) -> None:
        on_disk = self._on_disk(self.held())
        self.disk = DiskState(place.file, len(on_disk), self.master.numel(), place.piece)
        self.disk.fill(torch.stack([held.cpu() for held in on_disk]))
        lengths = [held.to("meta") for held in on_disk]
        self.exp_avg, self.exp_avg_sq = lengths[-2:]
        if len(lengths) == 3:
            self.master = lengths[0]

    def _on_disk(self, held: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """What of the state is in the file: moments, and masters that are not the weights themselves."""
        return held[1:] if self._settings.compute_dtype == torch.float32 else held

    @property
    def communicator(self) -> Communicator:
        """The ranks that sum this bucket's gradient and share its state."""
        return self._communicator

    def sharded(self) -> ShardedBucket:
        """Stage 3: this rank's shard of the parameters."""
        return ShardedBucket(self.bucket, self.weights, self._communicator, self.wait_update)

    def owned(self, held: Tensor) -> Tensor:
        """This rank's shard of one of the state tensors."""
        return self._communicator.shard(held) if self._whole else held

    def shards(self) -> dict[str, Tensor]:
        """This rank's shard by state kind, as views: valid until the next update changes them."""
        return self._by_kind(self.held())

    def held(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master weights and moments: this rank's shard, at stage 0 all of them. Of a file: copies in host memory."""
        if self._filling is not None:
            return self._filling
        if self.disk is not None:
            return self._with_rows(self.disk.read())
        return self.master, self.exp_avg, self.exp_avg_sq

    def _with_rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *masters, exp_avg, exp_avg_sq = rows.unbind(0)
        return masters[0] if masters else self.master, exp_avg, exp_avg_sq

    def begin_fill(self) -> dict[str, Tensor]:
        """This rank's shard by state kind, to be written before `spread_shards`."""
        if self.disk is not None:
            self._filling = self.held()
        return self.shards()

    def hold_state(self) -> Callable[[], dict[str, Tensor]]:
        """State in a file: keep what is there now for a save. The result reads it, in any thread."""
        assert self.disk is not None, "the state is in a file"
        rows = self.disk.hold()
        if len(self._on_disk(self.held_lengths())) == 3:
            return lambda: self._by_kind(self._with_rows(rows()))
        master = self.master.detach().cpu().clone()  # the weights themselves, which the next update changes
        return lambda: self._by_kind((master, *rows().unbind(0)))

    def held_lengths(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master and moments as this object has them."""
        return self.master, self.exp_avg, self.exp_avg_sq

    def _by_kind(self, held: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.kinds, map(self.owned, held), strict=True))

    def begin_step(self, num_micro_batches: int) -> None:
        self.closed = False
        self.micro_batches_left = num_micro_batches
        self._num_sent = 0
        ranks = self._communicator.size * self._communicator.replicas
        sends_each = self._settings.sends_each(ranks, num_micro_batches)
        self.gradients = self._wire if sends_each else self._sum
        self.gradients.begin_step(num_micro_batches)

    def grad_destination(self, index: int) -> Tensor | None:
        """The memory where the gradient of parameter `index` may be written now, or None."""
        return self.gradients.grad_destination(index)

    def square(self) -> None:
        """Note the squares of the reduced gradient again, after a change of it."""
        own = self.owned(self.gradient)
        self._total([own], own, add=False)

    def end_micro_batch(self, last: bool) -> None:
        """Close this micro-batch: send its gradient, or wait for the next one."""
        self.closed = True
        flat = self.gradients.end_micro_batch()
        if self.gradients is self._wire:
            self._send(flat, last)
        elif last:
            self.gradient = flat if self._whole else self._communicator.shard(flat)
            self._reducing = self._communicator.reduce_scatter(flat, self.owned(self.gradient), total=self._total)

    def _send(self, flat: Tensor, last: bool) -> None:
        if not self._communicator.eager:
            self.finish_sending()
        if self._received.numel() == 0:
            self._received = torch.zeros(self.master.numel(), dtype=torch.float32, device=self.bucket.device)
        self.gradient = self._received
        self._reducing = self._communicator.reduce_scatter(
            flat,
            self.owned(self.gradient),
            add=self._num_sent > 0,
            total=self._total if last else sum_in_order,
            last=last,
        )
        self._loan = self._wires.lend(self.bucket, flat, self._reducing)
        self._num_sent += 1

    def finish_sending(self) -> None:
        """Wait for this bucket's reduction in flight."""
        self._reducing.wait()
        self._reducing = DONE
        if self._loan is not None:
            self._wires.give_back(self._loan)
            self._loan = None

    def finish_reduce(self) -> None:
        self.finish_sending()
        if self._whole:
            self._communicator.all_gather(self.gradient).wait()

    def hold(self, copying: Pending) -> None:
        """Make the next update wait until a copy of the state is complete."""
        self._copying = copying

    def held_state(self) -> HeldState:
        """What an update may change now: it waits (on the device) for copies of the state that are being made."""
        self._copying.wait()
        self._copying = DONE
        return HeldState(
            bucket=self.bucket,
            start=0 if self._whole else self.bucket.plan.shard(self._communicator.rank)[0],
            master=self.master,
            gradient=self.gradient,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            parameters=self._parameters(),
            copied=self.copied,
            disk=self.disk,
        )

    def _parameters(self) -> Tensor | None:
        """The part of the parameters' memory that the masters are rounded into; None when they are the same memory."""
        if self.bucket.dtype == torch.float32:
            return None
        if self.shards_weights:
            return self.weights
        return self.bucket.flat if self._whole else self._communicator.shard(self.bucket.flat)

    def start_gather(self) -> None:
        """Start to send the updated parameters to every rank."""
        self.bucket.renew()
        self._updating = updated_here(self.bucket.device) if self._settings.offload else DONE
        if not self._whole and not self.shards_weights:
            self._gathering = self._communicator.all_gather(self.bucket.flat)

    def wait_update(self) -> None:
        """Wait for an update that runs beside the passes."""
        self._updating.wait()
        self._updating = DONE

    def wait_host(self) -> None:
        """Block until state in host memory has the values of the last update."""
        if self.copied is not None:
            self.copied.wait()

    def wait_parameters(self) -> None:
        self.wait_update()
        self._gathering.wait()
        self._gathering = DONE

    def spread_shards(self) -> None:
        if self._whole:
            for held in self.held():
                whole = held.to(self.bucket.device)
                self._communicator.all_gather(whole).wait()
                held.copy_(whole)
        parameters = self._parameters()
        if parameters is not None:
            parameters.copy_(self.held()[0])
        if self.disk is not None and self._filling is not None:
            self.disk.fill(torch.stack([held.cpu() for held in self._on_disk(self._filling)]))
            self._filling = None
        self.start_gather()


def used_with(bucket: Bucket) -> str:
    """The unit with which a bucket's weights are gathered: a table's copy is used with the final norm."""
    return "head" if bucket.unit == "table copy" else bucket.unit


HeldBucket = BucketState | FrozenState
"""What a rank holds of one bucket."""


def _state(
    bucket: Bucket,
    communicator: Communicator,
    settings: ZeroSettings,
    norm: GradientNorm,
    wires: WireBuffers,
    fill: Fill | None,
) -> HeldBucket:
    if bucket.num_trainable:
        return BucketState(bucket, communicator, settings, norm, wires, fill)
    sharded = settings.shards_weights(bucket.unit, communicator.size)
    return FrozenState(bucket, communicator, settings.compute_dtype, fill, shards_weights=sharded)
