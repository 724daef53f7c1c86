"""The fused attention kernels against plain float64 formulas.

Tiny shapes are interpreted on the CPU; a table of shapes runs on the GPU, where bits are compared too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.model.kernels.kernel_set import MissingKernel
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.sequences import DeviceSequences, pack_sequences
from stoker.model.paged_batch import PagedBatch, PagedSize
from stoker.model.paged_buffers import PagedBuffers
from testing.model.interpreted import Interpreted
from testing.model.run_checks import RUNS, check_runs

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Tolerances of values about 1; the scores, weights and results of two-byte dtypes are rounded to them."""


@dataclass(frozen=True)
class Case:
    """Lengths of packed sequences, of cached sequences before this step, and of new ones (0 new: padding)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def attend_plainly(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend by the plain formula; the queries are the last positions."""
    group, (num_queries, seq_len) = q_TNH.shape[1] // k_LKH.shape[1], (len(q_TNH), len(k_LKH))
    k, v = (x.double().repeat_interleave(group, 1) for x in (k_LKH, v_LKH))
    scores_NTL = torch.einsum("tnh,lnh->ntl", q_TNH.double(), k) * scale
    distance = torch.arange(seq_len - num_queries, seq_len)[:, None] - torch.arange(seq_len)
    hidden = (distance < 0) | (distance >= (window or seq_len))
    weights = scores_NTL.masked_fill(hidden.to(q_TNH.device), float("-inf")).softmax(-1)
    return torch.einsum("ntl,lnh->tnh", weights, v)


def random_qkv(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of one product, as the model makes them."""
    num_tokens = sum(case.lengths)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    qkv = torch.randn(num_tokens, sum(heads), case.head_dim, dtype=case.dtype, device=device)
    q, k, v = qkv.split(heads, 1)
    return q, k, v


def check_packed(case: Case, device: str, attention: str = "stoker") -> None:
    """Check forward and all gradients."""
    from stoker.model.kernels.fused.attention.packed import packed_attention  # needs Triton

    torch.manual_seed(sum(case.lengths))
    leaves = [x.detach().clone().requires_grad_() for x in random_qkv(case, device)]
    sequences = pack_sequences(torch.tensor([0, *itertools.accumulate(case.lengths)]), device=device)
    q, k, v = leaves
    out = packed_attention(q, k, v, sequences, case.scale, case.window, attention)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, grad)
    plain = [x.detach().double().requires_grad_() for x in leaves]
    pieces = zip(*(x.split(case.lengths) for x in plain), strict=True)
    expected = torch.cat([attend_plainly(q, k, v, case.scale, case.window) for q, k, v in pieces])
    expected_grads = torch.autograd.grad(expected, plain, grad.double())
    assert_near(out, expected, case.dtype)
    for found, wanted in zip(grads, expected_grads, strict=True):
        assert_near(found, wanted, case.dtype)


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype
    found, wanted = found.detach(), wanted.detach()
    size = wanted.double().square().mean().sqrt().clamp(min=1e-3)
    error = (found.double() - wanted).abs().max()
    assert error <= TOLERANCES[dtype] * max(1.0, float(size)) * (1 if dtype is torch.float32 else 3), float(error)


@dataclass
class Paged:
    """A cache whose unused parts are poison, and a step over it."""

    case: Case
    cache: Tensor
    sequences: DeviceSequences
    q: Tensor
    keys: list[Tensor]
    """Per sequence: [2, seq_len, K, H]."""

    layer = 1


def make_paged(case: Case, device: str) -> Paged:
    torch.manual_seed(sum(old + new for old, new in case.chunks))
    size, lengths = case.block_size, [old + new for old, new in case.chunks]
    needs = [-(-length // size) for length in lengths]
    shape = (sum(needs) + 2, 2, 2, size, case.num_kv_heads, case.head_dim)
    cache = torch.full(shape, float("nan"), dtype=case.dtype, device=device)
    free = torch.randperm(sum(needs) + 1).tolist()
    tables = torch.full((len(needs), max(needs) + 1), sum(needs) + 1, dtype=torch.int32)  # the poisoned last block
    keys = []
    for row, (need, length) in enumerate(zip(needs, lengths, strict=True)):
        blocks = [free.pop() for _ in range(need)]
        tables[row, :need] = torch.tensor(blocks, dtype=torch.int32)
        both = torch.randn(2, length, case.num_kv_heads, case.head_dim, dtype=case.dtype, device=device)
        for place, block in enumerate(blocks):
            part = both[:, place * size : (place + 1) * size]
            cache[block, Paged.layer, :, : part.shape[1]] = part
        keys.append(both)
    news = [new for _, new in case.chunks]
    batch = PagedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(news)], dtype=torch.int32),
        seq_lens=torch.tensor(
            [length if new else 0 for length, new in zip(lengths, news, strict=True)], dtype=torch.int32
        ),
        block_tables=tables,
        slot_mapping=torch.full((sum(news),), -1, dtype=torch.int32),
        num_tokens=sum(news),
    )
    rows = max(sum(news), len(news))
    buffers = PagedBuffers(
        cache, case.num_heads, PagedSize(max_tokens=rows, max_sequences=len(news) + 2, max_blocks=tables.shape[1])
    )
    sequences = buffers.take(batch)
    q = torch.randn(sum(news), case.num_heads, case.head_dim, dtype=case.dtype, device=device)
    return Paged(case, cache, sequences, q, keys)


def expected_paged(paged: Paged) -> Tensor:
    case, pieces = paged.case, paged.q.split([new for _, new in paged.case.chunks])
    return torch.cat(
        [
            attend_plainly(q, both[0], both[1], case.scale, case.window)
            for q, both in zip(pieces, paged.keys, strict=True)
        ]
    )


def check_paged(case: Case, device: str, is_deterministic: bool) -> None:
    from stoker.model.kernels.fused.attention import paged as kernels  # needs Triton

    paged = make_paged(case, device)
    function = kernels.paged_attention_deterministic if is_deterministic else kernels.paged_attention
    for _ in range(2):  # the second launch finds what the first left in the scratch
        out = function(paged.q, paged.cache, Paged.layer, paged.sequences, case.scale, case.window)
        assert_near(out, expected_paged(paged), case.dtype)
    assert not paged.sequences.scratch.arrived.any()


def check_padded_decode(case: Case, device: str) -> None:
    """Check that rows beyond the step's sequences are zeros, and that the others do not depend on them."""
    from stoker.model.kernels.fused.attention import paged as kernels  # needs Triton

    paged = make_paged(replace(case, chunks=tuple((old, 1) for old, _ in case.chunks)), device)
    sequences = replace(paged.sequences, slots=torch.full((len(paged.q) + 2,), -1, dtype=torch.int32, device=device))
    padded = torch.cat((paged.q, torch.full_like(paged.q[:1], float("nan")).expand(2, -1, -1)))
    assert sequences.fit(len(padded))
    for function in (kernels.paged_attention, kernels.paged_attention_deterministic):
        out = function(padded, paged.cache, Paged.layer, sequences, case.scale, case.window)
        assert_near(out[:-2], expected_paged(paged), case.dtype)
        assert not out[-2:].any()


TINY_PACKED = [
    Case(4, 2, 16, lengths=(37, 1, 50)),
    Case(6, 2, 10, lengths=(5, 40), window=7),
    Case(3, 1, 12, lengths=(1,)),
]
TINY_PAGED = [
    Case(4, 2, 16, chunks=((40, 1), (0, 37), (20, 15)), block_size=16),
    Case(6, 2, 10, chunks=((300, 1), (7, 5)), block_size=24, window=30),
    Case(3, 1, 12, chunks=((150, 1), (0, 1), (33, 1)), block_size=64),
    Case(2, 2, 8, chunks=((9, 20),), block_size=5),
]


def test_interpreted_kernels_equal_the_plain_formula(interpreted: Interpreted) -> None:
    calls: list[tuple[Any, tuple[Any, ...]]] = [(check_packed, (case, "cpu")) for case in TINY_PACKED]
    calls += [
        (check_paged, (case, "cpu", is_deterministic)) for case in TINY_PAGED for is_deterministic in (False, True)
    ]
    calls += [(check_padded_decode, (case, "cpu")) for case in TINY_PAGED[:2]]
    calls += [(check_runs, (runs, window, "fused.kernels")) for runs, window in RUNS]
    interpreted.run(calls)


def test_the_choice_of_attention_is_resolved_by_a_table() -> None:
    assert Ops().attention("auto") == Ops().attention("auto", program="paged") == "sdpa"
    assert Ops(deterministic=True).attention("auto") == "stoker"
    with pytest.raises(MissingKernel, match=r"'cudnn' is not built for kernels 'reference'.*allowed: auto, sdpa"):
        Ops().attention("cudnn")
    fused = Ops("fused")
    assert fused.attention("auto", torch.float32) == "stoker"
    assert fused.attention("auto", program="paged") == "stoker"
    assert Ops("fused", deterministic=True).attention("auto", torch.bfloat16) == "stoker"
    with pytest.raises(MissingKernel, match=r"'cudnn' does not take torch\.float32"):
        fused.attention("cudnn", torch.float32)
    with pytest.raises(MissingKernel, match=r"'cudnn' is not built .* allowed: auto, stoker"):
        fused.attention("cudnn", program="paged")
    torch.use_deterministic_algorithms(True)
    try:
        assert fused.attention("auto", torch.bfloat16) in ("flash", "stoker")
        with pytest.raises(MissingKernel, match="'cudnn' has no backward pass that repeats bitwise"):
            fused.attention("cudnn")
    finally:
        torch.use_deterministic_algorithms(False)


def test_more_heads_of_a_kv_head_than_a_tile_holds_are_refused_with_the_limit() -> None:
    """The refusal also holds where only the backward pass, whose tiles are smaller, cannot take them."""
    from stoker.model.kernels.fused.attention.backward import attend_backward  # needs Triton
    from stoker.model.kernels.fused.attention.forward import attend_forward

    cu_seqlens, kv = torch.tensor([0, 4], dtype=torch.int32), torch.zeros(4, 1, 64, dtype=torch.bfloat16)
    q = torch.zeros(4, 130, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="130 heads share a kv head; at most 128 can"):
        attend_forward(q, kv, kv, cu_seqlens, num_sequences=1, scale=1.0, window=None)
    q = q[:, :70].contiguous()
    with pytest.raises(ValueError, match="70 heads share a kv head; at most 64 can"):
        attend_backward(q, q, kv, kv, q, q[..., 0].float(), cu_seqlens, 1.0, None)


PACKED = [
    Case(8, 2, 128, lengths=(1,), dtype=torch.bfloat16),
    Case(32, 8, 128, lengths=(700,), dtype=torch.bfloat16),
    Case(8, 8, 128, lengths=(130, 1, 17, 513), dtype=torch.bfloat16),
    Case(16, 8, 128, lengths=(33, 257), dtype=torch.bfloat16),
    Case(9, 3, 64, lengths=(64, 300, 65), dtype=torch.bfloat16),
    Case(14, 2, 64, lengths=(400,), dtype=torch.bfloat16, window=100),
    Case(8, 2, 128, lengths=(300, 41), dtype=torch.bfloat16, window=33),
    Case(8, 1, 96, lengths=(129,), dtype=torch.float16),
    Case(4, 2, 80, lengths=(100, 31), dtype=torch.bfloat16),
    Case(4, 1, 256, lengths=(150,), dtype=torch.bfloat16),
    Case(8, 2, 128, lengths=(70, 200)),
    Case(6, 2, 10, lengths=(60,), window=9),
]
PAGED = [
    Case(
        32, 8, 128, chunks=tuple((old, 1) for old in (0, 1, 15, 16, 63, 64, 127, 128, 700, 2000)), block_size=16,
        dtype=torch.bfloat16,
    ),
    Case(32, 8, 128, chunks=((5000, 1),), block_size=64, dtype=torch.bfloat16),
    Case(16, 8, 128, chunks=((300, 1), (17, 1), (0, 200), (500, 131)), block_size=16, dtype=torch.bfloat16),
    Case(9, 3, 64, chunks=((300, 1), (200, 64), (0, 3)), block_size=32, dtype=torch.bfloat16),
    Case(8, 8, 128, chunks=((1000, 1), (1000, 100)), block_size=128, dtype=torch.bfloat16),
    Case(8, 1, 128, chunks=((1000, 1), (100, 300)), block_size=256, dtype=torch.float16),
    Case(14, 2, 64, chunks=((900, 1), (300, 40)), block_size=48, window=200, dtype=torch.bfloat16),
    Case(4, 4, 80, chunks=((10, 1), (0, 33)), block_size=16, dtype=torch.bfloat16),
    Case(4, 1, 256, chunks=((400, 1), (0, 70)), block_size=16, dtype=torch.bfloat16),
    Case(8, 2, 128, chunks=((300, 1), (33, 50)), block_size=16),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_attention_on_the_gpu(case: Case) -> None:
    check_packed(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 40], ids=str)
@pytest.mark.parametrize("lengths", [(512,), (256, 256), (300, 300, 300), (300, 17, 300, 300, 700)], ids=str)
def test_cudnn_takes_documents_of_any_lengths(lengths: tuple[int, ...], window: int | None) -> None:
    check_packed(Case(8, 2, 128, lengths=lengths, window=window, dtype=torch.bfloat16), "cuda", "cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "window"), [((512,), None), ((300, 17, 700), None), ((300, 17, 700), 50)], ids=str)
def test_flash_takes_documents_of_any_lengths(lengths: tuple[int, ...], window: int | None) -> None:
    pytest.importorskip("flash_attn.cute")
    check_packed(Case(8, 2, 128, lengths=lengths, window=window, dtype=torch.bfloat16), "cuda", "flash")


@pytest.mark.gpu
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("case", PAGED, ids=str)
def test_paged_attention_on_the_gpu(case: Case, is_deterministic: bool) -> None:
    check_paged(case, "cuda", is_deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [PAGED[0], PAGED[6], PAGED[9]], ids=str)
def test_padded_rows_of_a_decode_step_are_zeros(case: Case) -> None:
    check_padded_decode(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [PACKED[2], PACKED[5]], ids=str)
def test_gradients_repeat_bitwise(case: Case) -> None:
    from stoker.model.kernels.fused.attention.packed import packed_attention  # needs Triton

    leaves = [x.detach().clone().requires_grad_() for x in random_qkv(case, "cuda")]
    sequences = pack_sequences(torch.tensor([0, *itertools.accumulate(case.lengths)]), device="cuda")
    q, k, v = leaves
    out = packed_attention(q, k, v, sequences, case.scale, case.window, "stoker")
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    for _ in range(3):
        again = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 48])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "window"),
    [
        (32, 8, 128, torch.bfloat16, None),
        (9, 3, 64, torch.bfloat16, None),
        (16, 8, 128, torch.bfloat16, 100),
        (8, 2, 64, torch.float32, None),
    ],
)
def test_deterministic_attention_has_the_same_bits_packed_and_paged_in_any_chunks(
    block_size: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    from stoker.model.kernels.fused.attention.packed import packed_attention  # needs Triton
    from stoker.model.kernels.fused.attention.paged import paged_attention_deterministic

    torch.manual_seed(0)
    case = Case(heads, kv_heads, head_dim, lengths=(77, 500, 3), window=window, dtype=dtype)
    q, k, v = random_qkv(case, "cuda")
    cu_seqlens = torch.tensor([0, 77, 577, 580])
    with torch.no_grad():
        packed = packed_attention(q, k, v, pack_sequences(cu_seqlens, device="cuda"), case.scale, window, "stoker")
    grown = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    trained = packed_attention(
        grown[0], grown[1], grown[2], pack_sequences(cu_seqlens, device="cuda"), case.scale, window, "stoker"
    )
    assert torch.equal(packed, trained)
    rows = slice(77, 577)
    q, k, v = q[rows], k[rows], v[rows]
    num_blocks = -(-500 // block_size)
    cache = torch.full((num_blocks + 1, 2, 2, block_size, kv_heads, head_dim), float("nan"), dtype=dtype, device="cuda")
    table = torch.randperm(num_blocks)
    for place, block in enumerate(table.tolist()):
        part = slice(place * block_size, (place + 1) * block_size)
        cache[block, 1, 0, : len(k[part])], cache[block, 1, 1, : len(v[part])] = k[part], v[part]
    for chunk in (1, 7, 64, 129, 500):
        found = torch.cat(
            [
                chunk_of_one_sequence(
                    paged_attention_deterministic, q, cache, table, begin, min(begin + chunk, 500), case
                )
                for begin in range(0, 500, chunk)
            ]
        )
        assert torch.equal(found, packed[rows]), chunk


def chunk_of_one_sequence(
    function: Any, q: Tensor, cache: Tensor, table: Tensor, begin: int, end: int, case: Case
) -> Tensor:
    batch = PagedBatch(
        query_start=torch.tensor([0, end - begin], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=table[None].to(torch.int32),
        slot_mapping=torch.full((end - begin,), -1, dtype=torch.int32),
        num_tokens=end - begin,
    )
    size = PagedSize(max_tokens=end - begin, max_sequences=1, max_blocks=len(table))
    sequences = PagedBuffers(cache, case.num_heads, size).take(batch)
    out: Tensor = function(q[begin:end], cache, 1, sequences, case.scale, case.window)
    return out


@pytest.mark.gpu
def test_a_captured_decode_step_serves_other_batches() -> None:
    from stoker.model.kernels.fused.attention.paged import paged_attention  # needs Triton

    case = Case(16, 8, 128, chunks=tuple((old, 1) for old in (900, 40, 3, 500, 77, 1500)), dtype=torch.bfloat16)
    whole = make_paged(case, "cuda")
    size = PagedSize(max_tokens=8, max_sequences=8, max_blocks=whole.sequences.block_tables.shape[1])
    buffers = PagedBuffers(whole.cache, case.num_heads, size)
    q = torch.zeros(8, 16, 128, dtype=case.dtype, device="cuda")

    def prepare(chosen: list[int]) -> DeviceSequences:
        seq_lens, tables = whole.sequences.seq_lens.cpu(), whole.sequences.block_tables.cpu()
        q[: len(chosen)] = whole.q[chosen]
        return buffers.take(
            PagedBatch(
                query_start=torch.arange(len(chosen) + 1, dtype=torch.int32),
                seq_lens=seq_lens[chosen],
                block_tables=tables[chosen],
                slot_mapping=torch.full((len(chosen),), -1, dtype=torch.int32),
                num_tokens=len(chosen),
            )
        )

    sequences = prepare([0, 1, 2])
    paged_attention(q, whole.cache, Paged.layer, sequences, case.scale, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, whole.cache, Paged.layer, sequences, case.scale, None)
    expected = expected_paged(whole)
    for chosen in ([5], [3, 4, 0, 1, 2, 5], [1, 0]):
        prepare(chosen)
        out.fill_(float("nan"))
        graph.replay()
        assert_near(out[: len(chosen)], expected[chosen], case.dtype)
        assert not out[len(chosen) :].any()
