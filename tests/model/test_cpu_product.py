"""Products on the CPU in every dtype against float64, native or computed in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.model.kernels import cpu_product

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROUNDING = {F32: 1e-6, BF16: 2**-8, F16: 2**-11}
"""Largest relative error of one rounding to the dtype."""
EMULATED = {F32: 1e-6, BF16: 2**-7, F16: 2**-10}
"""The same where the processor's products are torch's own, which may round twice."""


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(shape).to(dtype)  # positive: no sum nearly cancels, so its relative error is bounded


def assert_rounded(found: Tensor, expected: Tensor, relative: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=relative * 1.01, atol=0)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_widened_product_is_rounded_once(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    x, weight, bias = draw(rows, 40, dtype=dtype), draw(24, 40, dtype=dtype), draw(24, dtype=dtype)
    expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    found = cpu_product.widened_product(x, weight, bias if has_bias else None)
    assert found.dtype is dtype
    assert_rounded(found, expected, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, cpu_product.WIDENED_ROWS, 33])
def test_a_layer_and_its_gradients_equal_float64(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = (draw(*shape, dtype=dtype).requires_grad_() for shape in ((rows, 40), (24, 40), (24,)))
    outer = draw(rows, 24, dtype=dtype)
    found = cpu_product.linear(x, weight, bias)
    assert_rounded(found, x.double() @ weight.double().t() + bias.double(), 2 * EMULATED[dtype])
    grads = torch.autograd.grad(found, (x, weight), outer)
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    assert_rounded(grads[0], outer.double() @ weight.double(), EMULATED[dtype])
    assert_rounded(grads[1], outer.double().t() @ x.double(), EMULATED[dtype])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_only_emulated_dtypes_with_enough_rows_are_widened(dtype: torch.dtype) -> None:
    enough = torch.zeros(cpu_product.WIDENED_ROWS, 8, dtype=dtype)
    assert cpu_product.is_widened(enough) == (not cpu_product.is_native(dtype))
    assert not cpu_product.is_widened(enough[:-1])
    assert not cpu_product.is_widened(enough.float())
