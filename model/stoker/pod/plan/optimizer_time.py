"""Time that the optimizer adds to a step, with its state on the device, in host memory or in a file."""

from __future__ import annotations

from stoker.pod.plan.gpu import COPIES, Gpu
from stoker.pod.plan.job import Job
from stoker.pod.plan.memory import sends_each, sharded_state, state_bytes
from stoker.pod.plan.stage import PipelineRank, rank_parameters

OPTIMIZER_BYTES = 30
"""Read and written for one element: gradient, master, two moments, the rounded weight."""
NVME = 3e9
"""Bytes per second of a data-centre NVMe drive, one direction, shared by the ranks of a node."""
PCIE = 50e9
"""Bytes per second between device and host, each direction while the other one runs too."""
FORWARD = 1 / 3
"""The forward part of a micro-batch's passes."""


def optimizer_time(job: Job, gpu: Gpu, rank: PipelineRank, micro_batch_s: float) -> float:
    """Return the seconds that the update adds. `micro_batch_s`: of both passes of one micro-batch."""
    parameters = rank_parameters(job, rank)
    elements = parameters.trained if job.layout.zero_stage == 0 else sharded_state(job, parameters)
    update = job.update_passes * elements * OPTIMIZER_BYTES / (gpu.bandwidth * COPIES)
    moved = job.update_passes * elements * state_bytes(job)
    if job.offload == "nvme":  # reads and writes at the same time, but not beside a pass
        ranks = min(job.ranks_per_node, job.layout.world_size)
        return max(update, moved * ranks / NVME)
    return max(update, _exposed(moved / PCIE, early_share(job), micro_batch_s)) if job.offload else update


def early_share(job: Job) -> float:
    """Return the part of state in host memory that arrives before its update may begin.

    It waits in the shards of other ranks of the gradient's sum, which nothing reads any more. A rank that sends each
    micro-batch's gradient has no such sum.
    """
    if job.offload != "host" or job.layout.zero_stage == 0 or sends_each(job):
        return 0.0
    return min(1.0, (job.layout.state_shards - 1) * 4 / state_bytes(job)) / job.update_passes


def _exposed(one_way_s: float, share: float, micro_batch_s: float) -> float:
    """Seconds of copies that no pass hides.

    The early part is read beside the last backward pass. The rest is read and written at once, and the forward pass
    that it is for runs as far as its weights are there. The early part leaves last; the next backward pass needs its
    memory again.
    """
    forward, backward = FORWARD * micro_batch_s, (1 - FORWARD) * micro_batch_s
    early = share * one_way_s
    arrived = max(0.0, early - backward) + one_way_s - early
    leaving = max(0.0, early - max(0.0, forward - arrived))
    return max(0.0, arrived - forward) + max(0.0, leaving - backward)
