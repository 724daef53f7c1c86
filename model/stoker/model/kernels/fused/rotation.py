"""Norm of q and k per head and their rotation, for training alone, for the engine together with writing k and v to the
cache.

One program takes some heads of one token. All arithmetic is float32; only results are rounded. T tokens, N heads, K kv
heads, H head_dim.

Called through `Ops`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap, wait_for_last
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.sequences import DeviceSequences

HEADS = 8
"""Heads of one program."""
WARPS = 4
BACKWARD_TOKENS = 8
"""Tokens of one program of the backward pass: it adds the norms' gradients over them."""


def rotate(q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    tensors = [tensor for tensor in (q_TNH, k_TKH, rotation.q_norm, rotation.k_norm) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        q, k = Rotate.apply(q_TNH, k_TKH, *rotation)
        return q, k
    return forward(q_TNH, k_TKH, rotation)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_TKH: Tensor,
        cos_T1H: Tensor,
        sin_T1H: Tensor,
        q_norm_H: Tensor | None,
        k_norm_H: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        has_norm = q_norm_H is not None
        ctx.eps, ctx.heads = eps, (q_TNH.shape[1], k_TKH.shape[1])
        ctx.save_for_backward(cos_T1H, sin_T1H, *((q_TNH, k_TKH, q_norm_H, k_norm_H) if has_norm else ()))
        return forward(q_TNH, k_TKH, Rotation(cos_T1H, sin_T1H, q_norm_H, k_norm_H, eps))

    @staticmethod
    def backward(ctx: Any, grad_q_TNH: Tensor, grad_k_TKH: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *normed = ctx.saved_tensors
        if not normed:
            return *turn_back(grad_q_TNH, grad_k_TKH, cos, sin), None, None, None, None, None
        q, k, q_norm, k_norm = normed
        grad_q, grad_q_norm = backward_of_one(grad_q_TNH, q, q_norm, cos, sin, ctx.eps)
        grad_k, grad_k_norm = backward_of_one(grad_k_TKH, k, k_norm, cos, sin, ctx.eps)
        return grad_q, grad_k, None, None, grad_q_norm, grad_k_norm, None


def forward(q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_TNH, k_TKH))
    launch(q_TNH, k_TKH, None, rotation, q_out, k_out, None, None)
    return q_out, k_out


def turn_back(grad_q_TNH: Tensor, grad_k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the gradient the other way, without a norm: the same kernel, the sine's halves exchanged."""
    return forward(grad_q_TNH, grad_k_TKH, Rotation(cos, sin.roll(sin.shape[-1] // 2, -1)))


def rotate_and_write(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, into: CacheLayer) -> Tensor:
    q_out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    sequences = cast("DeviceSequences", into.sequences)  # never the host's
    launch(q_TNH, k_TKH, v_TKH, rotation, q_out, None, into.cache[:, into.layer], sequences.slots)
    return q_out


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    rotation: Rotation,
    q_out: Tensor,
    k_out: Tensor | None,
    cache: Tensor | None,
    slots: Tensor | None,
) -> None:
    """Launch the kernel on q, k and v.

    `cache`: one layer's view [blocks, 2, block_size, K, H]; then k and v go there instead of to `k_out`.
    """
    cos, sin, q_norm, k_norm, eps = rotation
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if not num_tokens:
        return
    q, k, cos, sin = heads_together(q), heads_together(k), heads_together(cos), heads_together(sin)
    v = k if v is None else heads_together(v)
    groups = triton.cdiv(num_heads, HEADS), triton.cdiv(num_kv_heads, HEADS)
    writes = cache is not None
    rotation_kernel[(num_tokens, groups[0] + groups[1] * (2 if writes else 1))](
        q,
        k,
        v,
        cos,
        sin,
        q_norm,
        k_norm,
        q_out,
        k_out if cache is None else cache,
        slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        cos.stride(0),
        sin.stride(0),
        cache.stride(0) if cache is not None else 0,
        cache.stride(1) if cache is not None else 0,
        cache.shape[2] if cache is not None else 1,
        num_heads,
        num_kv_heads,
        head_dim,
        eps,
        HAS_NORM=q_norm is not None,
        WRITES=writes,
        HEADS=HEADS,
        HALF=triton.next_power_of_2(max(head_dim // 2, 1)),
        enable_fp_fusion=True,
        num_warps=WARPS,
        **overlap(),
    )


def heads_together(x_TNH: Tensor) -> Tensor:
    """Return a token's heads as one run; tokens may lie apart, as in a slice of one product."""
    return x_TNH if x_TNH.stride(2) == 1 and x_TNH.stride(1) == x_TNH.shape[2] else x_TNH.contiguous()


def backward_of_one(
    grad_out: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of q (or k) before norm and rotation, and of the norm's weight."""
    num_tokens, num_heads, head_dim = x.shape
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return grad_x, torch.zeros_like(weight)
    x, grad_out, cos, sin = heads_together(x), grad_out.contiguous(), heads_together(cos), heads_together(sin)
    grid = (triton.cdiv(num_tokens, BACKWARD_TOKENS), triton.cdiv(num_heads, HEADS))
    partial = torch.empty(grid[0] * grid[1], head_dim, dtype=torch.float32, device=x.device)
    backward_kernel[grid](
        grad_out,
        x,
        weight,
        cos,
        sin,
        grad_x,
        partial,
        x.stride(0),
        cos.stride(0),
        sin.stride(0),
        num_tokens,
        num_heads,
        head_dim,
        eps,
        TOKENS=BACKWARD_TOKENS,
        HEADS=HEADS,
        HALF=triton.next_power_of_2(max(head_dim // 2, 1)),
        enable_fp_fusion=True,
        num_warps=WARPS,
    )
    return grad_x, partial.sum(0).to(weight.dtype)


@triton.jit
def rotation_kernel(
    q, k, v, cos, sin, q_norm, k_norm, q_out, k_out, slots,
    q_stride, k_stride, v_stride, cos_stride, sin_stride, block_stride, kind_stride, block_size, num_heads,
    num_kv_heads, head_dim, eps,
    HAS_NORM: tl.constexpr, WRITES: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Heads of q, then of k, then (WRITES) of v, which is neither normalised nor rotated."""
    wait_for_last(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups, kv_groups = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    is_q, is_v = group < q_groups, group >= q_groups + kv_groups
    half = head_dim // 2
    row = tl.arange(0, HALF)
    in_row = row < half
    cos_row, sin_row = cos + token * cos_stride + row, sin + token * sin_stride + row
    cos_first = tl.load(cos_row, mask=in_row, other=0.0)[None, :]
    cos_second = tl.load(cos_row + half, mask=in_row, other=0.0)[None, :]
    sin_first = tl.load(sin_row, mask=in_row, other=0.0)[None, :]
    sin_second = tl.load(sin_row + half, mask=in_row, other=0.0)[None, :]
    if WRITES:
        slot = tl.load(slots + token).to(tl.int64)
        place_in_cache = tl.maximum(slot, 0)
        cache_row = place_in_cache // block_size * block_stride
        cache_row += place_in_cache % block_size * (num_kv_heads * head_dim)
    if is_q:
        source = q + token * q_stride
        target = q_out + token * num_heads * head_dim
        head = group * HEADS
        limit = num_heads
    else:
        head = (group - q_groups) * HEADS
        limit = num_kv_heads
        source = k + token * k_stride
        if WRITES:
            limit = tl.where(slot < 0, 0, limit)  # nothing of padding is written
            target = k_out + cache_row
            if is_v:
                head = (group - q_groups - kv_groups) * HEADS
                source = v + token * v_stride
                target = k_out + cache_row + kind_stride
        else:
            target = k_out + token * num_kv_heads * head_dim
    heads = head + tl.arange(0, HEADS)[:, None]
    place = heads * head_dim + row[None, :]
    inside = (heads < limit) & in_row[None, :]
    first = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + place + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        if is_q:  # noqa: SIM108  Triton chooses between pointers in branches only
            weight = q_norm
        else:
            weight = k_norm
        scale = 1.0 / tl.sqrt_rn((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / head_dim + eps)[:, None]
        weight_first = tl.load(weight + row, mask=in_row, other=0.0).to(tl.float32)[None, :]
        weight_second = tl.load(weight + half + row, mask=in_row, other=0.0).to(tl.float32)[None, :]
        normed_first, normed_second = first * (scale * weight_first), second * (scale * weight_second)
    else:
        normed_first, normed_second = first, second
    turned_first = normed_first * cos_first + normed_second * sin_first
    turned_second = normed_second * cos_second + normed_first * sin_second
    if WRITES:
        turned_first = tl.where(is_v, first, turned_first)
        turned_second = tl.where(is_v, second, turned_second)
    tl.store(target + place, turned_first.to(q_out.dtype.element_ty), mask=inside)
    tl.store(target + place + half, turned_second.to(q_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def backward_kernel(
    grad_out, x, weight, cos, sin, grad_x, partial, stride, cos_stride, sin_stride, num_tokens, num_heads, head_dim,
    eps,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    half = head_dim // 2
    row = tl.arange(0, HALF)
    in_row = row < half
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    inside = (head < num_heads) & in_row[None, :]
    place = head * head_dim + row[None, :]
    weight_first = tl.load(weight + row, mask=in_row, other=0.0).to(tl.float32)[None, :]
    weight_second = tl.load(weight + half + row, mask=in_row, other=0.0).to(tl.float32)[None, :]
    sum_first, sum_second = tl.zeros([HALF], dtype=tl.float32), tl.zeros([HALF], dtype=tl.float32)
    begin = tl.program_id(0).to(tl.int64) * TOKENS
    for index in range(tl.minimum(TOKENS, num_tokens - begin)):
        token = begin + index
        cos_row, sin_row = cos + token * cos_stride + row, sin + token * sin_stride + row
        cos_first = tl.load(cos_row, mask=in_row, other=0.0)[None, :]
        cos_second = tl.load(cos_row + half, mask=in_row, other=0.0)[None, :]
        sin_first = tl.load(sin_row, mask=in_row, other=0.0)[None, :]
        sin_second = tl.load(sin_row + half, mask=in_row, other=0.0)[None, :]
        first = tl.load(x + token * stride + place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + token * stride + place + half, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / head_dim + eps)[:, None]
        first, second = first * scale, second * scale
        target = token * num_heads * head_dim + place
        outer_first = tl.load(grad_out + target, mask=inside, other=0.0).to(tl.float32)
        outer_second = tl.load(grad_out + target + half, mask=inside, other=0.0).to(tl.float32)
        turned_first = outer_first * cos_first + outer_second * sin_second
        turned_second = outer_second * cos_second + outer_first * sin_first
        sum_first += tl.sum(turned_first * first, 0)
        sum_second += tl.sum(turned_second * second, 0)
        inner_first, inner_second = turned_first * weight_first, turned_second * weight_second
        mean = ((tl.sum(inner_first * first, 1) + tl.sum(inner_second * second, 1)) / head_dim)[:, None]
        tl.store(grad_x + target, (scale * (inner_first - first * mean)).to(grad_x.dtype.element_ty), mask=inside)
        tl.store(
            grad_x + target + half, (scale * (inner_second - second * mean)).to(grad_x.dtype.element_ty), mask=inside
        )
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial + program.to(tl.int64) * head_dim + row, sum_first, mask=in_row)
    tl.store(partial + program.to(tl.int64) * head_dim + half + row, sum_second, mask=in_row)
