"""Sums over peers' memory in one shot and in two: interpreted with all ranks in one process, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.model.group_sums import ordered_sum
from testing.model.interpreted import Interpreted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def check_sums(ranks: int, columns: int, dtype: torch.dtype) -> None:
    """Check calls with changing numbers of rows: each gets this call's parts, in the order of ranks, then the norm.

    Between two calls what an inbox holds of the call before last is overwritten at once.
    """
    from stoker.model.kernels import reference
    from stoker.model.kernels.fused import peer_sum
    from stoker.model.kernels.fused.peer_memory import PeerMemory

    peer_sum.PROGRAMS = 3  # rows are dealt to few programs
    torch.manual_seed(ranks)
    words, max_rows = columns * dtype.itemsize // 4, 8
    boxes = [torch.zeros(peer_sum.inbox_words(ranks, max_rows, words + 1), dtype=torch.int64) for _ in range(ranks)]
    never = torch.zeros(1, dtype=torch.int32)
    addresses = (*(box.data_ptr() for box in boxes), never.data_ptr())
    counts = [torch.full((3,), 2**31 - 3, dtype=torch.int32) for _ in range(ranks)]  # the count wraps around
    inboxes = [PeerMemory(rank, addresses, counts[rank], max_rows, words + 1) for rank in range(ranks)]
    residual_TD, norm_D = torch.randn(max_rows, columns).to(dtype), torch.randn(columns).to(dtype)
    for rows in (1, 8, 2, 5, 8, 3):
        parts = [torch.randn(rows, columns).to(dtype) for _ in range(ranks)]
        assert all(one.fits(parts[0]) for one in inboxes)
        expected_TD = ordered_sum(torch.stack(parts))
        for part, one in zip(parts, inboxes, strict=True):
            peer_sum.sum_rows(part, one, receives=False)
        sums = [peer_sum.sum_rows(part, one, sends=False) for part, one in zip(parts, inboxes, strict=True)]
        assert_same(sums, expected_TD, dtype)
        for part, one in zip(parts, inboxes, strict=True):
            peer_sum.sum_norm_rows(part, residual_TD[:rows], norm_D, 1e-5, one, receives=False)
        expected = reference.add_rms_norm(expected_TD, residual_TD[:rows], norm_D, 1e-5)
        both = [
            peer_sum.sum_norm_rows(part, residual_TD[:rows], norm_D, 1e-5, one, sends=False)
            for part, one in zip(parts, inboxes, strict=True)
        ]
        for found, wanted in zip(zip(*both, strict=True), expected, strict=True):
            assert_same(list(found), wanted, dtype, exact=False)


def check_two_shots(ranks: int, columns: int, dtype: torch.dtype) -> None:
    """Check calls with changing numbers of rows: each gets this call's parts, in the order of ranks, then the norm.

    The memory of the call before last is overwritten at once, and no call writes beyond its rows.
    """
    from stoker.model.kernels import reference
    from stoker.model.kernels.fused import two_shot_sum
    from stoker.model.kernels.fused.peer_memory import PeerMemory

    two_shot_sum.PROGRAMS = 2 * ranks + 1  # rows are dealt to few programs
    torch.manual_seed(ranks)
    words = columns * dtype.itemsize // 4
    max_words, max_rows = -(-words // 4) * 4, 4 * ranks
    length = two_shot_sum.memory_words(ranks, max_rows, max_words)
    memories = [torch.zeros(length + 4, dtype=torch.int32) for _ in range(ranks)]
    never = torch.zeros(1, dtype=torch.int32)
    addresses = (*(memory.data_ptr() for memory in memories), never.data_ptr())
    counts = [torch.full((2 * ranks,), 2**31 - 3, dtype=torch.int32) for _ in range(ranks)]  # the count wraps around
    shares = [PeerMemory(rank, addresses, counts[rank], max_rows, max_words) for rank in range(ranks)]
    residual_TD, norm_D = torch.randn(max_rows, columns).to(dtype), torch.randn(columns).to(dtype)
    for rows in (1, max_rows, 2, ranks + 1, max_rows, 3):
        parts = [torch.randn(rows, columns).to(dtype) for _ in range(ranks)]
        assert all(one.fits(parts[0]) for one in shares)
        expected_TD = ordered_sum(torch.stack(parts))
        for only in ("send", "add", "receive"):
            sums = [two_shot_sum.sum_rows(part, one, only) for part, one in zip(parts, shares, strict=True)]
        assert_same(sums, expected_TD, dtype)
        expected = reference.add_rms_norm(expected_TD, residual_TD[:rows], norm_D, 1e-5)
        for only in ("send", "add", "receive"):
            both = [
                two_shot_sum.sum_norm_rows(part, residual_TD[:rows], norm_D, 1e-5, one, only)
                for part, one in zip(parts, shares, strict=True)
            ]
        for found, wanted in zip(zip(*both, strict=True), expected, strict=True):
            assert_same(list(found), wanted, dtype, exact=False)
    assert not any(memory[length:].any() for memory in memories)
    assert not shares[0].fits(torch.zeros(max_rows + 1, columns, dtype=dtype))


def assert_same(found: list[Tensor], expected: Tensor, dtype: torch.dtype, *, exact: bool = True) -> None:
    """Every rank has the same bits, and they are right; the interpreter truncates to bfloat16."""
    assert all(torch.equal(found[0], one) for one in found[1:])
    if exact and dtype is not BF16:
        assert torch.equal(found[0], expected)
    else:
        tolerance = {F32: 1e-5, F16: 4e-3, BF16: 6e-2}[dtype]
        torch.testing.assert_close(found[0].float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_every_rank_has_the_sum_of_this_call_in_the_order_of_ranks(interpreted: Interpreted) -> None:
    one = [(check_sums, arguments) for arguments in ((2, 6, F32), (3, 10, F16), (2, 34, BF16))]
    two = [(check_two_shots, arguments) for arguments in ((2, 6, F32), (3, 10, F16), (4, 34, BF16))]
    interpreted.run([*one, *two])


def test_ordered_sums_round_once() -> None:
    parts_RTD = torch.tensor([[[1.0]], [[2.0**-8]], [[2.0**-8]]], dtype=BF16)
    assert ordered_sum(parts_RTD).item() == 1 + 2**-7, "one by one each would be lost"
    wide_RTD = torch.randn(4, 3, 8).to(BF16)
    expected_TD = ((wide_RTD[0].float() + wide_RTD[1].float()) + wide_RTD[2].float()) + wide_RTD[3].float()
    assert torch.equal(ordered_sum(wide_RTD), expected_TD.to(BF16))
