"""What the trainer demands of a layout beside what `Job.check` divides: widths, tokens, order of sums, fp8, length.

A model of a manifest is held against the same rules by admission and by the trainer, whose messages name the fields.
Here they leave layouts out that would be refused, and name what a model behind `modelFrom` does not allow. Pure; called
by `layouts` and `stoker plan`.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.pod.plan.job import Job

EIGHT_BIT_MULTIPLE = 16
"""What sizes of a product in eight bits are multiples of (`MULTIPLE` of the model's `fp8`)."""


def trainer_runs(job: Job) -> bool:
    """Whether the trainer accepts the layout of a job for which `Job.check` raises nothing."""
    return not refusals_of_trainer(job)


def refusals_of_trainer(job: Job) -> list[str]:
    """Return a line for each rule that a job breaks for which `Job.check` raises nothing."""
    return [*_of_widths(job), *_of_tokens(job), *_of_sums(job), *_of_eight_bits(job), *_of_length(job)]


def _of_widths(job: Job) -> Iterator[str]:
    model, layout = job.model, job.layout
    widths = {"intermediateSize": model.intermediate_size}
    widths |= {"moeIntermediateSize": model.expert_size} if model.num_experts and layout.expert == 1 else {}
    for name, width in widths.items():
        if width % layout.tensor:
            yield f"{name} {width} is not a multiple of tensor {layout.tensor}"


def _of_tokens(job: Job) -> Iterator[str]:
    """Ranks of `tensor` share the tokens with sequence parallelism, and where they take them to whole experts."""
    layout, tokens = job.layout, job.micro_batch_size * job.sequence_length
    cuts = layout.sequence_parallel or layout.expert > 1
    if cuts and tokens % (layout.context * layout.tensor):
        yield (
            f"microBatchSize {job.micro_batch_size} x sequenceLength {job.sequence_length} = {tokens} tokens are not a "
            f"multiple of context {layout.context} x tensor {layout.tensor}"
        )


def _of_sums(job: Job) -> Iterator[str]:
    layout = job.layout
    if job.any_data_parallel:
        names = ("data_parallel", "tensor", "context", "expert")
        yield from problems_of_sums(**{name: getattr(layout, name) for name in names})


def problems_of_sums(*, data_parallel: int = 1, tensor: int = 1, context: int = 1, expert: int = 1) -> list[str]:
    """Return a line for each size of an axis that `AnyDataParallel` does not allow, without the path of the field.

    It adds in pairs, and the gradient of an expert is one product over the rows that all ranks send it.
    """
    sizes = {"the data-parallel size": data_parallel, "tensor": tensor, "context": context}
    wrong = [f"{name} to be a power of two, got {size}" for name, size in sizes.items() if size & (size - 1)]
    if expert > 1:
        wrong.append(f"expert 1, got {expert}: the rows of an expert come from several ranks into one sum")
    return [f"deterministic AnyDataParallel needs {line}; allowed: Off, SameLayout" for line in wrong]


def _of_eight_bits(job: Job) -> list[str]:
    model = job.model
    if job.precision != "fp8":
        return []
    return problems_of_eight_bits(
        hidden=model.hidden_size,
        queries=model.num_heads * model.head_dim,
        keys=model.num_kv_heads * model.head_dim,
        feed_forward=model.intermediate_size if model.is_mixed or not model.num_experts else None,
        tensor=job.layout.tensor,
    )


def problems_of_eight_bits(
    *, hidden: int, queries: int, keys: int, feed_forward: int | None, tensor: int = 1
) -> list[str]:
    """Return a line for each size that products in eight bits do not allow, without the path of the field.

    `queries`, `keys`: of all heads together. `feed_forward`: of the layers without experts; None where there are none.
    """
    sizes = {"hiddenSize": (hidden, 1), "numHeads x headDim": (queries, tensor), "numKvHeads x headDim": (keys, tensor)}
    sizes |= {} if feed_forward is None else {"intermediateSize": (feed_forward, tensor)}
    return [
        f"precision fp8 needs {name} {size}{f' / tensor {cut}' if cut > 1 else ''} to be a multiple of "
        f"{EIGHT_BIT_MULTIPLE}; allowed: bf16, fp16, fp32"
        for name, (size, cut) in sizes.items()
        if size % (cut * EIGHT_BIT_MULTIPLE)
    ]


def _of_length(job: Job) -> Iterator[str]:
    most = job.model.max_positions
    if most and job.sequence_length > most:
        yield f"sequenceLength {job.sequence_length} is above the model's maxPositionEmbeddings {most}"
