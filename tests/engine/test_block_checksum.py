"""The checksum of blocks: one number from plain Python, numpy, torch and the kernel, and any change is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.transfer.checksum import COLUMNS, MASK, column_keys, content_seed, raw_sums, row_keys, seeded
from testing.model.interpreted import Interpreted

SIZES = (4, 8, 4 * COLUMNS, 4 * COLUMNS + 4, 12 * COLUMNS + 40, 4 * 65 * COLUMNS)


def slow_sum(data: bytes) -> int:
    """The definition, word by word."""
    total = 0
    for place in range(len(data) // 4):
        word = int.from_bytes(data[4 * place : 4 * place + 4], "little")
        row, column = divmod(place, COLUMNS)
        total += word * int(row_keys(row + 1)[row]) * int(column_keys()[column])
    return total & MASK


def blocks_of(size: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, (count, size), dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_numpy_gives_the_sum_of_the_definition(size: int) -> None:
    blocks = blocks_of(size, 2)
    assert raw_sums(blocks).tolist() == [slow_sum(block.tobytes()) for block in blocks]


def test_the_numbers_stay_as_they_are_because_they_are_stored_and_sent() -> None:
    block = (np.arange(5000, dtype=np.uint32) * np.uint32(2654435761)).view(np.uint8)[None]
    assert seeded(int(raw_sums(block)[0]), content_seed(b"f" * 32, 7, b"c" * 32)) == PINNED


PINNED = 9612796442052752721


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.integers(0, 4 * COLUMNS + 39), flip=st.integers(1, 255))
def test_a_changed_byte_always_changes_the_sum(place: int, flip: int) -> None:
    block = blocks_of(4 * COLUMNS + 40, 1)
    before = int(raw_sums(block)[0])
    block[0, place] ^= flip
    assert int(raw_sums(block)[0]) != before


def test_exchanged_cut_and_shifted_words_change_the_sum() -> None:
    block = blocks_of(8 * COLUMNS, 1)
    words = block.view(np.uint32)
    others = [
        words[:, ::-1], np.roll(words, 1, 1), np.roll(words, COLUMNS, 1), words[:, :-1],
        np.where(np.arange(words.shape[1]) < COLUMNS, words, 0),
    ]  # fmt: skip
    sums = {int(raw_sums(np.ascontiguousarray(other).astype(np.uint32).view(np.uint8))[0]) for other in others}
    assert len(sums | {int(raw_sums(block)[0])}) == len(others) + 1


def test_the_seed_binds_a_sum_to_model_place_and_tokens() -> None:
    seeds = {
        content_seed(fingerprint, index, content)
        for fingerprint in (b"a", b"b")
        for index in (0, 1)
        for content in (b"", b"x", b"ax")
    }
    assert len(seeds) == 12


def test_a_block_of_odd_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4 bytes, got 6"):
        raw_sums(np.zeros((1, 6), dtype=np.uint8))


def check_sums(device: str, sizes: tuple[int, ...]) -> None:
    """Check that the kernel and torch give numpy's sums, and that the kernel stores what it sums, and only there."""
    import torch

    from stoker.engine.transfer.checksum_kernel import copy_and_sum, sums, torch_copy_and_sum, torch_sums

    def summed(work: Callable[..., None], *arguments: Any) -> list[int]:
        totals = torch.zeros(len(arguments[1]), dtype=torch.int64, device=device)
        work(*arguments, totals)
        return totals.tolist()

    for size in sizes:
        blocks = blocks_of(size, 5)
        source = torch.from_numpy(blocks).to(device)
        rows = torch.tensor([4, 0, 2], device=device)
        target = torch.full((6, size), 7, dtype=torch.uint8, device=device)
        targets = torch.tensor([1, 5, 3], device=device)
        expected = raw_sums(blocks[[4, 0, 2]]).view(np.int64).tolist()
        assert summed(copy_and_sum, source, rows, target, targets) == expected
        stored = np.full((6, size), 7, dtype=np.uint8)
        stored[[1, 5, 3]] = blocks[[4, 0, 2]]
        assert np.array_equal(target.cpu().numpy(), stored)
        assert summed(sums, source, rows) == expected
        assert summed(torch_sums, source, rows) == expected
        assert summed(torch_copy_and_sum, source, rows, target.zero_(), targets) == expected
        assert np.array_equal(target[[1, 5, 3]].cpu().numpy(), stored[[1, 5, 3]])
        assert summed(copy_and_sum, source, rows[:0], target, targets[:0]) == []


def test_the_kernel_and_torch_give_the_same_sums(interpreted: Interpreted) -> None:
    interpreted.run([(check_sums, ("cpu", (4, 4 * COLUMNS + 4, 4 * 17 * COLUMNS + 24)))])


@pytest.mark.gpu
def test_the_kernel_gives_the_same_sums_on_a_gpu() -> None:
    check_sums("cuda", (*SIZES, 9 << 20))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 3, 28])
def test_lists_of_rows_and_their_sums_travel_together_and_aligned(count: int) -> None:
    import torch

    from stoker.engine.transfer.staged_rows import StagedRows

    first, second = list(range(count)), list(range(count, 2 * count))
    staged = StagedRows([first, second], torch.device("cuda"))
    assert [rows.tolist() for rows in staged.rows] == [first, second]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (*staged.rows, staged.sums_S))  # for one kernel of all lengths
    assert staged.sums_S.tolist() == [0] * count
    staged.sums_S += torch.arange(count, device="cuda")
    found = staged.read_back()
    torch.cuda.synchronize()
    assert found.tolist() == first
