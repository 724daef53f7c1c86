"""Products of several rows, alone and with SwiGLU, against exact ones; cut along their depth, and as graphs."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from stoker.model.kernels.fused.row_tiles import RowTile, row_tile
from stoker.model.kernels.ops import Ops
from testing.model.interpreted import Interpreted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F16: 4e-3, BF16: 2e-2}


class Case(NamedTuple):
    rows: int
    outputs: int
    depth: int
    is_gated: bool
    tile: RowTile | None = None
    """None: the tile of the table."""


SMALL = [
    Case(3, 40, 96, False, RowTile(16, 16, 32, 4, 2)),
    Case(16, 40, 80, True, RowTile(16, 16, 32, 4, 2)),  # neither outputs nor depth are whole tiles
    Case(5, 64, 256, False, RowTile(16, 32, 32, 4, 2, 2)),
    Case(17, 33, 200, False, RowTile(32, 16, 16, 4, 2, 4)),  # the last split has less
    Case(7, 24, 96, True, RowTile(16, 16, 16, 4, 2, 2)),
]
OF_MODELS = [
    Case(rows, outputs, depth, is_gated)
    for rows in (3, 16, 24, 64, 128)
    for outputs, depth, is_gated in (
        (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (1024, 3072, False), (8192, 2048, True),
        (2048, 2048, False), (3584, 4096, True), (8192, 7168, False),
    )
    if row_tile(rows, outputs, depth, is_gated) is not None
]  # fmt: skip


def fresh(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    size: float = shape[-1] ** -0.25
    return (torch.randn(shape, dtype=F32) * size).to(dtype).to(device)


def exact(x: Tensor, weight: Tensor, is_gated: bool) -> Tensor:
    y = x.double() @ weight.double().t()
    if not is_gated:
        return y
    gate, up = y.to(x.dtype).double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(result.double(), expected.double(), rtol=0, atol=TOLERANCE[result.dtype] * scale)


def check_product(device: str, case: Case, dtype: torch.dtype) -> None:
    """Check one product three times: its parts and arrivals leave nothing for the next."""
    from stoker.model.kernels.fused.several_rows import arrivals, several_rows

    tile = case.tile or row_tile(*case[:4])
    assert tile is not None
    weight = fresh(case.outputs * (1 + case.is_gated), case.depth, dtype=dtype, device=device)
    results = []
    x = fresh(case.rows, case.depth, dtype=dtype, device=device)
    for _ in range(3):
        results.append(several_rows(x, weight, tile, is_gated=case.is_gated))
        assert not arrivals(weight.device).any()
    close(results[0], exact(x, weight, case.is_gated))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL, *OF_MODELS], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_products_of_several_rows_are_right_and_repeat(case: Case, dtype: torch.dtype) -> None:
    check_product("cuda", case, dtype)


def test_products_of_several_rows_are_right_when_interpreted(interpreted: Interpreted) -> None:
    interpreted.run([(check_product, ("cpu", case, F16)) for case in SMALL])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 40, 100], ids=str)
def test_operations_call_them_where_they_are_fastest(rows: int) -> None:
    """The operations' results have the bits of the kernel for the weights of its table, and are right for the others;
    with gradient they are cuBLAS's."""
    from stoker.model.kernels.fused.several_rows import several_rows, tile_for

    ops, down = Ops("fused"), fresh(4096, 3584, dtype=BF16, device="cuda")
    gate_up, bias = fresh(28672, 4096, dtype=BF16, device="cuda"), fresh(4096, dtype=BF16, device="cuda")
    narrow, wide = (fresh(rows, depth, dtype=BF16, device="cuda") for depth in (3584, 4096))
    tile, gated = tile_for(narrow, down), tile_for(wide, gate_up, is_gated=True)
    assert (tile is None) == (rows > 64)
    assert gated is not None
    if tile is not None:
        assert torch.equal(ops.linear(narrow, down), several_rows(narrow, down, tile))
    close(ops.linear(narrow, down, bias), exact(narrow, down, False) + bias)
    found = several_rows(wide, gate_up, gated, is_gated=True)
    assert torch.equal(ops.linear_swiglu(wide, gate_up), found)
    ones = torch.ones(4096, dtype=BF16, device="cuda")
    normed = ops.rms_norm(wide, ones, 1e-5)
    assert torch.equal(
        ops.norm_linear_swiglu(wide, None, ones, 1e-5, gate_up)[0],
        several_rows(normed, gate_up, gated, is_gated=True),
    )
    learned = down.clone().requires_grad_()
    assert torch.equal(ops.linear(narrow, learned), torch.nn.functional.linear(narrow, down))


@pytest.mark.gpu
def test_a_graph_of_products_that_are_cut_along_their_depth_repeats() -> None:
    from stoker.model.kernels.fused.several_rows import several_rows

    tile = row_tile(8, 1024, 3072, False)
    assert tile is not None
    assert tile.splits == 4
    weights = [fresh(1024, 3072, dtype=BF16, device="cuda") for _ in range(6)]
    x = fresh(8, 3072, dtype=BF16, device="cuda")
    expected = [several_rows(x, weight, tile) for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [several_rows(x, weight, tile) for weight in weights]
    for _ in range(50):
        graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


@pytest.mark.gpu
def test_operands_that_cannot_be_described_are_left_to_cublas() -> None:
    from stoker.model.kernels.fused.several_rows import tile_for

    weight = fresh(4096, 1032, dtype=BF16, device="cuda")
    x = fresh(8, 1032, dtype=BF16, device="cuda")
    assert tile_for(x, weight) is not None
    assert tile_for(x.float(), weight.float()) is None
    assert tile_for(x, weight.half()) is None
    assert tile_for(x[:, :1024], weight[:, :1024]) is None
    assert tile_for(x[:0], weight) is None
    odd = fresh(4096, 1033, dtype=BF16, device="cuda")
    assert tile_for(fresh(8, 1033, dtype=BF16, device="cuda"), odd) is None
