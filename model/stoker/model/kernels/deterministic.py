"""Deterministic CPU kernels: a row's bits do not depend on its batch, its chunk or its place.

Products always have the same shape: 16 rows, the last tile padded. Sums are ordered: halves are added elementwise until
one column is left. Attention walks the keys in tiles of 64 from position 0, the same for packed and for paged
sequences; a tile that is wholly masked changes no bit. Gradients repeat for the same micro-batch, whatever else the run
does. T tokens, D input size, E output size, N heads, K kv heads, G = N / K, H head_dim, F ffn, V vocab, L keys, R = G *
16 query rows of one kv head.

The intra-op thread count must be 1. Pure; called by `Ops` as the deterministic form of the reference kernels.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels import composed, expert_rows, grouped_product, reference
from stoker.model.kernels.cross_entropy import chunked_cross_entropy
from stoker.model.kernels.expert_rows import ExpertRows, Routes
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.sequences import PackedSequences, PagedSequences
from stoker.model.kernels.weight_queue import later, now_or_later

ROW_TILE = 16
"""Rows of every product."""
KEY_TILE = 64
"""Keys that attention takes at once."""
MIN_COLUMNS = 16
"""Results narrower than a vector register (attention's values: not a multiple of it) depend on the row's place; they
are padded.
"""
LOWEST = -1e30
"""A running maximum that is below every score, yet finite."""

embedding = reference.embedding
fp8_linear = reference.fp8_linear
norm_linear = composed.norm_linear
norm_linear_swiglu = composed.norm_linear_swiglu
linear_swiglu = composed.linear_swiglu
experts = composed.experts
norm_experts = composed.norm_experts
prepare_blocks = composed.prepare_blocks
sample = reference.sample
line_squares = reference.line_squares
sum_of_squares = reference.sum_of_squares
adam_ = reference.adam_
dispatch = reference.dispatch
attend_runs = reference.attend_runs
attend_runs_backward = reference.attend_runs_backward


def pack(weight_ED: Tensor) -> Tensor:
    """Return the weight itself: trainer and engine must read it in the same way."""
    return weight_ED


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    y_TE: Tensor = RowTiledLinear.apply(x_TD, weight_ED)
    return y_TE if bias_E is None else y_TE + bias_E


class RowTiledLinear(torch.autograd.Function):
    """Forward: x @ W^T tile by tile. Backward: plain products."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.later = later(weight_ED)
        return tiled_product(x_TD, weight_ED)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_weight = now_or_later(ctx.later, lambda: grad_TE.t() @ x_TD) if needs_weight else None
        return grad_TE @ weight_ED if needs_x else None, grad_weight


def tiled_product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    num_rows, x_TD = x_TD.shape[0], pad_rows(x_TD.contiguous(), ROW_TILE)
    columns = (weight_ED if weight_ED.shape[0] >= MIN_COLUMNS else pad_rows(weight_ED, MIN_COLUMNS)).t()
    y_TE = torch.empty(x_TD.shape[0], columns.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    for begin in range(0, x_TD.shape[0], ROW_TILE):
        torch.mm(x_TD[begin : begin + ROW_TILE], columns, out=y_TE[begin : begin + ROW_TILE])
    return y_TE[:num_rows, : weight_ED.shape[0]]


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[0] % multiple
    return x if missing == 0 else F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))


def pad_columns(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % MIN_COLUMNS
    return x if missing == 0 else F.pad(x, (0, missing))


def ordered_sum(x: Tensor) -> Tensor:
    """Sum of the last dim, kept as one column: halves are added until one element is left, so the order is fixed by the
    length alone.
    """
    while (size := x.shape[-1]) > 1:
        half = size // 2
        total = x[..., :half] + x[..., half : 2 * half]
        if size % 2:
            total[..., :1] += x[..., -1:]
        x = total
    return x


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    result: Tensor = OrderedRmsNorm.apply(x_TD, weight_D, eps)
    return result


class OrderedRmsNorm(torch.autograd.Function):
    """y = x * r * w with r = 1 / sqrt(mean(x^2) + eps), in float32."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = x_TD.float()
        scale_T1 = 1.0 / torch.sqrt(ordered_sum(wide * wide) / x_TD.shape[-1] + eps)
        ctx.save_for_backward(x_TD, weight_D, scale_T1)
        return (wide * scale_T1 * weight_D.float()).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D, scale_T1 = ctx.saved_tensors
        wide, grad = x_TD.float(), grad_TD.float()
        normed, inner = wide * scale_T1, grad * weight_D.float()
        grad_x = scale_T1 * (inner - normed * ((inner * normed).sum(-1, keepdim=True) / x_TD.shape[-1]))
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        return grad_x.to(x_TD.dtype), grad_weight.to(weight_D.dtype), None


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x_TD + residual_TD
    return rms_norm(total, weight_D, eps), total


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """Compute silu(gate) * up with x / (1 + exp(-x)): torch's silu depends on an element's place."""
    gate, up = (half.float().contiguous() for half in gate_up_TF.chunk(2, -1))
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up_TF.dtype)


def route(logits_TE: Tensor, num_choices: int, normalise: bool) -> Routes:
    """Choose by a stable sort: of equal probabilities the lower expert comes first."""
    probabilities_TE = OrderedSoftmax.apply(logits_TE)
    weights_TE, experts_TE = torch.sort(probabilities_TE, dim=-1, descending=True, stable=True)
    weights_TK, experts_TK = weights_TE[:, :num_choices], experts_TE[:, :num_choices]
    if normalise:
        total_T1 = weights_TK[:, :1]
        for choice in range(1, num_choices):
            total_T1 = total_T1 + weights_TK[:, choice : choice + 1]
        weights_TK = weights_TK / total_T1
    return Routes(weights_TK, experts_TK)


class OrderedSoftmax(torch.autograd.Function):
    """Softmax over the last dim in float32."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor) -> Tensor:
        exponentials = torch.exp(x_TE - x_TE.amax(-1, keepdim=True))
        y_TE = exponentials / ordered_sum(exponentials)
        ctx.save_for_backward(y_TE)
        return y_TE

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> Tensor:
        y_TE: Tensor = ctx.saved_tensors[0]
        return y_TE * (grad_TE - (grad_TE * y_TE).sum(-1, keepdim=True))


def grouped_linear(x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor) -> Tensor:
    return grouped_product.grouped_linear(x_SD, weight_RD, ends_E, tiled_product, F.linear)


def combine(y_SD: Tensor, weights_TK: Tensor, rows: ExpertRows) -> Tensor:
    """Add the experts one after another, by products and sums as separate operations."""
    y_TKD = expert_rows.gather_choices(y_SD, rows)
    total_TD = y_TKD[:, 0] * weights_TK[:, :1]
    for choice in range(1, rows.num_choices):
        total_TD = total_TD + y_TKD[:, choice] * weights_TK[:, choice : choice + 1]
    return total_TD.to(y_SD.dtype)


def rotate(q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    cos_T1H, sin_T1H, q_norm_H, k_norm_H, eps = rotation
    if q_norm_H is not None and k_norm_H is not None:
        q_TNH, k_TKH = rms_norm(q_TNH, q_norm_H, eps), rms_norm(k_TKH, k_norm_H, eps)
    return rotate_pairs(q_TNH, cos_T1H, sin_T1H), rotate_pairs(k_TKH, cos_T1H, sin_T1H)


def rotate_pairs(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Rotate by products and their sum as separate ops.

    A fused multiply-add would round differently in a vector's tail.
    """
    wide = x_TNH.float()
    return (wide * cos_T1H + wide.roll(wide.shape[-1] // 2, -1) * sin_T1H).to(x_TNH.dtype)


def packed_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    sequences: PackedSequences,
    scale: float,
    window: int | None,
    _attention: str = "stoker",
) -> Tensor:
    lengths = [end - begin for begin, end in itertools.pairwise(sequences.bounds)]
    # torch.split, not slices: a slice's gradient is a buffer of zeros as long as the whole
    triples = zip(torch.split(q_TNH, lengths), torch.split(k_TKH, lengths), torch.split(v_TKH, lengths), strict=True)
    return torch.cat([TiledAttention.apply(q, k, v, scale, window) for q, k, v in triples])


class TiledAttention(torch.autograd.Function):
    """One sequence whose keys are all there.

    Forward: tiles. Backward: the softmax's formula, one kv head at a time, in float32.
    """

    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, scale: float, window: int | None) -> Tensor:
        out_TNH, lse_TN = attend_tiles(q_TNH, k_LKH, v_LKH, scale, window)
        ctx.save_for_backward(q_TNH, k_LKH, v_LKH, out_TNH, lse_TN)
        ctx.scale, ctx.window = scale, window
        return out_TNH

    @staticmethod
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        # detach: a product of three dims chooses its kernel by `requires_grad`, which hooks on saved tensors change
        q, k, v, out, lse_TN = (saved.detach() for saved in ctx.saved_tensors)
        (grad_q, grad_k, grad_v), group = (
            (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v)),
            q.shape[1] // k.shape[1],
        )
        hidden = ~reference.causal_mask(q.shape[0], k.shape[0], ctx.window, q.device)
        for head in range(k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            q_GTH, grad_GTH, out_GTH = (x[:, heads].transpose(0, 1).float() for x in (q, grad_TNH, out))
            k_LH, v_LH, lse_GT1 = k[:, head].float(), v[:, head].float(), lse_TN[:, heads].t().unsqueeze(-1)
            p_GTL = torch.exp((q_GTH @ k_LH.t() * ctx.scale).masked_fill_(hidden, float("-inf")) - lse_GT1)
            inner_GT1 = (grad_GTH * out_GTH).sum(-1, keepdim=True)
            grad_s_GTL = p_GTL * (grad_GTH @ v_LH.t() - inner_GT1) * ctx.scale
            grad_q[:, heads] = (grad_s_GTL @ k_LH).transpose(0, 1)
            grad_k[:, head] = torch.einsum("gtl,gth->lh", grad_s_GTL, q_GTH)
            grad_v[:, head] = torch.einsum("gtl,gth->lh", p_GTL, grad_GTH)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def attend_tiles(
    q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """The queries are the last positions of the sequence. out_TNH in q's dtype and the log of the softmax's sum, lse_TN
    in float32.
    """
    num_queries, num_heads, head_dim = q_TNH.shape
    num_kv_heads, seq_len = k_LKH.shape[1], k_LKH.shape[0]
    q_KGTH = (
        pad_rows(q_TNH.float(), ROW_TILE)
        .reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        .permute(1, 2, 0, 3)
    )
    keys_KHL = pad_rows(k_LKH.float(), KEY_TILE).permute(1, 2, 0)
    values_KLH = pad_columns(pad_rows(v_LKH.float(), KEY_TILE)).transpose(0, 1)
    outputs, sums = [], []
    for begin in range(0, num_queries, ROW_TILE):
        first = seq_len - num_queries + begin
        q_KRH = q_KGTH[:, :, begin : begin + ROW_TILE].reshape(num_kv_heads, -1, head_dim)
        positions_R = (
            (first + torch.arange(ROW_TILE, device=q_TNH.device))
            .clamp(max=seq_len - 1)
            .repeat(num_heads // num_kv_heads)
        )
        out_KRH, lse_KR = attend_row_tile(
            q_KRH, keys_KHL, values_KLH, positions_R, min(first + ROW_TILE, seq_len), scale, window
        )
        outputs.append(out_KRH[..., :head_dim].reshape(num_heads, ROW_TILE, head_dim))
        sums.append(lse_KR.view(num_heads, ROW_TILE))
    out_TNH = torch.cat(outputs, 1).transpose(0, 1)[:num_queries].to(q_TNH.dtype)
    return out_TNH.contiguous(), torch.cat(sums, 1).t()[:num_queries]


def attend_row_tile(
    q_KRH: Tensor,
    keys_KHL: Tensor,
    values_KLH: Tensor,
    positions_R: Tensor,
    num_keys: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """One tile of queries over the key tiles that hold positions below `num_keys`: running maximum, sum and weighted
    values.
    """
    biggest = torch.full((*q_KRH.shape[:2], 1), LOWEST, device=q_KRH.device)
    total, out_KRH = torch.zeros_like(biggest), torch.zeros(*q_KRH.shape[:2], values_KLH.shape[-1], device=q_KRH.device)
    for begin in range(0, num_keys, KEY_TILE):
        tile = slice(begin, begin + KEY_TILE)
        key_positions = torch.arange(begin, begin + KEY_TILE, device=q_KRH.device)
        hidden = key_positions[None, :] > positions_R[:, None]
        if window is not None:
            hidden |= key_positions[None, :] <= positions_R[:, None] - window
        scores_KRk = (torch.bmm(q_KRH, keys_KHL[:, :, tile].contiguous()) * scale).masked_fill_(hidden, float("-inf"))
        new_biggest = torch.maximum(biggest, scores_KRk.amax(-1, keepdim=True))
        weights_KRk = torch.exp(scores_KRk - new_biggest)
        shrink = torch.exp(biggest - new_biggest)
        total = total * shrink + ordered_sum(weights_KRk)
        out_KRH = out_KRH * shrink + torch.bmm(weights_KRk, values_KLH[:, tile].contiguous())
        biggest = new_biggest
    return out_KRH / total, (biggest + torch.log(total)).squeeze(-1)


def rotate_and_write(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, into: CacheLayer) -> Tensor:
    q_TNH, k_TKH = rotate(q_TNH, k_TKH, rotation)
    reference.write_cache(k_TKH, v_TKH, into)
    return q_TNH


def paged_attention(
    q_TNH: Tensor, cache: Tensor, layer: int, sequences: PagedSequences, scale: float, window: int | None
) -> Tensor:
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    for sequence in sequences.prefill:
        rows = slice(sequence.query_start, sequence.query_end)
        k_LKH, v_LKH = reference.read_cache(cache, layer, sequence)
        out_TNH[rows] = attend_tiles(q_TNH[rows], k_LKH, v_LKH, scale, window)[0]
    return out_TNH


def log_softmax(logits_TV: Tensor) -> Tensor:
    wide = logits_TV.float()
    shifted = wide - wide.amax(-1, keepdim=True)
    return shifted - torch.log(ordered_sum(torch.exp(shifted)))


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
        tiled_product, ordered_sum, hidden_TD, weight_VD, targets_T, weights_T, first_token, group, most_rows=most_rows
    )


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    return linear(hidden_TD, weight_VD, None)
