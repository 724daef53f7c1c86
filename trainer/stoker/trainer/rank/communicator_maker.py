"""Opens the communicator of a group of ranks: Gloo on CPUs, copy engines or NCCL on GPUs.

Called by `mesh`, by every rank of the gang in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from stoker.trainer.rank.communicator import Alone, Communicator, Gloo, Groups, Nccl, dist_rank, exchange_numbers
from stoker.trainer.rank.copy_engines import STEP_BYTES, CopyEngines, CudaLane

log = logging.getLogger("stoker.trainer")


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
    copies: bool = False
    """Copy engines move what is long; the ranks must be in one pod."""


SHARE = GpuShare()


def make_communicator(
    ranks: Sequence[int], device: torch.device, timeout: timedelta | None = None, share: GpuShare = SHARE
) -> Communicator | None:
    """Make a communicator over these global ranks; None on other ranks (collective over the whole gang).

    Slices are numbered by global rank; `ranks` gives the order in which they are summed. `timeout` applies to one
    collective. A group does not inherit it from the group of all ranks, and torch's default with NCCL is ten minutes.
    """
    if len(ranks) == 1:
        return Alone() if dist_rank() == ranks[0] else None
    reduce_group, gather_group = (
        open_group(ranks, device, ctas, share.cluster, timeout) for ctas in (share.reduce_ctas, share.gather_ctas)
    )
    if dist_rank() not in ranks:
        return None
    numbered = sorted(ranks)  # as torch numbers the ranks of a group
    rank, order = numbered.index(dist_rank()), tuple(numbered.index(rank) for rank in ranks)
    groups = Groups(reduce_group, gather_group, order)
    if device.type == "cpu":
        return Gloo(rank, len(ranks), groups)
    copies = make_copy_engines(rank, groups, device) if share.copies else None
    return copies or Nccl(rank, len(ranks), groups, device)


def open_group(
    ranks: Sequence[int], device: torch.device, ctas: int, cluster: int | None, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Open a process group; on ranks outside it is of no use (collective over the whole gang)."""
    options = None if device.type == "cpu" else nccl_options(ctas, cluster, timeout)
    return cast("dist.ProcessGroup", dist.new_group(list(ranks), timeout=timeout, pg_options=options))


def make_copy_engines(rank: int, groups: Groups, device: torch.device) -> CopyEngines | None:
    """Map the memory of all ranks; None on all of them where that fails on one (collective)."""
    lanes, problem = [], "another rank cannot map it"
    try:
        lanes = [CudaLane(groups.gather, device, STEP_BYTES) for _ in range(2)]
    except (RuntimeError, ImportError, OSError) as error:
        problem = str(error)
    size = len(groups.order)
    mapped = torch.tensor([float(len(lanes) == 2)], device=device)
    if bool(exchange_numbers(mapped, size, groups.gather).min() > 0):
        return CopyEngines(rank, size, groups, *lanes)
    log.warning("NCCL moves gradients and weights, because the GPUs' memory cannot be mapped: %s", problem)
    return None


def nccl_options(ctas: int, cluster: int | None, timeout: timedelta | None) -> dist.ProcessGroupNCCL.Options:
    """High priority and a bounded share of the GPU: a small collective must not queue behind a large product."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = ctas
    if cluster is not None:
        options.config.cga_cluster_size = cluster
    if timeout is not None:
        options._timeout = timeout  # torch warns if it differs from `new_group`'s
    return options
