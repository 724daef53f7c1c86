"""Collectives over flat buffers: reduce-scatter, all-gather in place, and a small exchange of numbers.

One interface for one rank (no communication), Gloo, NCCL, and replicas of either (hybrid sharding). A reduce-scatter
is an all-to-all of the buffers as they are, then a sum in fp32 at the receiver, in the order of the ranks (recursive
halving). It gives the same bits on every backend, and bf16 gradients travel as bf16 without a further rounding. The sum
is a callback, `total`: `GradientNorm.total` also notes the squares of the sum in the same pass.

On Gloo the all-gather is a set of sends. Measured with 32 MB on two ranks: all-to-all and sum take 15 ms (Gloo's own
reduce-scatter 58 ms), the sends 13 ms (its gather 46 to 85 ms).

Used by all code of a rank that exchanges data with other ranks: ZeRO, clipping, snapshots and saves. An instance holds
a process group; its collectives are called by every rank of the group, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.trainer.rank.ordered_sum import sum_in_order


@dataclass(frozen=True, kw_only=True)
class GpuShare:
    """The part of a GPU that NCCL's kernels take from matrix products: each thread block occupies a multiprocessor."""

    reduce_ctas: int = 16
    """Limit for the all-to-all. Fewer blocks leave more to backward, but take longer and slow it down for that time.

    A step of an 8B model on four H200s took 757 ms with 16 of each, 767 with 8, 786 with 4.
    """
    gather_ctas: int = 16
    cluster: int | None = None
    """Thread blocks that must start together; None: NCCL's default (4)."""


SHARE = GpuShare()


class Total(Protocol):
    """Writes the sum of the ranks' slices, in rank order, to `out`:

    `sum_in_order`, or a function that does more in the same pass.
    """

    def __call__(self, rows: Sequence[Tensor], out: Tensor, *, add: bool) -> None: ...


@dataclass(frozen=True)
class Pending:
    """A collective in flight.

    Its buffers must not be touched until `wait` returns; on a GPU `wait` blocks the current stream, never the host.
    """

    finish: Callable[[], None]

    def wait(self) -> None:
        self.finish()


DONE = Pending(lambda: None)


class Communicator(Protocol):
    """Collectives of one group of ranks, over which gradients are summed and state is sliced.

    Reduce-scatter and all-gather have a process group each, so neither waits for the other.
    """

    rank: int
    size: int
    eager: bool
    """Collectives run in the background, in order of start; else `wait` does a part of the work on the host."""
    replicas: int
    """Number of ranks that hold the same slice; 1 without replicas."""
    replica: int
    """This rank's number among them."""

    def shard(self, flat: Tensor) -> Tensor:
        """This rank's slice of a flat buffer, a view."""
        ...

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool = False, total: Total = sum_in_order, last: bool = True
    ) -> Pending:
        """Sum this rank's slice of `flat` over the ranks into `out` (fp32, a slice long); with `add`, add it there.

        `out` may be this rank's slice of `flat`; the rest of `flat` is undefined afterwards. `total` sums the slices,
        in the stream of the reductions. With replicas the sum is complete after the `last` call alone.
        """
        ...

    def all_gather(self, flat: Tensor) -> Pending:
        """Fill the buffer with every rank's slice of it."""
        ...

    def exchange(self, numbers: Tensor) -> Tensor:
        """Gather every rank's small tensor (same shape everywhere), stacked in rank order."""
        ...


class Alone:
    """A single rank: no communication."""

    rank, size, eager, replicas, replica = 0, 1, False, 1, 0

    def shard(self, flat: Tensor) -> Tensor:
        return flat

    def reduce_scatter(
        self,
        flat: Tensor,
        out: Tensor,
        *,
        add: bool = False,
        total: Total = sum_in_order,
        last: bool = True,  # noqa: ARG002  no replicas
    ) -> Pending:
        total([flat], out, add=add)
        return DONE

    def all_gather(self, flat: Tensor) -> Pending:  # noqa: ARG002  the buffer is full already
        return DONE

    def exchange(self, numbers: Tensor) -> Tensor:
        return numbers.unsqueeze(0)


@dataclass(frozen=True)
class Groups:
    reduce: dist.ProcessGroup
    gather: dist.ProcessGroup
    order: tuple[int, ...]
    """Group ranks in the order in which their slices are summed."""

    def rows(self, received: Tensor) -> list[Tensor]:
        """The ranks' slices in the order of the sum."""
        by_rank = received.view(len(self.order), -1).unbind(0)
        return [by_rank[rank] for rank in self.order]


class Gloo:
    """Ranks on CPUs."""

    eager, replicas, replica = False, 1, 0

    def __init__(self, rank: int, size: int, groups: Groups) -> None:
        self.rank, self.size = rank, size
        self._groups = groups
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def shard(self, flat: Tensor) -> Tensor:
        return flat.view(self.size, -1)[self.rank]

    def reduce_scatter(
        self,
        flat: Tensor,
        out: Tensor,
        *,
        add: bool = False,
        total: Total = sum_in_order,
        last: bool = True,  # noqa: ARG002  no replicas
    ) -> Pending:
        received = self._borrow(flat)
        work = dist.all_to_all_single(_raw(received), _raw(flat), group=self._groups.reduce, async_op=True)

        def finish() -> None:
            _finish(work)
            total(self._groups.rows(received), out, add=add)
            self._free[received.numel(), received.dtype].append(received)

        return Pending(finish)

    def all_gather(self, flat: Tensor) -> Pending:
        slices = flat.view(self.size, -1)
        peers = [peer for peer in range(self.size) if peer != self.rank]
        works = [dist.irecv(slices[peer], group=self._groups.gather, group_src=peer) for peer in peers]
        works += [dist.isend(slices[self.rank], group=self._groups.gather, group_dst=peer) for peer in peers]
        return Pending(lambda: _finish(*works))

    def exchange(self, numbers: Tensor) -> Tensor:
        return _exchange(numbers, self.size, self._groups.gather)

    def _borrow(self, like: Tensor) -> Tensor:
        """A receive buffer. They are kept: fresh ones of this size cost a page fault per 4 KB at each step."""
        free = self._free.setdefault((like.numel(), like.dtype), [])
        return free.pop() if free else torch.empty_like(like)


class Nccl:
    """Ranks on GPUs. Reductions run one after another on a stream of their own, beside backward."""

    eager, replicas, replica = True, 1, 0

    def __init__(self, rank: int, size: int, groups: Groups, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._groups = groups
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._received: dict[torch.dtype, Tensor] = {}

    def shard(self, flat: Tensor) -> Tensor:
        return flat.view(self.size, -1)[self.rank]

    def reduce_scatter(
        self,
        flat: Tensor,
        out: Tensor,
        *,
        add: bool = False,
        total: Total = sum_in_order,
        last: bool = True,  # noqa: ARG002  no replicas
    ) -> Pending:
        received = self._buffer(flat)
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self._stream):
            _finish(dist.all_to_all_single(_raw(received), _raw(flat), group=self._groups.reduce, async_op=True))
            total(self._groups.rows(received), out, add=add)
            done = self._stream.record_event()
        return Pending(lambda: torch.cuda.current_stream(flat.device).wait_event(done))

    def all_gather(self, flat: Tensor) -> Pending:
        work = dist.all_gather_into_tensor(flat, self.shard(flat), group=self._groups.gather, async_op=True)
        return Pending(lambda: _finish(work))

    def exchange(self, numbers: Tensor) -> Tensor:
        return _exchange(numbers, self.size, self._groups.gather)

    def _buffer(self, like: Tensor) -> Tensor:
        """The receive buffer of a dtype, as long as the longest bucket.

        Reductions run one after another on one stream, so they share it.
        """
        held = self._received.get(like.dtype)
        if held is None or held.numel() < like.numel():
            if held is not None:
                held.record_stream(self._stream)  # a reduction in flight may still read it
            held = self._received[like.dtype] = torch.empty_like(like)
        return held[: like.numel()]


class Hybrid:
    """Slices over the ranks of `inner`, the same slice on the ranks of `outer` (hybrid sharding).

    Only the last reduction of a step crosses the replicas, with a slice: their sum is scattered, then gathered.
    """

    def __init__(self, inner: Communicator, outer: Communicator) -> None:
        self.inner, self.outer = inner, outer
        self.rank, self.size, self.eager = inner.rank, inner.size, outer.eager
        self.replica, self.replicas = outer.rank, outer.size
        self._stream: torch.cuda.Stream | None = None

    def shard(self, flat: Tensor) -> Tensor:
        return self.inner.shard(flat)

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool = False, total: Total = sum_in_order, last: bool = True
    ) -> Pending:
        inside = self._start(flat, out, add=add, last=last)
        if not last:
            return inside
        if not out.is_cuda:
            return Pending(lambda: self._cross(inside, out, total))
        device = out.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._cross(inside, out, total)
            done = self._stream.record_event()
        crossed = Pending(lambda: torch.cuda.current_stream(device).wait_event(done))
        return Pending(partial(_wait_with, crossed, inside))

    def _start(self, flat: Tensor, out: Tensor, *, add: bool, last: bool) -> Pending:  # noqa: ARG002  every one alike
        return self.inner.reduce_scatter(flat, out, add=add)

    def _sum_replicas(self, out: Tensor) -> None:
        """Sum this replica's part of the slice over the replicas."""
        self.outer.reduce_scatter(out, self.outer.shard(out)).wait()

    def _cross(self, inside: Pending, out: Tensor, total: Total) -> None:
        inside.wait()
        self._sum_replicas(out)
        self.outer.all_gather(out).wait()
        total([out], out, add=False)

    def all_gather(self, flat: Tensor) -> Pending:
        return self.inner.all_gather(flat)

    def exchange(self, numbers: Tensor) -> Tensor:
        return self.inner.exchange(numbers)


class OrderedHybrid(Hybrid):
    """The same slices, summed over all ranks at once: in the order of `whole`, which has the replicas where it wants.

    For sums whose bits must not depend on the number of replicas. Each rank of `inner` and `outer` sums a part of its
    slice, and its replicas gather the parts. It sends the whole gradient over the replicas and copies it once.
    """

    def __init__(self, inner: Communicator, outer: Communicator, whole: Communicator) -> None:
        """`whole`: the ranks of `inner` and `outer`, numbered by `outer`, then by `inner`."""
        assert whole.size == inner.size * outer.size, (whole.size, inner.size, outer.size)
        assert whole.rank == outer.rank * inner.size + inner.rank, (whole.rank, outer.rank, inner.rank)
        super().__init__(inner, outer)
        self.whole = whole

    def _start(self, flat: Tensor, out: Tensor, *, add: bool, last: bool) -> Pending:
        assert last, "one sum a step: a rank has added up its micro-batches"
        assert not add, "one sum a step"
        by_rank = flat.view(self.size, self.replicas, -1).transpose(0, 1).reshape(-1)
        reducing = self.whole.reduce_scatter(by_rank, self.outer.shard(out))
        return Pending(partial(_wait_with, reducing, by_rank))

    def _sum_replicas(self, out: Tensor) -> None:
        """Each replica has its part of the sum already."""


def make_communicator(
    ranks: Sequence[int], device: torch.device, timeout: timedelta | None = None, share: GpuShare = SHARE
) -> Communicator | None:
    """Make a communicator over these global ranks; None on other ranks (collective over the whole gang).

    Slices are numbered by global rank; `ranks` gives the order in which they are summed. `timeout` applies to one
    collective. A group does not inherit it from the group of all ranks, and torch's default with NCCL is ten minutes.
    """
    if len(ranks) == 1:
        return Alone() if dist_rank() == ranks[0] else None
    groups = []
    for ctas in (share.reduce_ctas, share.gather_ctas):
        options = None if device.type == "cpu" else nccl_options(ctas, share.cluster, timeout)
        groups.append(dist.new_group(list(ranks), timeout=timeout, pg_options=options))
    if dist_rank() not in ranks:
        return None
    reduce_group, gather_group = groups
    assert isinstance(reduce_group, dist.ProcessGroup)
    assert isinstance(gather_group, dist.ProcessGroup)
    numbered = sorted(ranks)  # as torch numbers the ranks of a group
    rank, order = numbered.index(dist_rank()), tuple(numbered.index(rank) for rank in ranks)
    both = Groups(reduce_group, gather_group, order)
    if device.type == "cpu":
        return Gloo(rank, len(ranks), both)
    return Nccl(rank, len(ranks), both, device)


def nccl_options(ctas: int, cluster: int | None, timeout: timedelta | None) -> dist.ProcessGroupNCCL.Options:
    """High priority and a bounded share of the GPU: a small collective must not queue behind a large product."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = ctas
    if cluster is not None:
        options.config.cga_cluster_size = cluster
    if timeout is not None:
        options._timeout = timeout  # torch warns if it differs from `new_group`'s
    return options


def dist_rank() -> int:
    """Global rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def _raw(flat: Tensor) -> Tensor:
    """The same memory as bytes: an all-to-all only moves them, and Gloo does not support every dtype."""
    return flat.view(torch.uint8)


def _exchange(numbers: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    gathered = numbers.new_empty(size, *numbers.shape)
    dist.all_gather_into_tensor(gathered.view(-1), numbers.contiguous().view(-1), group=group)
    return gathered


def _wait_with(pending: Pending, _held: object) -> None:
    """Wait for a collective; the buffers that it reads live until then."""
    pending.wait()


def _finish(*works: dist.Work | None) -> None:
    for work in works:
        if work is not None:
            work.wait()
