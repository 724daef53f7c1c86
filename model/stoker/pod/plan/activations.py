"""Activations that a layer keeps for its backward pass, and which of them are computed again.

As the fused kernels keep them: sums before and results after both norms, the projections of q, k and v, their rotated
copies, attention's result, gate and up, and their product. In fp8 the inputs of products are kept in one byte, but not
with `selective`, which computes them again. With sequence parallelism products keep the gathered tokens of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.pod.plan.job import Job
from stoker.pod.plan.model_size import ModelSize


@dataclass(frozen=True)
class Kept:
    """One tensor of a layer."""

    name: str
    bytes_per_token: float
    """On one rank."""
    work_per_token: float
    """Operations that computing it again costs; element-wise ones count by their bytes, see `COPY_WORK`."""


COPY_WORK = 100.0
"""Operations that one byte of an element-wise kernel costs: the ratio of a GPU's peak to its bandwidth, less what
products miss of it.
"""


CHEAP_NAMES = ("attention norm", "rotated q and k", "feed-forward norm", "activated")
"""Tensors that element-wise kernels make, which `selective` computes again."""


def keeps_casts(job: Job) -> bool:
    """Whether backward gets the inputs of products in eight bits."""
    return job.precision == "fp8" and job.layout.recompute != "selective"


def layer_tensors(job: Job) -> list[Kept]:
    """Return what one layer keeps of one token."""
    model, layout, size = job.model, job.layout, job.value_bytes
    stream = model.hidden_size * size / (layout.tensor if layout.sequence_parallel else 1)
    heads = model.num_heads * model.head_dim * size / layout.tensor
    kv_heads = model.num_kv_heads * model.head_dim * size / layout.tensor
    products = 2.0 / layout.tensor
    whole, attended = (model.hidden_size, heads / size) if keeps_casts(job) else (model.hidden_size * size, 0.0)
    second = model.hidden_size * size if model.num_experts else whole  # experts take two bytes
    is_gathered_for_experts = bool(model.num_experts) and layout.sequence_parallel
    found = [
        Kept("residual sums", 2 * stream, 0.0),
        Kept("attention norm", whole, 2 * stream * COPY_WORK),
        Kept("gathered tokens" if is_gathered_for_experts else "feed-forward norm", second, 2 * stream * COPY_WORK),
        Kept("q, k and v", heads + 2 * kv_heads, products * model.hidden_size * (heads + 2 * kv_heads) / size),
        Kept("rotated q and k", heads + kv_heads, 2 * (heads + kv_heads) * COPY_WORK),
        Kept(
            "attention",
            heads + attended + 4 * model.num_heads / layout.tensor,
            model.attention_work(job.sequence_length) * products,
        ),
    ]
    return found + (_expert_tensors(job) if model.num_experts else _feed_forward_tensors(job))


def _feed_forward_tensors(job: Job) -> list[Kept]:
    model, tensor = job.model, job.layout.tensor
    width = model.intermediate_size * job.value_bytes / tensor
    products = 4.0 * model.hidden_size * model.intermediate_size / tensor
    activated = width / job.value_bytes if keeps_casts(job) else width
    return [Kept("gate and up", 2 * width, products), Kept("activated", activated, 3 * width * COPY_WORK)]


def _expert_tensors(job: Job) -> list[Kept]:
    """Each token is copied to its experts; with equal loads a rank computes as many copies as it sends."""
    model, size = job.model, job.value_bytes
    cut = job.layout.tensor if job.layout.expert == 1 else 1
    copies = job.expert_rows
    rows, width = copies * model.hidden_size * size, copies * model.expert_size * size / cut
    products = 4.0 * copies * model.hidden_size * model.expert_size / cut
    return [
        Kept("router", 8.0 * model.num_experts, 2.0 * model.hidden_size * model.num_experts),
        Kept("dispatched tokens", rows, 2 * rows * COPY_WORK),
        Kept("gate and up", 2 * width, products),
        Kept("activated", width, 3 * width * COPY_WORK),
        Kept("experts' results", rows, products / 2),
    ]


def router_bytes(model: ModelSize, size: int) -> float:
    """Bytes of one token that a router and the order of rows keep beside logits and probabilities, at most.

    The router's input in fp32, a few numbers for each choice, and one for each expert.
    """
    wide = 4.0 * model.hidden_size if size < 4 else 0.0
    return wide + 4.0 * model.num_experts + 48.0 * model.experts_per_token


@dataclass(frozen=True)
class Recomputed:
    """What a layer keeps and computes again; the mean over the layers where they differ."""

    kept_bytes: float
    """Per token of one layer."""
    again: tuple[str, ...]
    """Names of the tensors that backward computes again."""
    work: float
    """Operations of that, per token of one layer."""


def choose_kept(job: Job) -> Recomputed:
    """Choose the tensors of a layer that are kept, without a budget (with one: `layer_choice`).

    `none` keeps all, `full` only the layer's input. `selective` keeps products and drops what element-wise kernels
    give.
    """
    tensors = layer_tensors(job)
    everything = sum(item.bytes_per_token for item in tensors)
    if job.layout.recompute == "none":
        return Recomputed(everything, (), 0.0)
    inputs = next(item.bytes_per_token for item in tensors if item.name == "residual sums")
    if job.layout.recompute == "full":
        work = sum(item.work_per_token for item in tensors)
        return Recomputed(inputs, tuple(item.name for item in tensors), work)
    dropped = [item for item in tensors if item.name in CHEAP_NAMES]
    kept = everything - sum(item.bytes_per_token for item in dropped)
    return Recomputed(kept, tuple(item.name for item in dropped), sum(item.work_per_token for item in dropped))
