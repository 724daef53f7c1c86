"""Two-shot sums over peers' memory: interpreted with all ranks in one process, one part of the work after the other."""

from __future__ import annotations

import torch

from stoker.model.group_sums import ordered_sum
from testing.model import interpreted
from tests.model.test_peer_sum import BF16, F16, F32, assert_same


def check_sums(ranks: int, columns: int, dtype: torch.dtype) -> None:
    """Check calls with changing numbers of rows: each gets this call's parts, in the order of ranks, then the norm.

    The memory of the call before last is overwritten at once, and no call writes beyond its rows.
    """
    from stoker.model.kernels import reference
    from stoker.model.kernels.fused import two_shot_sum

    two_shot_sum.PROGRAMS = 3  # rows are dealt to few programs
    torch.manual_seed(ranks)
    words = columns * dtype.itemsize // 4
    max_words, max_rows = -(-words // 4) * 4, 4 * ranks
    length = two_shot_sum.memory_words(ranks, max_rows, max_words)
    memories = [torch.zeros(length + 4, dtype=torch.int32) for _ in range(ranks)]
    never = torch.zeros(1, dtype=torch.int32)
    addresses = torch.tensor([*(memory.data_ptr() for memory in memories), never.data_ptr()])
    counts = [torch.full((3,), 2**31 - 3, dtype=torch.int32) for _ in range(ranks)]  # the count wraps around
    shares = [two_shot_sum.Shares(rank, addresses, counts[rank], max_rows, max_words) for rank in range(ranks)]
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


def test_every_rank_has_the_sum_of_this_call_in_the_order_of_ranks() -> None:
    interpreted.run([(check_sums, arguments) for arguments in ((2, 6, F32), (3, 10, F16), (4, 34, BF16))])
