"""Memory and traffic of ranks that share sequences, by the way in which they exchange keys and values."""

from __future__ import annotations

from stoker.pod.plan.job import Job

FLOAT_BYTES = 4
"""Gradients of other ranks' keys and values are summed in float32."""


def context_buffers(job: Job) -> float:
    """Return the bytes that one layer's attention needs for a moment, in backward, beside what it keeps."""
    layout, size = job.layout, job.value_bytes
    keys, heads = _keys(job), _heads(job)
    if layout.context == 1:
        return 0.0
    if layout.context_method == "AllGather":  # all ranks' keys, their gradients by run, and the sum
        return layout.context * keys * (size + 2 * FLOAT_BYTES) + heads * FLOAT_BYTES
    if layout.context_method == "Ring":  # two blocks on their way; a block's gradients made, received, added and sent
        return keys * (2 * size + 4 * FLOAT_BYTES) + 2 * heads * FLOAT_BYTES
    return 2 * size * (heads + keys * _copies(job))


def exchanged_bytes(job: Job) -> float:
    """Return the bytes of one token that a layer keeps with Ulysses beside its own: values and results of a few heads.

    Queries and keys of these heads take the place of its own rotated ones; kv heads of which there are fewer than ranks
    are kept several times.
    """
    copies = _copies(job)
    keys = (2 * copies - 1) * _keys(job) / 2
    return (_heads(job) + keys) * job.value_bytes / job.tokens


def context_sent(job: Job) -> float:
    """Return the bytes that one layer sends for one micro-batch."""
    layout, size = job.layout, job.value_bytes
    keys, heads, others = _keys(job), _heads(job), layout.context - 1
    again = 1 if layout.recompute == "full" else 0
    if layout.context_method == "AllGather":  # gathered for forward and backward; gradients go back
        return (3 + again) * keys * others * size
    if layout.context_method == "Ring":  # round for forward and backward; gradients go all the way to their owner
        return keys * ((2 + again) * others * size + (others + 1) * FLOAT_BYTES * (others > 0))
    return (2 + again) * (2 * heads + keys * _copies(job)) * others / layout.context * size


def merged_bytes(job: Job) -> float:
    """Return the bytes that the ring reads and writes for one token of one layer to add what each block gives.

    Results, gradients of queries, and those of keys and values are fp32 sums: read, added to and written.
    """
    layout = job.layout
    if layout.context == 1 or layout.context_method != "Ring":
        return 0.0
    return 3 * FLOAT_BYTES * (layout.context - 1) * (2 * _heads(job) + _keys(job)) / job.tokens


def _keys(job: Job) -> float:
    """Elements of the keys and values of one rank's tokens."""
    return 2 * job.tokens * job.model.num_kv_heads * job.model.head_dim / job.layout.tensor


def _heads(job: Job) -> float:
    """Elements of the queries of one rank's tokens."""
    return job.tokens * job.model.num_heads * job.model.head_dim / job.layout.tensor


def _copies(job: Job) -> float:
    """Ranks that get the same kv head, where there are fewer heads than ranks."""
    return max(1.0, job.layout.context * job.layout.tensor / job.model.num_kv_heads)
