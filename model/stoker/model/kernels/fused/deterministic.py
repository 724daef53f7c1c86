"""The fused kernels with products whose rows do not depend on their batch: what `Ops("fused", deterministic=True)`
calls.

The other kernels are the same: each row is the work of one program with a fixed order, so its bits depend on the row
alone.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels.composed import (
    experts,
    linear_swiglu,
    norm_experts,
    norm_linear,
    norm_linear_swiglu,
    prepare_blocks,
)
from stoker.model.kernels.fused.adam import adam_
from stoker.model.kernels.fused.attention.packed import packed_attention
from stoker.model.kernels.fused.attention.paged import paged_attention_deterministic as paged_attention
from stoker.model.kernels.fused.attention.runs import attend_runs, attend_runs_backward
from stoker.model.kernels.fused.cross_entropy import chunked_cross_entropy
from stoker.model.kernels.fused.embedding import embedding
from stoker.model.kernels.fused.experts import combine, dispatch, route
from stoker.model.kernels.fused.fp8 import fp8_linear
from stoker.model.kernels.fused.grouped_linear import grouped_linear_deterministic as grouped_linear
from stoker.model.kernels.fused.linear import pack
from stoker.model.kernels.fused.log_softmax import log_softmax
from stoker.model.kernels.fused.norm import add_rms_norm, rms_norm
from stoker.model.kernels.fused.rotation import rotate, rotate_and_write
from stoker.model.kernels.fused.sampler import sample
from stoker.model.kernels.fused.squares import line_squares, sum_of_squares
from stoker.model.kernels.fused.swiglu import swiglu
from stoker.model.kernels.fused.tiled_linear import linear, product

__all__ = [
    "adam_",
    "add_rms_norm",
    "attend_runs",
    "attend_runs_backward",
    "combine",
    "cross_entropy",
    "dispatch",
    "embedding",
    "experts",
    "fp8_linear",
    "grouped_linear",
    "line_squares",
    "linear",
    "linear_swiglu",
    "log_softmax",
    "logits",
    "norm_experts",
    "norm_linear",
    "norm_linear_swiglu",
    "pack",
    "packed_attention",
    "paged_attention",
    "prepare_blocks",
    "rms_norm",
    "rotate",
    "rotate_and_write",
    "route",
    "sample",
    "sum_of_squares",
    "swiglu",
]


def cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor,
    first_token: int,
    group: ProcessGroup | None,
    most_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return chunked_cross_entropy(
        product, hidden_TD, weight_VD, targets_T, weights_T, first_token, group, most_rows=most_rows
    )


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    return linear(hidden_TD, weight_VD, None)
