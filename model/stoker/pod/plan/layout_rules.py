"""What the trainer demands of a layout beside what `Job.check` divides: widths, tokens, orders of sums, eight bits.

A job of a manifest is held against the same rules by admission and by the trainer, whose messages name the fields; here
they leave layouts out that would be refused. Pure; called by `layouts`.
"""

from __future__ import annotations

from stoker.pod.plan.job import Job

EIGHT_BIT_MULTIPLE = 16
"""What sizes of a product in eight bits are multiples of (`MULTIPLE` of the model's `fp8`)."""


def trainer_runs(job: Job) -> bool:
    """Whether the trainer accepts the layout of a job for which `Job.check` raises nothing."""
    return all(holds(job) for holds in (_widths_divide, _tokens_divide, _sums_have_an_order, _fits_eight_bits))


def _widths_divide(job: Job) -> bool:
    model, layout = job.model, job.layout
    widths = [model.intermediate_size]
    widths += [model.expert_size] if model.num_experts and layout.expert == 1 else []
    return not any(width % layout.tensor for width in widths)


def _tokens_divide(job: Job) -> bool:
    """Ranks of `tensor` share the tokens with sequence parallelism, and where they take them to whole experts."""
    layout = job.layout
    cuts = layout.sequence_parallel or layout.expert > 1
    return not cuts or job.micro_batch_size * job.sequence_length % (layout.context * layout.tensor) == 0


def _sums_have_an_order(job: Job) -> bool:
    """`AnyDataParallel` adds in pairs, and each expert's rows come from one rank."""
    layout = job.layout
    sizes = layout.data_parallel, layout.tensor, layout.context
    return not job.any_data_parallel or (layout.expert == 1 and not any(size & (size - 1) for size in sizes))


def _fits_eight_bits(job: Job) -> bool:
    model, tensor = job.model, job.layout.tensor
    cut = [model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim]
    cut += [model.intermediate_size] if model.is_mixed or not model.num_experts else []
    sizes = [model.hidden_size, *(size / tensor for size in cut)]
    return job.precision != "fp8" or not any(size % EIGHT_BIT_MULTIPLE for size in sizes)
