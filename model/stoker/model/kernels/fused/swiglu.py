"""silu(gate) * up over the halves of the last dim, elementwise in float32. T rows, F columns of one half.

After a product in eight bits both passes note the largest magnitude of what they make, for the next cast.

Called through `Ops`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fp8 import is_product, note_amax
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
        ctx.notes = is_product(gate_up_TF)
        return forward(gate_up_TF)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_TF,) = ctx.saved_tensors
        gate_up, grad = gate_up_TF.contiguous(), grad_TF.contiguous()
        grad_gate_up = torch.empty_like(gate_up)
        if grad.numel():
            amax = parts(grad) if ctx.notes else None
            backward_kernel[grid(grad)](
                gate_up, grad, grad_gate_up, amax, grad.shape[-1], NOTES=ctx.notes, BLOCK=BLOCK, enable_fp_fusion=True
            )
            if amax is not None:
                note_amax(grad_gate_up, amax)
        return grad_gate_up


def forward(gate_up_TF: Tensor) -> Tensor:
    gate_up = gate_up_TF.contiguous()
    result = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    if result.numel():
        notes = is_product(gate_up_TF)
        amax = parts(result) if notes else None
        forward_kernel[grid(result)](
            gate_up, result, amax, result.shape[-1], NOTES=notes, BLOCK=BLOCK, enable_fp_fusion=True, **overlap()
        )
        if amax is not None:
            note_amax(result, amax)
    return result


def parts(half: Tensor) -> Tensor:
    """Return memory for one number of each program."""
    programs = grid(half)
    return torch.empty(programs[0] * programs[1], dtype=torch.float32, device=half.device)


def grid(half: Tensor) -> tuple[int, int]:
    return half.numel() // half.shape[-1], triton.cdiv(half.shape[-1], BLOCK)


@triton.jit
def forward_kernel(
    gate_up, result, amax, columns, NOTES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    wait_for_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * 2 * columns + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=inside).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate)) * up).to(result.dtype.element_ty)
    tl.store(result + row * columns + column, value, mask=inside)
    if NOTES:
        largest = tl.max(tl.where(inside, tl.abs(value.to(tl.float32)), 0.0), 0)
        tl.store(amax + row * tl.num_programs(1) + tl.program_id(1), largest)


@triton.jit
def backward_kernel(gate_up, grad, grad_gate_up, amax, columns, NOTES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = row * 2 * columns + column
    gate = tl.load(gate_up + place, mask=inside).to(tl.float32)
    up = tl.load(gate_up + place + columns, mask=inside).to(tl.float32)
    outer = tl.load(grad + row * columns + column, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = (outer * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(grad_gate_up.dtype.element_ty)
    grad_up = (outer * gate * sigmoid).to(grad_gate_up.dtype.element_ty)
    tl.store(grad_gate_up + place, grad_gate, mask=inside)
    tl.store(grad_gate_up + place + columns, grad_up, mask=inside)
    if NOTES:
        larger = tl.maximum(tl.abs(grad_gate.to(tl.float32)), tl.abs(grad_up.to(tl.float32)))
        largest = tl.max(tl.where(inside, larger, 0.0), 0)
        tl.store(amax + row * tl.num_programs(1) + tl.program_id(1), largest)
