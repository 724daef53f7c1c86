"""Causal attention over packed sequences for training: which kernels do it is the caller's choice, made once.

T tokens, N heads, K kv heads, H head_dim.

Called through `Ops` by `attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.model.kernels.fused.attention.backward import attend_backward
from stoker.model.kernels.fused.attention.cudnn import attend_cudnn
from stoker.model.kernels.fused.attention.flash import attend_flash
from stoker.model.kernels.fused.attention.forward import attend_forward
from stoker.model.kernels.sequences import PackedSequences


def packed_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    sequences: PackedSequences,
    scale: float,
    window: int | None,
    attention: str,
) -> Tensor:
    return KERNELS[attention](q_TNH, k_TKH, v_TKH, sequences, scale, window)


def attend_equal(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sequences: PackedSequences, scale: float, window: int | None
) -> Tensor:
    """Compute documents of one length by cuDNN, and others by our own kernels.

    cuDNN plans anew for each shape; several lengths and windows go to ours.
    """
    longest = max(sequences.lengths)
    if window is not None or min(sequences.lengths) != longest:
        return attend_packed(q_TNH, k_TKH, v_TKH, sequences, scale, window)
    return attend_cudnn(q_TNH, k_TKH, v_TKH, longest, scale)


def attend_packed(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sequences: PackedSequences, scale: float, window: int | None
) -> Tensor:
    """Attend by our own kernels, forward and backward."""
    if torch.is_grad_enabled() and (q_TNH.requires_grad or k_TKH.requires_grad or v_TKH.requires_grad):
        out_TNH: Tensor = PackedAttention.apply(q_TNH, k_TKH, v_TKH, sequences, scale, window)
        return out_TNH
    return attend_forward(
        q_TNH, k_TKH, v_TKH, sequences.cu_seqlens, num_sequences=len(sequences.lengths), scale=scale, window=window
    )


class PackedAttention(torch.autograd.Function):
    """Keeps q, k, v, the result and one number per row."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        sequences: PackedSequences,
        scale: float,
        window: int | None,
    ) -> Tensor:
        lse_TN = torch.empty(q_TNH.shape[:2], dtype=torch.float32, device=q_TNH.device)
        out_TNH = attend_forward(
            q_TNH,
            k_TKH,
            v_TKH,
            sequences.cu_seqlens,
            num_sequences=len(sequences.lengths),
            scale=scale,
            window=window,
            lse_TN=lse_TN,
        )
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, out_TNH, lse_TN)
        ctx.sequences, ctx.scale, ctx.window = sequences, scale, window
        return out_TNH

    @staticmethod
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_TN = ctx.saved_tensors
        grads = attend_backward(
            grad_TNH.contiguous(), q, k, v, out, lse_TN, ctx.sequences.cu_seqlens, ctx.scale, ctx.window
        )
        return *grads, None, None, None


KERNELS: dict[str, Callable[..., Tensor]] = {"stoker": attend_packed, "cudnn": attend_equal, "flash": attend_flash}
