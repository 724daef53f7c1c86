"""Choice of experts, their grouped products and the sum of their results against the slow twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.model.kernels import reference
from stoker.model.kernels.expert_rows import ExpertRows, sort_rows
from stoker.model.kernels.grad_destination import set_grad_destination
from testing.model.interpreted import Interpreted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}
Shape = tuple[int, int, int, int, int]
"""Tokens, experts, experts of a token, outputs, columns."""
SMALL: list[Shape] = [(0, 3, 2, 8, 16), (1, 5, 2, 9, 20), (37, 3, 2, 70, 40), (70, 1, 1, 16, 24), (5, 6, 6, 8, 8)]
LARGE: list[Shape] = [(1, 128, 8, 768, 2048), (17, 8, 2, 1000, 512), (300, 128, 8, 1536, 256), (5000, 8, 2, 512, 768)]


def fresh(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, dtype=F32).to(dtype).to(device)


def whole_numbers(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randint(-8, 9, shape).to(dtype).to(device)


def close(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = max(1.0, float(expected.detach().float().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=TOLERANCE[dtype] * scale)


def uneven_rows(shape: Shape, device: str) -> ExpertRows:
    """Return choices in which the first expert has many rows, and some may have none."""
    tokens, experts, choices, *_ = shape
    logits_TE = torch.randn(tokens, experts) + 3.0 * (torch.arange(experts) == 0)
    return sort_rows(reference.route(logits_TE, choices, True).experts.to(device), experts)


def check_grouped(device: str, shape: Shape, dtype: torch.dtype, deterministic: bool) -> None:
    from stoker.model.kernels.fused import grouped_linear

    function = grouped_linear.grouped_linear_deterministic if deterministic else grouped_linear.grouped_linear
    rows, (_, experts, _, outputs, columns) = uneven_rows(shape, device), shape
    x = fresh(len(rows.sources), columns, dtype=dtype, device=device).requires_grad_()
    weight = (fresh(experts * outputs, columns, dtype=dtype, device=device) / columns**0.5).requires_grad_()
    outer = fresh(len(rows.sources), outputs, dtype=dtype, device=device)
    twins = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = reference.grouped_linear(twins[0], twins[1], rows.ends)
    found = function(x, weight, rows.ends)
    close(found, expected, dtype)
    with torch.no_grad():
        close(function(x, weight, rows.ends), expected, dtype)
    wanted = torch.autograd.grad(expected, twins, outer.double())
    for ours, theirs in zip(torch.autograd.grad(found, (x, weight), outer), wanted, strict=True):
        close(ours, theirs, dtype)


def check_invariance(device: str, dtype: torch.dtype) -> None:
    """Check that a row has the same bits alone, in any batch, and with any other experts' rows before it.

    An interpreted kernel's products are the BLAS's, which adds in an order that depends on the rows beside: whole
    numbers, whose sums are exact in any order, still show rows that are read or written in a wrong place.
    """
    from stoker.model.kernels.fused.grouped_linear import grouped_linear_deterministic

    experts, outputs, columns = 4, 40, 72
    drawn = whole_numbers if device == "cpu" else fresh
    weight = drawn(experts * outputs, columns, dtype=dtype, device=device)
    x = drawn(300, columns, dtype=dtype, device=device)
    whole = grouped_linear_deterministic(x, weight, torch.tensor([0, 20, 290, 300], dtype=torch.int32, device=device))
    for begin, end in ((20, 21), (30, 200), (289, 290)):
        ends = torch.tensor([0, 0, end - begin, end - begin], dtype=torch.int32, device=device)
        assert torch.equal(grouped_linear_deterministic(x[begin:end], weight, ends), whole[begin:end])


def check_small_operations(device: str, shape: Shape, dtype: torch.dtype, normalise: bool) -> None:
    from stoker.model.kernels.fused import experts as fused

    tokens, experts, choices, _, columns = shape
    logits = fresh(tokens, experts, dtype=F32, device=device).requires_grad_()
    found, expected = fused.route(logits, choices, normalise), reference.route(logits, choices, normalise)
    assert torch.equal(found.experts, expected.experts)
    close(found.weights, expected.weights, F32)
    outer = fresh(tokens, choices, dtype=F32, device=device)
    wanted = torch.autograd.grad(expected.weights, logits, outer)[0]
    close(torch.autograd.grad(found.weights, logits, outer)[0], wanted, F32)

    rows = sort_rows(expected.experts, experts)
    x = fresh(tokens, columns, dtype=dtype, device=device).requires_grad_()
    y = fresh(tokens * choices, columns, dtype=dtype, device=device).requires_grad_()
    weights = expected.weights.detach().requires_grad_()
    assert torch.equal(fused.dispatch(x, rows), reference.dispatch(x, rows))
    close(fused.combine(y, weights, rows), reference.combine(y, weights, rows), dtype)
    results = []
    for ops in (fused, reference):
        outputs = (ops.dispatch(x, rows), ops.combine(y, weights, rows))
        results.append(torch.autograd.grad(outputs, (x, y, weights), (y.detach(), x.detach())))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, dtype)


def check_ties(device: str) -> None:
    from stoker.model.kernels.fused import experts as fused

    assert fused.route(torch.zeros(3, 6, device=device), 2, True).experts.tolist() == [[0, 1]] * 3


def check_gradient_place(device: str) -> None:
    """Check that the weights' gradient lies in the buffer of its owner, with zeros for an expert without rows."""
    from stoker.model.kernels.fused.grouped_linear import grouped_linear

    weight = torch.nn.Parameter(fresh(3 * 8, 16, dtype=F32, device=device))
    place = torch.full_like(weight, float("nan"), requires_grad=False)
    set_grad_destination(weight, place.detach)
    x = fresh(7, 16, dtype=F32, device=device)
    grouped_linear(x, weight, torch.tensor([4, 4, 7], dtype=torch.int32, device=device)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == place.data_ptr()
    assert place.isfinite().all()
    assert not place[8:16].any()


def test_interpreted_kernels_of_experts_equal_their_twins(interpreted: Interpreted) -> None:
    calls: list[tuple[object, tuple[object, ...]]] = [
        *((check_grouped, ("cpu", shape, F32, True)) for shape in SMALL),
        (check_grouped, ("cpu", SMALL[2], F16, True)),
        *((check_small_operations, ("cpu", shape, F32, normalise)) for shape in SMALL for normalise in (True, False)),
        (check_invariance, ("cpu", F32)),
        (check_ties, ("cpu",)),
        (check_gradient_place, ("cpu",)),
    ]
    interpreted.run(calls)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_grouped_products_equal_their_twin(shape: Shape, dtype: torch.dtype, deterministic: bool) -> None:
    check_grouped("cuda", shape, dtype, deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_choice_dispatch_and_combination_equal_their_twins(shape: Shape, dtype: torch.dtype) -> None:
    check_small_operations("cuda", shape, dtype, True)
    check_small_operations("cuda", shape, dtype, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    check_invariance("cuda", dtype)


@pytest.mark.gpu
def test_ties_and_gradient_places_on_the_device() -> None:
    check_ties("cuda")
    check_gradient_place("cuda")
