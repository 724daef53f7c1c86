"""The fused kernels, one per operation: what `Ops("fused")` calls. Products are cuBLAS's where it is fast."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels.composed import prepare_blocks
from stoker.model.kernels.fused.adam import adam_
from stoker.model.kernels.fused.attention.packed import packed_attention
from stoker.model.kernels.fused.attention.paged import paged_attention
from stoker.model.kernels.fused.attention.runs import attend_runs, attend_runs_backward
from stoker.model.kernels.fused.cross_entropy import chunked_cross_entropy
from stoker.model.kernels.fused.embedding import embedding
from stoker.model.kernels.fused.expert_layer import experts, norm_experts
from stoker.model.kernels.fused.experts import combine, dispatch, route
from stoker.model.kernels.fused.fp8 import fp8_linear
from stoker.model.kernels.fused.grouped_linear import grouped_linear
from stoker.model.kernels.fused.linear import linear, pack, plain_product
from stoker.model.kernels.fused.log_softmax import log_softmax
from stoker.model.kernels.fused.logits import logits
from stoker.model.kernels.fused.norm import add_rms_norm, rms_norm
from stoker.model.kernels.fused.norm_linear import linear_swiglu, norm_linear, norm_linear_swiglu
from stoker.model.kernels.fused.rotation import rotate, rotate_and_write
from stoker.model.kernels.fused.sampler import sample
from stoker.model.kernels.fused.squares import line_squares, sum_of_squares
from stoker.model.kernels.fused.swiglu import swiglu

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
        plain_product, hidden_TD, weight_VD, targets_T, weights_T, first_token, group, most_rows=most_rows
    )
