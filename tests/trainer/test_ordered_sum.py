"""The sum over ranks: its order, and its kernel against the twin in torch."""

from __future__ import annotations

import pytest
import torch

from stoker.trainer.ordered_sum import sum_in_order
from tests.model import interpreted


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
    from stoker.trainer.ordered_sum_kernel import sum_rows

    rows = make_rows(ranks, numel, dtype)
    out, twin = torch.full((numel,), 0.5, device=device), torch.full((numel,), 0.5)
    sum_rows(rows.to(device).unbind(0), out, add)
    sum_in_order(rows.clone().unbind(0), twin, add=add)
    assert torch.equal(out.cpu(), twin)


CASES = [
    (ranks, numel, dtype, add)
    for ranks in (1, 2, 4, 8)
    for numel, dtype, add in ((1, torch.float32, False), (2049, torch.bfloat16, True), (5000, torch.bfloat16, False))
]


def test_the_kernel_gives_the_bits_of_its_twin_when_interpreted() -> None:
    interpreted.run([(check_kernel, ("cpu", *case)) for case in CASES])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES, (4, 3_000_001, torch.bfloat16, True)])
def test_the_kernel_gives_the_bits_of_its_twin_on_the_gpu(case: tuple[int, int, torch.dtype, bool]) -> None:
    check_kernel("cuda", *case)
