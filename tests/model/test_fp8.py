"""Products in eight bits: casts against their definition, gradients against exact ones, fused kernels against twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.model.kernels import fp8_twin, reference
from stoker.model.kernels.fp8 import LARGEST, Axis, Fp8Tensor, Fp8Weight, Recipe, mark_product, noted_amax, set_fp8
from stoker.model.kernels.grad_destination import set_grad_destination
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.weight_queue import WeightQueue, set_weight_queue
from testing.model.interpreted import Interpreted

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F32 = torch.bfloat16, torch.float32
RECIPES: tuple[Recipe, ...] = ("Tensorwise", "Rowwise")
AXES: tuple[Axis, ...] = ("tensor", "rows", "columns")
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Largest relative error of a rounded value that is no subnormal."""


def layer(rows: int, columns: int, tokens: int, recipe: Recipe, dtype: torch.dtype = F32, device: str = "cpu") -> Any:
    """Return x_TD, a weight whose products are in eight bits, and a gradient of y_TE."""
    x = torch.randn(tokens, columns).to(device, dtype).requires_grad_()
    weight = torch.nn.Parameter((torch.randn(rows, columns) / 8).to(device, dtype))
    set_fp8(weight, Fp8Weight(recipe))
    return x, weight, (torch.randn(tokens, rows) / 100).to(device, dtype)


def expand(values: Fp8Tensor) -> Tensor:
    return values.values.float() * (values.scale if values.scale.numel() == 1 else values.scale[:, None])


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("axis", AXES)
def test_a_cast_keeps_values_to_half_a_step_of_their_scale(axis: Axis, dtype: torch.dtype) -> None:
    x = torch.randn(33, 48) * torch.logspace(-3, 3, 48)
    amax = fp8_twin.amax(x, axis)
    pick = fp8_twin.cast_transposed if axis == "columns" else fp8_twin.cast
    found = expand(pick(x, amax, dtype, axis, None))
    found = found[:, :33].t() if axis == "columns" else found
    smallest = {"tensor": amax, "rows": amax[:, None], "columns": amax}[axis] / LARGEST[dtype] * 2.0**-9
    assert ((found - x).abs() <= torch.maximum(x.abs() * HALF_STEP[dtype], smallest)).all()
    assert (found.abs().amax() - x.abs().amax()).abs() <= 1e-5 * x.abs().amax()


def test_the_transpose_is_padded_with_zeros_and_both_orders_have_one_scale() -> None:
    x = torch.randn(5, 32)
    plain, transposed = fp8_twin.cast_both(x, fp8_twin.amax(x, "tensor"), E4M3, None)
    assert transposed.values.shape == (32, 16)
    assert torch.equal(transposed.values[:, :5].float().t(), plain.values.float())
    assert not transposed.values[:, 5:].float().any()
    assert torch.equal(plain.scale, transposed.scale)


@pytest.mark.parametrize("recipe", RECIPES)
def test_results_and_gradients_are_those_of_the_exact_product_to_a_few_percent(recipe: Recipe) -> None:
    torch.manual_seed(0)
    x, weight, outer = layer(64, 96, 50, recipe)
    y = Ops().linear(x, weight)
    found = torch.autograd.grad(y, (x, weight), outer)
    exact = (x @ weight.t(), outer @ weight, outer.t() @ x)
    for one, other in zip((y, *found), exact, strict=True):
        error = (one - other).norm() / other.norm()
        assert 1e-4 < error < 0.08, "a product in eight bits, neither exact nor wrong"


def test_rows_of_other_sizes_need_scales_of_their_own() -> None:
    torch.manual_seed(0)
    errors = {}
    for recipe in RECIPES:
        x, weight, _ = layer(32, 64, 16, recipe)
        x = (x.detach() * torch.logspace(-6, 0, 16)[:, None]).requires_grad_()
        with torch.no_grad():
            y, exact = Ops().linear(x, weight), x @ weight.t()
        errors[recipe] = float(((y - exact).norm(dim=1) / exact.norm(dim=1)).max())
    assert errors["Rowwise"] < 0.06 < 0.5 < errors["Tensorwise"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_has_the_same_bits_from_the_input_as_from_its_cast(recipe: Recipe) -> None:
    x, weight, outer = layer(32, 48, 20, recipe)
    found = []
    for keeps in (True, False):
        y = fp8_twin.fp8_linear(x, weight, None, weight.fp8, keeps)
        found.append((y, *torch.autograd.grad(y, (x, weight), outer)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_weight_is_cast_once_until_its_values_change() -> None:
    x, weight, _ = layer(32, 48, 20, "Tensorwise")
    first = Ops().linear(x, weight)
    copies, places = weight.fp8.copies, weight.fp8.copies.plain.values.data_ptr()
    with torch.no_grad():
        weight.mul_(-2)
        assert torch.equal(Ops().linear(x, weight), first)
        assert weight.fp8.copies is copies
        weight.fp8.renew()
        torch.testing.assert_close(Ops().linear(x, weight), -2 * first)
    assert weight.fp8.copies.plain.values.data_ptr() == places, "the same memory"
    weight.fp8.release()
    with torch.no_grad():
        torch.testing.assert_close(Ops().linear(x, weight), -2 * first)


def test_values_that_are_not_finite_stay_visible() -> None:
    for bad in (float("nan"), float("inf")):
        x, weight, _ = layer(16, 32, 4, "Tensorwise")
        with torch.no_grad():
            x[1, 2] = bad
            assert not Ops().linear(x, weight)[1].isfinite().any()
    x, weight, outer = layer(16, 32, 4, "Rowwise")
    zero = torch.zeros_like(x).requires_grad_()
    y = Ops().linear(zero, weight)
    assert not y.any()
    assert not torch.autograd.grad(y, weight, outer)[0].any()


def test_gradients_go_to_their_destination_and_may_be_put_off() -> None:
    x, weight, outer = layer(32, 48, 20, "Tensorwise", BF16)
    place = torch.full_like(weight, float("nan"), requires_grad=False)
    expected = torch.autograd.grad(Ops().linear(x, weight), weight, outer)[0]
    queue = WeightQueue()
    set_weight_queue(weight, queue)
    set_grad_destination(weight, place.detach)
    y = Ops().linear(x, weight)
    with queue.collect() as collected:
        y.backward(outer)
    assert weight.grad is None
    assert x.grad is not None
    (late,) = collected
    assert late.product().data_ptr() == place.data_ptr()
    assert torch.equal(place, expected)


def test_the_norm_before_a_product_is_its_own_operation() -> None:
    x, weight, _ = layer(32, 48, 20, "Tensorwise")
    ops, norm = Ops(), torch.rand(48)
    with torch.no_grad():
        y, total = ops.norm_linear(x, None, norm, 1e-6, weight)
        assert torch.equal(y, ops.linear(reference.rms_norm(x, norm, 1e-6), weight))
        assert torch.equal(total, x)


def on_the_grid(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return values that eight bits hold exactly, the largest one in each row and column among them.

    The interpreter of kernels rounds by another rule.
    """
    x = torch.randint(-4, 5, (rows, columns)).float()
    for index in range(max(rows, columns)):
        x[index % rows, index % columns] = LARGEST[dtype]
    return x


def check_casts(device: str, rows: int, columns: int, exact: bool) -> None:
    from stoker.model.kernels.fused import fp8

    for dtype in (E4M3, E5M2):
        x = on_the_grid(rows, columns, dtype) if exact else torch.randn(rows, columns) * 3
        x = x.to(device, BF16)
        for axis in AXES:
            amax = fp8.amax(x, axis)
            assert torch.equal(amax, fp8_twin.amax(x, axis))
            for name in {"tensor": ("cast", "cast_transposed"), "rows": ("cast",)}.get(axis, ("cast_transposed",)):
                same(
                    getattr(fp8, name)(x, amax, dtype, axis, None), getattr(fp8_twin, name)(x, amax, dtype, axis, None)
                )
        amax = fp8.amax(x, "tensor")
        for one, other in zip(
            fp8.cast_both(x, amax, dtype, None), fp8_twin.cast_both(x, amax, dtype, None), strict=True
        ):
            same(one, other)


def same(one: Fp8Tensor, other: Fp8Tensor) -> None:
    assert torch.equal(one.scale, other.scale)
    assert torch.equal(one.values.float(), other.values.float())


class Probe(torch.autograd.Function):
    """A product in eight bits as the kernels around it see it: it looks for notes of gradients."""

    seen: list[tuple[Tensor, Tensor | None]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[tuple[Tensor, Tensor | None]]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append((grad, noted_amax(grad)))
        return grad, None


def check_notes(device: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Check that kernels after a product note the largest magnitudes of their results and gradients."""
    from stoker.model.kernels.fused import norm, swiglu

    seen: list[tuple[Tensor, Tensor | None]] = []
    x = torch.randn(rows, 2 * columns).to(device, dtype).requires_grad_()
    y = Probe.apply(x, seen)
    mark_product(y)
    weight = torch.rand(2 * columns).to(device, dtype)
    normed, total = norm.add_rms_norm(y, x.detach(), weight, 1e-6)
    z = Probe.apply(total, seen)
    mark_product(z)
    activated = swiglu.swiglu(z)
    (activated.sum() * 3 + (normed * normed).sum()).backward()
    for made, noted in [(normed, noted_amax(normed)), (activated, noted_amax(activated)), *seen]:
        assert noted is not None
        assert noted.max() == made.detach().float().abs().max()
    assert noted_amax(norm.rms_norm(x, weight, 1e-6)) is None, "not after a product"
    with torch.no_grad():
        normed.mul_(2)
    assert noted_amax(normed) is None, "out of date"


def test_interpreted_casts_equal_the_twin(interpreted: Interpreted) -> None:
    casts = [(check_casts, ("cpu", *shape, True)) for shape in ((1, 1), (3, 20), (130, 33), (20, 140))]
    interpreted.run([*casts, (check_notes, ("cpu", 5, 33, F32))])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16), (333, 2048), (4097, 1000)])
def test_fused_kernels_note_the_largest_magnitudes(shape: tuple[int, int]) -> None:
    check_notes("cuda", *shape, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16), (33, 100), (300, 4096), (4097, 272), (128, 28672)])
def test_fused_casts_equal_the_twin(shape: tuple[int, int]) -> None:
    check_casts("cuda", *shape, exact=False)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(64, 96, 50), (6144, 4096, 1024), (4096, 14336, 333)])
def test_fused_products_equal_the_twin(recipe: Recipe, shape: tuple[int, int, int]) -> None:
    x, weight, outer = layer(*shape, recipe, BF16, "cuda")
    found = {}
    for name in ("fused", "reference"):
        weight.fp8.release()
        y = Ops(name).linear(x, weight)
        found[name] = (y, *torch.autograd.grad(y, (x, weight), outer))
    for one, other in zip(found["fused"], found["reference"], strict=True):
        assert (one.float() - other.float()).norm() / other.float().norm() < 6e-3


def test_only_a_plain_product_is_split_where_tokens_travel() -> None:
    weight = torch.randn(4, 8)
    assert Ops().is_plain(weight)
    assert not Ops(deterministic=True).is_plain(weight)
    set_fp8(weight, Fp8Weight("Tensorwise"))
    assert not Ops().is_plain(weight)
