"""The sum over ranks: its order, and its kernel against the twin in torch."""

from __future__ import annotations

import pytest
import torch

from stoker.model.kernels.ops import Ops
from stoker.trainer.rank.bucket import LINE
from stoker.trainer.rank.ordered_sum import sum_and_square, sum_in_order
from testing.model.interpreted import Interpreted


def make_rows(ranks: int, numel: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.randn(ranks, numel, generator=torch.Generator().manual_seed(ranks)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
def test_the_sum_of_a_power_of_two_of_rows_is_one_subtree(dtype: torch.dtype, add: bool) -> None:
    rows = make_rows(8, 3000, dtype)
    whole, halves = torch.ones(3000), torch.empty(2, 3000)
    sum_in_order(rows.clone().unbind(0), whole, add=add)
    for half, four in zip(halves, rows.view(2, 4, -1), strict=True):
        sum_in_order(four.clone().unbind(0), half)
    assert torch.equal(whole, halves[0] + halves[1] + (1.0 if add else 0.0))


def check_kernel(device: str, ranks: int, numel: int, dtype: torch.dtype, add: bool) -> None:
    from stoker.trainer.rank.ordered_sum_kernel import sum_rows

    rows = make_rows(ranks, numel, dtype)
    out, twin = torch.full((numel,), 0.5, device=device), torch.full((numel,), 0.5)
    sum_rows(rows.to(device).unbind(0), out, add)
    sum_in_order(rows.clone().unbind(0), twin, add=add)
    assert torch.equal(out.cpu(), twin)


def test_a_single_row_may_be_the_sum_itself() -> None:
    row = make_rows(1, 3000, torch.float32)[0]
    before = row.clone()
    sum_in_order([row], row)
    assert torch.equal(row, before)
    sum_in_order([before], row, add=True)
    assert torch.equal(row, 2 * before)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_squares_are_those_of_the_whole_sum(ranks: int, add: bool) -> None:
    rows, out, twin = make_rows(ranks, 2 * LINE, torch.bfloat16), torch.ones(2 * LINE), torch.ones(2 * LINE)
    squares = sum_and_square(rows.clone().unbind(0), out, Ops(), LINE, add=add)
    sum_in_order(rows.clone().unbind(0), twin, add=add)
    assert torch.equal(out, twin)
    torch.testing.assert_close(squares, out.view(2, LINE).square().sum(1))


def check_squares(device: str, ranks: int, lines: int, dtype: torch.dtype, add: bool) -> None:
    """Check one pass against two."""
    from stoker.model.kernels.fused.squares import line_squares
    from stoker.trainer.rank.ordered_sum_kernel import sum_rows, sum_rows_and_square

    rows = make_rows(ranks, lines * LINE, dtype).to(device)
    out, twin = (torch.full((lines * LINE,), 0.5, device=device) for _ in range(2))
    squares = sum_rows_and_square(rows.unbind(0), out, LINE, add)
    sum_rows(rows.unbind(0), twin, add)
    assert torch.equal(out, twin)
    assert torch.equal(squares, line_squares(twin, LINE))


CASES = [
    (ranks, numel, dtype, add)
    for ranks in (1, 2, 4, 8)
    for numel, dtype, add in ((1, torch.float32, False), (2049, torch.bfloat16, True), (5000, torch.bfloat16, False))
]


SQUARES = [
    (ranks, lines, dtype, add)
    for ranks in (2, 4, 8)
    for lines, dtype, add in ((1, torch.float32, False), (5, torch.bfloat16, True), (3, torch.bfloat16, False))
]


def test_the_kernel_gives_the_bits_of_its_twin_when_interpreted(interpreted: Interpreted) -> None:
    interpreted.run([(check_kernel, ("cpu", *case)) for case in CASES])


def test_one_pass_gives_the_bits_of_two_when_interpreted(interpreted: Interpreted) -> None:
    interpreted.run([(check_squares, ("cpu", *case)) for case in SQUARES])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES, (4, 3_000_001, torch.bfloat16, True)])
def test_the_kernel_gives_the_bits_of_its_twin_on_the_gpu(case: tuple[int, int, torch.dtype, bool]) -> None:
    check_kernel("cuda", *case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [*SQUARES, (4, 53_000, torch.bfloat16, False)])
def test_one_pass_gives_the_bits_of_two_on_the_gpu(case: tuple[int, int, torch.dtype, bool]) -> None:
    check_squares("cuda", *case)
