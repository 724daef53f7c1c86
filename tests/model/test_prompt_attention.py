"""Attention of prompts over the cache in C: against float32, and the same bits wherever a prompt is cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.model.kernels import reference
from stoker.model.kernels.compiled.library import CompileError, load_library
from stoker.model.kernels.sequences import CachedSequence, PagedSequences

BLOCK = 7
KEYS = 150
CUTS = [[0, 150], [0, 1, 63, 64, 66, 130, 150], [0, 100, 150]]
HEADS = [(1, 1, 16), (9, 3, 64), (5, 1, 48), (50, 1, 16), (4, 4, 128), (2, 1, 256)]
"""Heads, kv heads and their size; one group is larger than what is computed together."""


def kernels() -> Any:
    try:
        load_library()
    except CompileError as error:
        pytest.skip(str(error))
    from stoker.model.kernels.compiled import kernels as compiled

    return compiled


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def chunk(begin: int, end: int) -> PagedSequences:
    """Tokens [begin, end) of one sequence, behind one row of another one; layer 1 of 2."""
    table = torch.randperm(30, generator=torch.Generator().manual_seed(1))[: -(-end // BLOCK)]
    rows = ((table * 2 + torch.arange(2)[:, None, None]) * 2 + torch.arange(2)[:, None]).flatten(1)
    sequence = CachedSequence(1, 1 + end - begin, end, rows, {})
    return PagedSequences(1 + end - begin, torch.zeros(0), (), (sequence,))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 40, 64, 500])
@torch.inference_mode()
def test_a_cut_prompt_has_the_bits_of_the_whole_one(heads: tuple[int, int, int], window: int | None) -> None:
    num_heads, num_kv_heads, head_dim = heads
    compiled, scale = kernels(), head_dim**-0.5
    if not compiled.attends_prompts(head_dim):
        pytest.skip("prompts' attention is torch's on this processor")
    cache, q_TNH = randn(30, 2, 2, BLOCK, num_kv_heads, head_dim, seed=2), randn(KEYS, num_heads, head_dim, seed=3)

    def attend(attention: Any, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        rows = torch.cat([q_TNH[:1], q_TNH[begin:end]]).to(dtype)
        out_TNH: Tensor = attention(rows, cache.to(dtype), 1, chunk(begin, end), scale, window)
        return out_TNH[1:]

    wholes = [
        torch.cat([attend(compiled.paged_attention, *part, torch.bfloat16) for part in itertools.pairwise(cuts)])
        for cuts in CUTS
    ]
    assert all(torch.equal(other, wholes[0]) for other in wholes)
    exact = attend(reference.paged_attention, 0, KEYS, torch.float32)
    torch.testing.assert_close(wholes[0].float(), exact, rtol=2**-7, atol=1e-4)


@torch.inference_mode()
def test_keys_that_are_not_finite_reach_no_earlier_tile() -> None:
    compiled = kernels()
    if not compiled.attends_prompts(16):
        pytest.skip("prompts' attention is torch's on this processor")
    cache, q_TNH = randn(30, 2, 2, BLOCK, 1, 16, seed=2), randn(KEYS + 1, 1, 16, seed=3)
    rows = chunk(0, KEYS).prefill[0].block_rows[1]
    cache.view(-1, BLOCK, 1, 16)[rows[100 // BLOCK], 100 % BLOCK] = float("nan")
    out_TNH = compiled.paged_attention(q_TNH, cache, 1, chunk(0, KEYS), 0.25, None)[1:]
    assert out_TNH[:64].isfinite().all()
    assert not out_TNH[100:].isfinite().any()
