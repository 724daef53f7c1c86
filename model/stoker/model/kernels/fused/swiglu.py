"""silu(gate) * up over the halves of the last dim, elementwise in float32. T rows, F columns of one half.

Called through `Ops`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap, wait_for_last

BLOCK = 1024
"""Columns of one program."""


def swiglu(gate_up_TF: Tensor) -> Tensor:
    if torch.is_grad_enabled() and gate_up_TF.requires_grad:
        result: Tensor = SwiGlu.apply(gate_up_TF)
        return result
    return forward(gate_up_TF)


class SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TF)
        return forward(gate_up_TF)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_TF,) = ctx.saved_tensors
        gate_up, grad = gate_up_TF.contiguous(), grad_TF.contiguous()
        grad_gate_up = torch.empty_like(gate_up)
        if grad.numel():
            backward_kernel[grid(grad)](gate_up, grad, grad_gate_up, grad.shape[-1], BLOCK=BLOCK, enable_fp_fusion=True)
        return grad_gate_up


def forward(gate_up_TF: Tensor) -> Tensor:
    gate_up = gate_up_TF.contiguous()
    result = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    if result.numel():
        forward_kernel[grid(result)](gate_up, result, result.shape[-1], BLOCK=BLOCK, enable_fp_fusion=True, **overlap())
    return result


def grid(half: Tensor) -> tuple[int, int]:
    return half.numel() // half.shape[-1], triton.cdiv(half.shape[-1], BLOCK)


@triton.jit
def forward_kernel(gate_up, result, columns, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * 2 * columns + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=inside).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(result + row * columns + column, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(gate_up, grad, grad_gate_up, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = row * 2 * columns + column
    gate = tl.load(gate_up + place, mask=inside).to(tl.float32)
    up = tl.load(gate_up + place + columns, mask=inside).to(tl.float32)
    outer = tl.load(grad + row * columns + column, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = outer * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_up + place, grad_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
    tl.store(grad_gate_up + place + columns, (outer * gate * sigmoid).to(grad_gate_up.dtype.element_ty), mask=inside)
