"""Long prompts whose attention flash-attn-4 computes: the choice, the groups of a step, and the copies of its keys.

A plain attention over packed keys stands in for the package, except on a GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.model.kernels.fused.attention.splits import (
    LONG_KEYS,
    LONG_SPLITS,
    MAX_SPLITS,
    MIN_SPLITS,
    DecodeScratch,
    num_splits,
)
from stoker.model.kernels.kernel_set import MissingKernel, has_flash
from stoker.model.kernels.long_prompts import MOST_CHUNKS, LongPrompts, PromptAttention, count_pairs, group_chunks
from stoker.model.kernels.ops import Ops
from stoker.model.paged_batch import PagedBatch
from stoker.model.paged_prompts import PromptPlan, choose_prompts, prompt_keys, scratch_bytes
from testing.model.interpreted import Interpreted
from testing.model.plain_attention import PlainVarlen
from tests.model.test_fused_attention import Case, assert_near, expected_paged, make_paged


@given(
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=8),
    num_decodes=st.integers(0, 5),
    spare=st.integers(0, 50),
)
def test_groups_cover_every_chunk_once_and_fit_the_buffer(
    chunks: list[tuple[int, int]], num_decodes: int, spare: int
) -> None:
    lengths = [*([1] * num_decodes), *(new for _, new in chunks)]
    seq_lens = [*([7] * num_decodes), *(old + new for old, new in chunks)]
    bounds = [0, *itertools.accumulate(lengths)]
    max_keys = max(seq_lens, default=0) + spare
    groups = list(group_chunks(bounds, seq_lens, num_decodes, max_keys))
    assert [number for group in groups for number in range(group.first, group.end)] == list(
        range(num_decodes, len(lengths))
    )
    for group in groups:
        assert group.num_keys == sum(seq_lens[group.first : group.end]) <= max_keys
        assert group.rows == (bounds[group.first], bounds[group.end])
        assert group.longest == (max(lengths[group.first : group.end]), max(seq_lens[group.first : group.end]))
    for one, other in itertools.pairwise(groups):  # no group could take the next chunk as well
        assert one.num_keys + seq_lens[other.first] > max_keys


def test_a_group_has_no_more_chunks_than_one_compiled_kernel_takes() -> None:
    count = 2 * MOST_CHUNKS + 3
    groups = list(group_chunks(range(count + 1), [1] * count, 0, 10**6))
    assert [group.num_chunks for group in groups] == [MOST_CHUNKS, MOST_CHUNKS, 3]


def test_pairs_are_those_that_queries_see() -> None:
    seen = sum(1 for query in range(5, 12) for key in range(query + 1)) + sum(
        1 for query in range(4) for key in range(query + 1)
    )
    assert count_pairs([5, 0], [7, 4]) == seen


def batch_of(chunks: list[tuple[int, int]]) -> PagedBatch:
    news = [new for _, new in chunks]
    return PagedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(news)], dtype=torch.int32),
        seq_lens=torch.tensor([sum(chunk) for chunk in chunks], dtype=torch.int32),
        block_tables=torch.zeros(len(chunks), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(news), dtype=torch.int32),
        num_tokens=sum(news),
    )


def test_short_prompts_and_decodes_stay_with_our_kernel() -> None:
    plan = PromptPlan(torch.zeros(1, 1, 2, 4, 1, 8), 64, PromptAttention(PlainVarlen(), 50, 100))
    assert plan.plan(batch_of([(30, 1), (60, 1)]), 2) is None
    assert plan.plan(batch_of([(63, 1), (0, 9)]), 1) is None  # 45 pairs of the prompt
    prompts = plan.plan(batch_of([(63, 1), (0, 10), (3, 2), (50, 9)]), 1)
    assert prompts is not None
    assert [(s.query_start.tolist(), s.key_start.tolist()) for s in prompts.groups] == [
        ([0, 10, 12], [0, 10, 15]),
        ([0, 9], [0, 59]),
    ]
    assert [plan.pays_ungraphed(pairs) for pairs in (99, 100)] == [False, True]


def test_flash_is_refused_by_name_where_it_cannot_be() -> None:
    def choose(ops: Ops, dtype: torch.dtype, name: str = "flash") -> PromptAttention | None:
        return choose_prompts(ops, name, dtype, None)

    assert choose(Ops("fused"), torch.bfloat16, "stoker") is None
    with pytest.raises(MissingKernel, match=r"'flash' does not take torch\.float32"):
        choose(Ops("fused"), torch.float32)
    with pytest.raises(MissingKernel, match=r"'flash' is not built for .*deterministic = True; allowed: auto, stoker"):
        choose(Ops("fused", deterministic=True), torch.bfloat16)
    with pytest.raises(MissingKernel, match=r"'flash' is not built for kernels 'reference'.*allowed: auto, sdpa"):
        choose(Ops(), torch.bfloat16)
    with pytest.raises(MissingKernel, match="'flash' takes head sizes of 8 to 256 in steps of 8, not 12"):
        PromptPlan(torch.zeros(1, 1, 2, 4, 1, 12), 64, PromptAttention(PlainVarlen()))
    if not has_flash():
        with pytest.raises(MissingKernel, match=r"'flash' needs flash-attn-4, which is not installed: pip install"):
            choose(Ops("fused"), torch.bfloat16)


def test_the_buffer_holds_the_longest_sequence_and_a_step_of_whole_prompts() -> None:
    assert (prompt_keys(100, 40), prompt_keys(30, 40)) == (100, 40)
    plan = PromptPlan(torch.zeros(1, 1, 2, 4, 3, 8, dtype=torch.bfloat16), 100, PromptAttention(PlainVarlen()))
    assert plan.scratch.nbytes == scratch_bytes(3, 8, 100, torch.bfloat16)


def test_only_long_sequences_of_few_rows_are_cut_into_more_splits() -> None:
    short, long = MAX_SPLITS * LONG_KEYS, 131_072
    for rows, kv_heads in itertools.product((1, 2, 3, 8, 64, 300), (1, 2, 8)):
        splits = num_splits(rows, kv_heads)
        assert MIN_SPLITS <= splits <= MAX_SPLITS
        assert num_splits(rows, kv_heads, short) == splits
        assert splits <= num_splits(rows, kv_heads, long) <= LONG_SPLITS
    assert [num_splits(rows, 8, long) for rows in (1, 2, 16)] == [64, 32, 32]
    assert num_splits(1, 2, long) == LONG_SPLITS
    scratch = DecodeScratch(16, 32, 8, 128, "cpu", long)
    assert all(len(scratch.out) >= rows * num_splits(rows, 8, long) * 32 * 128 for rows in range(1, 17))


# The kernels.


def check_long_prompts(case: Case, device: str, max_keys: int, is_real: bool = False) -> None:
    """Check a step whose chunks flash-attn-4, or the stand-in, attends for, in groups of at most so many keys."""
    from stoker.model.kernels.fused.attention.flash import attend_varlen
    from stoker.model.kernels.fused.attention.paged import paged_attention

    paged = make_paged(case, device)
    stand_in = PlainVarlen()
    plan = PromptPlan(paged.cache, max_keys, PromptAttention(attend_varlen if is_real else stand_in, 1, 1))
    plan.scratch.fill_(float("nan"))
    old, new = zip(*case.chunks, strict=True)
    batch = batch_of([*zip(old, new, strict=True)])
    prompts = plan.plan(batch, paged.sequences.num_decodes)
    assert isinstance(prompts, LongPrompts)
    sequences = replace(paged.sequences, prompts=prompts)
    out = paged_attention(paged.q, paged.cache, paged.layer, sequences, case.scale, case.window)
    assert_near(out, expected_paged(paged), case.dtype)
    assert is_real or stand_in.calls == len(prompts.groups) >= 1


TINY = [
    (Case(4, 2, 16, chunks=((40, 1), (0, 37), (20, 15)), block_size=16), 100),
    (Case(4, 2, 16, chunks=((40, 1), (3, 1), (0, 37), (20, 15), (0, 2)), block_size=16), 40),
    (Case(6, 3, 8, chunks=((0, 40),), block_size=24), 40),
    (Case(6, 3, 8, chunks=((7, 5), (0, 1), (60, 9)), block_size=5, window=12), 69),
]


def check_wide_rows() -> None:
    """Check keys that are wider, over all heads, than one program copies."""
    from stoker.model.kernels.fused.attention.gather import COLUMNS, gather_keys

    heads = COLUMNS // 64 + 1
    cache = torch.randn(3, 2, 2, 4, heads, 64)
    tables, start = torch.tensor([[2, 0], [1, 77]], dtype=torch.int32), torch.tensor([0, 7, 10], dtype=torch.int32)
    keys, values = torch.full((2, 11, heads, 64), -1.0)
    gather_keys(cache[:, 1, 0], cache[:, 1, 1], tables, start, 7, keys, values)
    for found, kind in ((keys, 0), (values, 1)):
        whole = torch.cat((cache[2, 1, kind], cache[0, 1, kind][:3], cache[1, 1, kind][:3]))
        assert torch.equal(found[:10], whole)
        assert (found[10:] == -1).all()


def check_many_splits(device: str, seq_len: int, long_keys: int = LONG_KEYS) -> None:
    """Check a sequence that is cut into more splits than short ones, beside a short one. `long_keys`: of a split."""
    from stoker.model.kernels.fused.attention.decode import attend_decode

    torch.manual_seed(0)
    heads, kv_heads, dim, size = 2, 1, 16, 64
    blocks = -(-seq_len // size)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    k, v = torch.randn(2, blocks, size, kv_heads, dim, dtype=dtype, device=device)
    tables = torch.stack([torch.randperm(blocks), torch.randperm(blocks)]).to(device, torch.int32)
    lens = torch.tensor([seq_len, 70], dtype=torch.int32, device=device)
    q = torch.randn(2, heads, dim, dtype=dtype, device=device)
    longest = MAX_SPLITS * LONG_KEYS + 1
    scratch = DecodeScratch(2, heads, kv_heads, dim, device, longest)
    splits = num_splits(2, kv_heads, longest)
    assert splits * long_keys >= seq_len > MAX_SPLITS * long_keys
    for _ in range(2):  # the second launch finds what the first left in the scratch
        out = attend_decode(
            *(q, k, v, lens, tables, scratch),
            num_sequences=2,
            scale=dim**-0.5,
            window=None,
            splits=splits,
            long_keys=long_keys,
        )
        for row, length in enumerate(lens.tolist()):
            keys, values = (x[tables[row].long()].flatten(0, 1)[:length].double() for x in (k, v))
            weights = torch.einsum("nh,lkh->nl", q[row].double(), keys).mul(dim**-0.5).softmax(-1)
            assert_near(out[row], torch.einsum("nl,lkh->nh", weights, values), dtype)
    assert not scratch.arrived.any()


def test_interpreted_long_prompts_equal_the_plain_formula(interpreted: Interpreted) -> None:
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (check_long_prompts, (case, "cpu", max_keys)) for case, max_keys in TINY
    ]
    interpreted.run([*calls, (check_wide_rows, ()), (check_many_splits, ("cpu", 40 * 32 - 5, 32))])


REAL = [
    (Case(32, 8, 128, chunks=((0, 8192),), block_size=64, dtype=torch.bfloat16), 8192),
    (Case(32, 8, 128, chunks=((300, 1), (9, 1), (0, 700), (5000, 512)), block_size=64, dtype=torch.bfloat16), 8192),
    (Case(32, 8, 128, chunks=((300, 1), (0, 700), (5000, 31), (17, 300)), block_size=64, dtype=torch.bfloat16), 5100),
    (Case(8, 8, 64, chunks=((1000, 100), (0, 130)), block_size=16, dtype=torch.float16), 2000),
    (Case(14, 2, 64, chunks=((900, 40), (300, 400)), block_size=48, window=200, dtype=torch.bfloat16), 2000),
    (Case(16, 8, 128, chunks=((64, 300),), block_size=128, window=100, dtype=torch.bfloat16), 400),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "max_keys"), REAL, ids=str)
def test_flash_attends_for_long_prompts_over_the_cache(case: Case, max_keys: int) -> None:
    pytest.importorskip("flash_attn.cute")
    check_long_prompts(case, "cuda", max_keys, is_real=True)


@pytest.mark.gpu
@pytest.mark.parametrize("seq_len", [33_000, 120_001])
def test_a_long_sequence_is_read_by_many_programs(seq_len: int) -> None:
    check_many_splits("cuda", seq_len)


@pytest.mark.gpu
def test_the_stand_in_is_what_flash_computes() -> None:
    pytest.importorskip("flash_attn.cute")
    from stoker.model.kernels.fused.attention.flash import attend_varlen

    torch.manual_seed(0)
    q = torch.randn(330, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1000, 2, 128, dtype=torch.bfloat16, device="cuda")
    rows, keys = (torch.tensor(b, dtype=torch.int32, device="cuda") for b in ([0, 300, 330], [0, 300, 1000]))
    for window in (None, 77):
        found = attend_varlen(q, k, v, rows, keys, (300, 700), 0.1, window)
        wanted = PlainVarlen()(q, k, v, rows, keys, (300, 700), 0.1, window)
        assert_near(found, wanted.double(), torch.bfloat16)
