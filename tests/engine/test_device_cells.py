"""Cells of blocks on a GPU: copies by the driver, kernels and torch against the cells in main memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.transfer.cells import CellBlocks, cell_sums, join_cells
from stoker.engine.transfer.device_cells import DeviceCells, cell_of
from stoker.engine.transfer.layout import ONE_CELL, BlockLayout, Grid
from stoker.engine.transfer.local_blocks import HostBlocks
from stoker.engine.transfer.port import Cells, Move
from testing.engine.fake_device import FakeBlocks, FakeDevice, rows_of
from testing.engine.transfers import random_blocks
from testing.model.interpreted import Interpreted

LAYOUT = BlockLayout(first_layer=0, end_layer=4, block_size=6, first_head=0, end_head=4, head_dim=6, dtype="bfloat16")
GRIDS = [
    Grid(*runs) for runs in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 1, 6), (4, 2, 3), (2, 4, 6))
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 3), heads=st.integers(1, 3), tokens=st.integers(1, 3), dim=st.integers(1, 3),
    grid=st.builds(Grid, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), others=st.integers(0, 2),
    pairs=st.permutations(range(4)).flatmap(
        lambda slots: st.permutations(list(enumerate(slots))).map(lambda pairs: pairs[:3])
    ) | st.just([(0, 1), (1, 2), (2, 3)]),
)  # fmt: skip
def test_copies_of_cells_move_the_bytes_of_cells(
    layers: int, heads: int, tokens: int, dim: int, grid: Grid, others: int, pairs: list[tuple[int, int]]
) -> None:
    """Cells of blocks in any order, each into a cell of a slot, which may have others, too."""
    layout = BlockLayout(0, layers * grid.layers, tokens * grid.tokens, 0, heads * grid.heads, 2 * dim, "bfloat16")
    blocks = random_blocks(4, 1, layout)
    joins = grid.cells + others
    cut = DeviceCells(FakeBlocks(blocks), layout, Cells(grid, joins))
    moves = [
        Move(block * grid.cells + cell, slot * joins + cell) for block, slot in pairs for cell in range(grid.cells)
    ]  # fmt: skip
    slots = np.zeros((4 * joins, cut.block_bytes), dtype=np.uint8)
    copies = list(cut.copies(moves, int(slots.ctypes.data)))
    assert sum(copy.num_bytes for copy in copies) == len(moves) * cut.block_bytes
    for copy in copies:
        for row in rows_of(copy):
            FakeDevice.move_bytes(row)
    expected = np.zeros_like(slots)
    cells = CellBlocks(HostBlocks(blocks), layout, grid).read([move.local for move in moves])
    for move, cell_N in zip(moves, cells, strict=True):
        expected[move.remote] = cell_N
    assert np.array_equal(slots, expected)


def test_neighbours_leave_as_one_copy() -> None:
    """A driver takes as long to begin a copy of one cell as of many."""
    cut = DeviceCells(FakeBlocks(random_blocks(6, 1, LAYOUT)), LAYOUT, Cells(Grid(heads=2), 2))
    pairs = [(0, 2), (1, 3), (2, 4), (4, 5), (3, 0)]
    moves = [Move(2 * block + cell, 2 * slot + cell) for block, slot in pairs for cell in range(2)]
    assert [copy.planes for copy in cut.copies(moves, 0)] == [3, 1, 1] * 2


@pytest.mark.parametrize(
    ("grid", "rows", "planes"),
    [
        (ONE_CELL, 1, 1),
        (Grid(layers=2), 1, 1),
        (Grid(heads=2), 8 * 6, 1),
        (Grid(tokens=2), 8, 1),
        (Grid(tokens=6), 8, 1),
        (Grid(heads=2, tokens=6), 8, 1),
        (Grid(heads=2, tokens=2), 3, 8),
    ],
    ids=str,
)
def test_rows_that_follow_one_another_are_copied_as_one(grid: Grid, rows: int, planes: int) -> None:
    """A copy engine takes as long for a row of some bytes as for one of some hundred."""
    assert (cell_of(LAYOUT, grid).rows, cell_of(LAYOUT, grid).planes) == (rows, planes)


def check_cells(device: str, grids: list[Grid], layout: BlockLayout) -> None:
    """Check that the kernel and torch store the blocks that main memory's cells give, and find their sums."""
    import torch

    from stoker.engine.transfer import cell_kernel as cells

    blocks, slots = random_blocks(6, 1, layout), random_blocks(5, 2, layout)
    chosen, targets = [4, 0, 2], [1, 5, 3]
    for grid in grids:
        expected = blocks.copy()
        for slot, target in zip(chosen, targets, strict=True):
            join_cells(layout, slots[slot], expected[target], grid)
        sums = np.array([one for target in targets for one in cell_sums(layout, expected[target], grid)], np.uint64)
        shape = cells.shape_of(layout, grid)

        def summed(work: Callable[..., None], *arguments: Any, count: int = len(sums), shape: Any = shape) -> list[int]:
            totals = torch.zeros(count, dtype=torch.int64, device=device)
            work(*arguments, totals, shape)
            return totals.tolist()

        slots_SN, rows = torch.from_numpy(slots).to(device), torch.tensor(chosen, device=device)
        places = torch.tensor(targets, device=device)
        for join, add in ((cells.join_cells, cells.sum_cells), (cells.torch_join_cells, cells.torch_sum_cells)):
            cache_TN = torch.from_numpy(blocks.copy()).to(device)
            assert summed(join, slots_SN, rows, cache_TN, places) == sums.view(np.int64).tolist(), (grid, join)
            assert np.array_equal(cache_TN.cpu().numpy(), expected), (grid, join)
            assert summed(add, cache_TN, places) == sums.view(np.int64).tolist(), (grid, add)
        assert summed(cells.join_cells, slots_SN, rows[:0], cache_TN, places[:0]) == [0] * len(sums)


def test_the_kernel_and_torch_join_and_sum_cells(interpreted: Interpreted) -> None:
    interpreted.run([(check_cells, ("cpu", GRIDS, LAYOUT))])


def test_cells_of_half_a_word_are_refused() -> None:
    from stoker.engine.transfer.cell_kernel import shape_of

    narrow = BlockLayout(0, 1, 4, 0, 2, 1, "bfloat16")
    with pytest.raises(ValueError, match="a multiple of 4 bytes, got 2"):
        shape_of(narrow, Grid(heads=2))


LARGE = BlockLayout(
    first_layer=0, end_layer=36, block_size=64, first_head=0, end_head=8, head_dim=128, dtype="bfloat16"
)
OF_WIDTHS = [ONE_CELL, Grid(heads=2), Grid(heads=8), Grid(layers=2, heads=2), Grid(tokens=2), Grid(2, 4, 4)]


@pytest.mark.gpu
def test_the_kernel_joins_and_sums_cells_on_a_gpu() -> None:
    check_cells("cuda", GRIDS, LAYOUT)
    check_cells("cuda", OF_WIDTHS, LARGE)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("grid", OF_WIDTHS, ids=str)
def test_a_store_on_a_gpu_takes_what_its_copies_send(grid: Grid, fused: bool) -> None:
    """From one cache by way of a zone into another, as two engines of other widths do it."""
    import torch

    from stoker.engine.core.handover.device_store import DeviceStore
    from stoker.engine.transfer.cuda_memory import CudaMemory, DeviceBlocks

    device = torch.device("cuda", 0)
    memory = CudaMemory(device, "host")
    sent = torch.from_numpy(random_blocks(5, 1, LARGE)).to(device)
    cache, zone = torch.zeros_like(sent), torch.zeros_like(sent)
    slots, blocks = [3, 0, 1, 2], [4, 1, 2, 0]  # two of them are neighbours
    writer = DeviceStore(zone, sent, LARGE, fused=fused)
    before = writer.cell_sums(blocks, grid)
    cells = DeviceCells(DeviceBlocks(sent, memory), LARGE, Cells(grid, grid.cells))
    moves = [
        Move(block * grid.cells + cell, slot * grid.cells + cell)
        for block, slot in zip(blocks, slots, strict=True)
        for cell in range(grid.cells)
    ]
    memory.queue().post([], list(cells.copies(moves, zone.data_ptr()))).wait()
    after = DeviceStore(zone, cache, LARGE, fused=fused).copy_cells(slots, blocks, grid)
    assert after.values() == before.values()
    assert torch.equal(cache[blocks], sent[blocks])
