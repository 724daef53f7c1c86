"""One bucket under ZeRO: its masters, moments and gradient on this rank, in device memory, host memory or a file.

Made and driven by `Zero`; `snapshot` reads it for saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from stoker.trainer.rank.bucket import EVERY_UNIT, Bucket
from stoker.trainer.rank.clip import GradientNorm
from stoker.trainer.rank.communicator import DONE, Communicator, Pending
from stoker.trainer.rank.frozen import WEIGHTS, Fill, FrozenState, initial_values
from stoker.trainer.rank.gathered_weights import ShardedBucket
from stoker.trainer.rank.gradient_sum import GradientSum
from stoker.trainer.rank.gradient_wire import GradientWire, Loan, WireBuffers
from stoker.trainer.rank.offload import host_memory, updated_here
from stoker.trainer.rank.optimizer import EarlyPiece, HeldState, HostCopy
from stoker.trainer.rank.ordered_sum import sum_in_order
from stoker.trainer.rank.state_file import DiskState, StateFile

ReadAhead = Callable[[HeldState, Sequence[Tensor], Pending], Sequence[EarlyPiece]]
"""Reads the first pieces of offloaded state into spare memory (`OffloadedUpdate.read_ahead`)."""
MOMENTS = ("optimizer.exp_avg", "optimizer.exp_avg_sq")
STATE_KINDS = (WEIGHTS, *MOMENTS)
"""State per parameter element: fp32 master weight and the two moments."""
ADAPTER_KINDS = ("adapter", *MOMENTS)
"""The same of an adapter, which is served as a change of a weight."""


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
        self._spare: Tensor | None = None
        """The sum of a gradient whose shards of other ranks nothing reads, until the next gradient arrives."""
        self._early: Sequence[EarlyPiece] = ()
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
        self._early = ()
        ranks = self._communicator.size * self._communicator.replicas
        sends_each = self._settings.sends_each(ranks, num_micro_batches)
        self.gradients = self._wire if sends_each else self._sum
        self.gradients.begin_step(num_micro_batches)

    def grad_destination(self, index: int) -> Tensor | None:
        """The memory where the gradient of parameter `index` may be written now, or None."""
        self._take_back()
        return self.gradients.grad_destination(index)

    def add(self, index: int, gradient: Tensor) -> bool:
        """Add the gradient of parameter `index`; True when it was the last one of this micro-batch."""
        self._take_back()
        return self.gradients.add(index, gradient)

    def square(self) -> None:
        """Note the squares of the reduced gradient again, after a change of it."""
        own = self.owned(self.gradient)
        self._total([own], own, add=False)

    def end_micro_batch(self, last: bool) -> None:
        """Close this micro-batch: send its gradient, or wait for the next one."""
        self.closed = True
        self._take_back()
        flat = self.gradients.end_micro_batch()
        if self.gradients is self._wire:
            self._send(flat, last)
        elif last:
            self.gradient = flat if self._whole else self._communicator.shard(flat)
            self._reducing = self._communicator.reduce_scatter(flat, self.owned(self.gradient), total=self._total)
            self._spare = None if self._whole or self.copied is None else flat

    def read_ahead(self, read: ReadAhead) -> None:
        """Read what there is room for of the state in host memory, after the reduction that was started last."""
        if self._spare is not None:
            start, end = self.bucket.plan.shard(self._communicator.rank)
            self._early = read(self._held_now(), (self._spare[:start], self._spare[end:]), self._reducing)

    def _take_back(self) -> None:
        """Before a gradient is written: let pieces of the state leave the memory of its sum."""
        if self._spare is None or self.gradients is not self._sum:
            return
        assert self.copied is not None
        self.copied.before_here(self.bucket.device)
        for gap in self.bucket.plan.gaps():  # they are zero in every sum
            self._spare[gap].zero_()
        self._spare = None

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
        held, self._early = replace(self._held_now(), early=self._early), ()
        return held

    def _held_now(self) -> HeldState:
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


def hold_bucket(
    bucket: Bucket,
    communicator: Communicator,
    settings: ZeroSettings,
    norm: GradientNorm,
    wires: WireBuffers,
    fill: Fill | None,
) -> HeldBucket:
    """Make what this rank holds of a bucket, trained or frozen."""
    if bucket.num_trainable:
        return BucketState(bucket, communicator, settings, norm, wires, fill)
    sharded = settings.shards_weights(bucket.unit, communicator.size)
    return FrozenState(bucket, communicator, settings.compute_dtype, fill, shards_weights=sharded)
