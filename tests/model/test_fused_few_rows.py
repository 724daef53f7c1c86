"""Products of few rows, alone or fused with norm and SwiGLU, against the single operations.

It also covers the shapes for which the single operations have to be called.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.model.kernels.grad_destination import set_grad_destination
from stoker.model.kernels.ops import Ops
from testing.model.interpreted import Interpreted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Shape = tuple[int, int, int]
"""Rows, outputs, depth."""
GPU_SHAPES: list[Shape] = [(1, 1024, 3072), (1, 4096, 1024), (1, 6144, 4096), (1, 4096, 14336), (1, 2, 16), (1, 250,
    576), (2, 1024, 2048), (3, 1000, 1024), (4, 6, 2048), (4, 28672, 4096)]  # fmt: skip
SMALL_SHAPES: list[Shape] = [(1, 2, 16), (1, 6, 1024), (3, 4, 2032), (2, 10, 48)]
TOLERANCE = {F32: 2e-5, F16: 4e-3, BF16: 2e-2}
EPS = 1e-5


def fresh(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    size: float = shape[-1] ** -0.25
    return (torch.randn(shape, dtype=F32) * size).to(dtype).to(device)


def poison(device: str) -> None:
    """Fill the memory of the next results with nans, so that values which a kernel does not write are detected."""
    if device == "cuda":
        blocks = [torch.full((2**k,), float("nan"), device=device) for k in range(6, 24)]
        del blocks


def close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(result.double(), expected.double(), rtol=0, atol=TOLERANCE[result.dtype] * scale)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def check_products(device: str, shape: Shape, dtype: torch.dtype) -> None:
    """Check all forms of the kernel on any shape, whether or not it would be chosen for it."""
    from stoker.model.kernels.fused.few_rows import RowNorm, few_normed_rows, few_rows

    rows, outputs, depth = shape
    x, update = (fresh(rows, depth, dtype=dtype, device=device) for _ in range(2))
    norm, weight = 1 + fresh(depth, dtype=dtype, device=device), fresh(outputs, depth, dtype=dtype, device=device)
    wide = weight.double()
    poison(device)
    close(few_rows(x, weight), x.double() @ wide.t())
    close(few_rows(x, weight, out_dtype=F32), x.double() @ wide.t())
    close(few_rows(x, weight, is_gated=True), swiglu(x.double() @ wide.t()))
    for added in (None, update):
        total = x if added is None else x + added
        scale = (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
        normed = (total.double() * scale * norm.double()).to(dtype).double()
        for is_gated in (False, True):
            poison(device)
            found, summed = few_normed_rows(x, RowNorm(added, norm, EPS), weight, is_gated=is_gated)
            assert torch.equal(summed, total)
            close(found, swiglu(normed @ wide.t()) if is_gated else normed @ wide.t())


def sequence(ops: Ops, leaves: list[Tensor], bias: Tensor | None, is_gated: bool) -> tuple[Tensor, Tensor]:
    """Run the single operations."""
    x, update, norm, weight = leaves
    normed, total = ops.add_rms_norm(update, x, norm, EPS)
    product = ops.linear(normed, weight, bias)
    return (ops.swiglu(product) if is_gated else product), total


def whole(ops: Ops, leaves: list[Tensor], bias: Tensor | None, is_gated: bool) -> tuple[Tensor, Tensor]:
    x, update, norm, weight = leaves
    if is_gated:
        return ops.norm_linear_swiglu(x, update, norm, EPS, weight)
    return ops.norm_linear(x, update, norm, EPS, weight, bias)


def leaves_of(rows: int, outputs: int, depth: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    x, update, weight = (fresh(n, depth, dtype=dtype, device=device) for n in (rows, rows, outputs))
    return [x, update, 1 + fresh(depth, dtype=dtype, device=device), weight]


def check_operations(device: str, shape: Shape, dtype: torch.dtype) -> None:
    """Check that fused operations without gradient agree with the single ones, which they call for other shapes."""
    ops = Ops("fused")
    leaves = leaves_of(*shape, dtype, device)
    bias = fresh(shape[1], dtype=dtype, device=device)
    for is_gated, added in ((False, bias), (False, None), (True, None)):
        poison(device)
        found, expected = whole(ops, leaves, added, is_gated), sequence(ops, leaves, added, is_gated)
        assert torch.equal(found[1], expected[1])
        close(found[0], expected[0])
    x, _, _, weight = leaves
    close(ops.linear_swiglu(x, weight), ops.swiglu(ops.linear(x, weight)))


def check_sequences(device: str, kernels: str, deterministic: bool, has_grad: bool) -> None:
    """Check that results and gradients have the bits of the single operations.

    A weight's gradient goes into its owner's buffer.
    """
    ops = Ops(kernels, deterministic=deterministic)  # type: ignore[arg-type]
    for rows, is_gated in ((1, False), (1, True), (5, False), (5, True)):
        leaves = leaves_of(rows, 8, 32, F32, device)
        first, second = ([leaf.clone().requires_grad_(has_grad) for leaf in leaves] for _ in range(2))
        place = torch.full_like(leaves[3], float("nan"))
        set_grad_destination(first[3], place.detach)
        found, expected = whole(ops, first, None, is_gated), sequence(ops, second, None, is_gated)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        if has_grad:
            outer = [torch.randn_like(result) for result in found]
            ours, theirs = torch.autograd.grad(found, first, outer), torch.autograd.grad(expected, second, outer)
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
            assert kernels == "reference" or ours[3].data_ptr() == place.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_products_of_few_rows_agree(shape: Shape, dtype: torch.dtype) -> None:
    check_products("cuda", shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*GPU_SHAPES, (1, 8, 20), (5, 64, 256), (0, 64, 256), (1, 64, 17408)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_norm_product_and_swiglu_are_their_sequence(shape: Shape, dtype: torch.dtype) -> None:
    check_operations("cuda", shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
def test_with_gradient_they_are_the_single_operations_bit_for_bit(deterministic: bool) -> None:
    check_sequences("cuda", "fused", deterministic, True)


@pytest.mark.parametrize("has_grad", [False, True], ids=["plain", "gradient"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
def test_the_twins_are_the_single_operations_bit_for_bit(deterministic: bool, has_grad: bool) -> None:
    check_sequences("cpu", "reference", deterministic, has_grad)


def test_products_of_few_rows_agree_when_interpreted(interpreted: Interpreted) -> None:
    kernels = [(check_products, ("cpu", shape, dtype)) for shape in SMALL_SHAPES for dtype in (F32, F16)]
    shapes = [*SMALL_SHAPES, (1, 8, 20), (5, 4, 32), (0, 4, 32), (1, 4, 16400)]
    operations = [(check_operations, ("cpu", shape, F32)) for shape in shapes]
    bits = [(check_sequences, ("cpu", "fused", *modes)) for modes in ((False, True), (True, True), (True, False))]
    interpreted.run([*kernels, *operations, *bits])
