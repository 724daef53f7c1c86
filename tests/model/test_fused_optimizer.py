"""Adam over flat buffers and sums of squares against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.model.kernels import reference
from stoker.model.kernels.adam import AdamStep
from testing.model.interpreted import Interpreted

BF16 = torch.bfloat16


def rule(step: int, decay_end: int, decoupled: bool) -> AdamStep:
    return AdamStep(
        decoupled=decoupled,
        learning_rate=3e-3,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        decay_end=decay_end,
        step=step,
    )


def check_adam(device: str, size: int, decay_end: int, decoupled: bool, scale: float | None, casts: bool) -> None:
    from stoker.model.kernels.fused import adam

    state = [torch.randn(size, device=device), torch.zeros(size, device=device), torch.zeros(size, device=device)]
    twin = [tensor.clone() for tensor in state]
    factor = None if scale is None else torch.tensor(scale, device=device)
    cast = torch.full((size,), float("nan"), dtype=BF16, device=device) if casts else None
    for step in (1, 2, 3):
        grad = torch.randn(size, device=device) * 3
        kept = grad.clone()
        adam.adam_(state[0], grad, state[1], state[2], cast, rule(step, decay_end, decoupled), factor)
        reference.adam_(twin[0], grad, twin[1], twin[2], None, rule(step, decay_end, decoupled), factor)
        assert torch.equal(grad, kept)
    for one, other in zip(state, twin, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    if cast is not None:  # the interpreter cuts where the device rounds
        torch.testing.assert_close(cast.float(), state[0], rtol=2**-8 if device == "cuda" else 2**-7, atol=0)


def check_no_step(device: str, scale: float) -> None:
    """Check that a scale which is not finite leaves everything as it was."""
    from stoker.model.kernels.fused import adam

    state = [torch.randn(3000, device=device) for _ in range(3)]
    cast = torch.zeros(3000, dtype=BF16, device=device)
    kept = [tensor.clone() for tensor in (*state, cast)]
    grad = torch.randn(3000, device=device)
    adam.adam_(state[0], grad, state[1], state[2], cast, rule(1, 100, True), torch.tensor(scale, device=device))
    assert all(torch.equal(one, other) for one, other in zip((*state, cast), kept, strict=True))


def check_squares(device: str, size: int, dtype: torch.dtype) -> None:
    from stoker.model.kernels.fused import squares

    flat = torch.randn(size).to(dtype).to(device)
    total = squares.sum_of_squares(flat)
    torch.testing.assert_close(total, reference.sum_of_squares(flat), rtol=1e-6, atol=0)
    assert torch.equal(total, squares.sum_of_squares(flat.clone()))
    lines = flat[: size // 1024 * 1024]
    expected = lines.double().view(-1, 1024).square().sum(1)
    torch.testing.assert_close(squares.line_squares(lines, 1024).double(), expected, rtol=1e-5, atol=0)


SIZES = [(0, 0), (1, 1), (1000, 0), (4096, 4096), (70001, 1024), (3 << 20, 1 << 20)]
SCALES = [None, 1.0, 0.37]


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "decay_end"), SIZES)
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("casts", [True, False], ids=["cast", "no cast"])
def test_adam_agrees(size: int, decay_end: int, decoupled: bool, scale: float | None, casts: bool) -> None:
    check_adam("cuda", size, decay_end, decoupled, scale, casts)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_changes_nothing(scale: float) -> None:
    check_no_step("cuda", scale)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [0, 1, 1024, 65536, 65537, 10_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_sums_of_squares_agree_and_repeat(size: int, dtype: torch.dtype) -> None:
    check_squares("cuda", size, dtype)


def test_the_optimizer_agrees_when_interpreted(interpreted: Interpreted) -> None:
    adams = [
        (check_adam, ("cpu", size, decay_end, decoupled, scale, True))
        for size, decay_end in SIZES[:4]
        for decoupled in (True, False)
        for scale in SCALES
    ]
    stops = [(check_no_step, ("cpu", scale)) for scale in (float("nan"), float("inf"))]
    interpreted.run([*adams, *stops, *((check_squares, ("cpu", size, torch.float32)) for size in (0, 1, 3000))])


def region(twin: list[Tensor], casts: Tensor | None) -> None:
    reference.adam_(twin[0], torch.ones(4), twin[1], twin[2], casts, rule(1, 2, True), torch.tensor(0.5))


def test_the_twin_writes_the_cast_and_skips_a_scale_that_is_not_finite() -> None:
    twin, cast = [torch.ones(4), torch.zeros(4), torch.zeros(4)], torch.zeros(4, dtype=BF16)
    region(twin, cast)
    assert torch.equal(cast, twin[0].to(BF16))
    assert twin[0][0] < twin[0][3] < 1
    kept = twin[0].clone()
    reference.adam_(twin[0], torch.ones(4), twin[1], twin[2], cast, rule(1, 2, True), torch.tensor(float("nan")))
    assert torch.equal(twin[0], kept)
