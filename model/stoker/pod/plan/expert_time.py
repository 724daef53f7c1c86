"""Time of a layer with experts beside its products: moving rows, and the wait of the host for their number.

Each token has K rows, one for each of its experts (`model/experts`, `model/expert_exchange`). Measured on two H200s
(row `experts` of `bench/gpu/layouts_gpu.py`).
"""

from __future__ import annotations

from stoker.pod.plan.job import Job

DISPATCH_PASSES = 6.0
"""Times that all rows are read or written for dispatch and combine, forward and backward.

Dispatch copies each token's row to the runs of its experts, combine is the weighted sum of a token's rows.
"""
EXCHANGE_PASSES = 24.0
"""The same for putting rows into the order of experts and of ranks around each all-to-all.

Four selections of rows, each of which reads and writes them, at a third of the rate of copies.
"""
HOST_WAIT_S = 1.0e-3
"""Seconds in which the device of a rank idles in each layer, because the host reads the number of rows."""


def moved_bytes(job: Job) -> float:
    """Return the bytes that moving the rows of one token reads and writes in one layer, a mean over all layers."""
    model = job.model
    passes = DISPATCH_PASSES + (EXCHANGE_PASSES if job.layout.expert > 1 else 0.0)
    return model.expert_share * passes * job.expert_rows * model.hidden_size * job.value_bytes


def host_waits(job: Job, layers: float) -> float:
    """Return the seconds of one step in which ranks wait for the host, over `layers` layers."""
    if job.layout.expert == 1:
        return 0.0
    passes = 2.0 if job.layout.recompute == "full" else 1.0
    return passes * job.micro_batches * layers * job.model.expert_share * HOST_WAIT_S
