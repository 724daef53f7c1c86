"""The C kernels against the reference kernels, and what happens where they cannot be compiled."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels import reference
from stoker.model.kernels.compiled.library import CompileError, compiled_file, load_library
from stoker.model.kernels.compiled.product_kinds import PRODUCTS
from stoker.model.kernels.kernel_set import resolve_serving_kernels
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.sequences import PagedSequences
from stoker.model.paged_batch import PagedBatch, PagedSize
from stoker.model.paged_plan import HostPlan


def is_compilable() -> bool:
    try:
        load_library()
    except CompileError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not is_compilable(), reason="this machine has no C compiler")
SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
ONE_ROUNDING: dict[str, Any] = {"rtol": 2**-7, "atol": 1e-6}
"""bfloat16 numbers that are neighbours: sums have another order."""


def kernels() -> Any:
    from stoker.model.kernels.compiled import kernels as compiled

    return compiled


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@needs_compiler
@SETTINGS
@given(st.integers(0, 20), st.integers(1, 150), st.integers(0, 99))
@torch.inference_mode()
def test_norms_and_swiglu_round_where_the_reference_rounds(rows: int, size: int, seed: int) -> None:
    x_TD, residual_TD = randn(rows, size, seed=seed), randn(rows, size, seed=seed + 1)
    weight_D = randn(size, seed=seed + 2)
    close = torch.testing.assert_close
    close(kernels().rms_norm(x_TD, weight_D, 1e-5), reference.rms_norm(x_TD, weight_D, 1e-5), **ONE_ROUNDING)
    normed_TD, total_TD = kernels().add_rms_norm(x_TD, residual_TD, weight_D, 1e-5)
    expected_normed, expected_total = reference.add_rms_norm(x_TD, residual_TD, weight_D, 1e-5)
    close(normed_TD, expected_normed, **ONE_ROUNDING)
    assert torch.equal(total_TD, expected_total)
    gate_up_TF = 5 * randn(rows, 2 * size, seed=seed)
    close(kernels().swiglu(gate_up_TF), reference.swiglu(gate_up_TF), **ONE_ROUNDING)


@needs_compiler
@torch.inference_mode()
def test_numbers_that_are_not_finite_stay_visible() -> None:
    x = torch.tensor([[1.0, float("nan"), 2.0, 3.0], [1.0, float("inf"), 2.0, 3.0], [1, 2, 3, 4]], dtype=torch.bfloat16)
    weight = torch.ones(4, dtype=torch.bfloat16)
    normed, total = kernels().add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)
    assert normed.isfinite().all(1).tolist() == total.isfinite().all(1).tolist() == [False, False, True]
    assert kernels().swiglu(x).isfinite().all(1).tolist() == [False, False, True]


def plan(lengths: list[int], chunk: int, cache: torch.Tensor) -> PagedSequences:
    """A step with one new token of each sequence; `chunk` new tokens of the last one."""
    block_size = cache.shape[3]
    num_blocks = [-(-length // block_size) for length in lengths]
    free = torch.randperm(len(cache), generator=torch.Generator().manual_seed(sum(lengths))).tolist()
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    news = [*[1] * (len(lengths) - 1), chunk]
    slots = [
        int(tables[row, place // block_size]) * block_size + place % block_size
        for row, (length, new) in enumerate(zip(lengths, news, strict=True))
        for place in range(length - new, length)
    ]
    numbers = {"query_start": [0, *torch.tensor(news).cumsum(0).tolist()], "seq_lens": lengths, "slot_mapping": slots}
    fields: dict[str, Any] = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
    size = PagedSize(max_tokens=64, max_sequences=8, max_blocks=140)
    step = PagedBatch(**fields, block_tables=tables, num_tokens=sum(news))
    return HostPlan(cache, size, groups_decodes=True).take(step)


@needs_compiler
@SETTINGS
@given(
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (4, 4), (9, 1), (10, 1)]),
    head_dim=st.sampled_from([2, 16, 24, 64, 128, 256, 258]),
    block_size=st.sampled_from([1, 5, 16]),
    window=st.sampled_from([None, 1, 7, 64, 500]),
    has_norms=st.booleans(),
    has_prompt=st.booleans(),
)
@torch.inference_mode()
def test_rotation_and_attention_equal_the_reference(
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    has_norms: bool,
    has_prompt: bool,
) -> None:
    num_heads, num_kv_heads = heads
    total = sum(-(-length // block_size) for length in lengths)
    ours = randn(total + 2, 2, 2, block_size, num_kv_heads, head_dim, seed=3)
    theirs = ours.clone()
    sequences = plan(lengths, min(lengths[-1], 4) if has_prompt else 1, ours)
    qkv = randn(sequences.num_tokens, num_heads + 2 * num_kv_heads, head_dim, seed=4)
    q_TNH, k_TKH, v_TKH = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], 1)
    table = randn(sequences.num_tokens, 2, head_dim, seed=5).float()
    norms: Any = (randn(head_dim, seed=6), randn(head_dim, seed=7), 1e-5) if has_norms else ()
    cos_T1H, sin_T1H = table.chunk(2, 1)
    rotation = Rotation(cos_T1H, sin_T1H, *norms)
    rotated = kernels().rotate_and_write(q_TNH, k_TKH, v_TKH, rotation, CacheLayer(ours, 1, sequences))
    expected = reference.rotate_and_write(q_TNH, k_TKH, v_TKH, rotation, CacheLayer(theirs, 1, sequences))
    torch.testing.assert_close(rotated, expected, rtol=2**-6, atol=2**-6)  # the sum of a pair can cancel
    torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)
    attended = kernels().paged_attention(expected, theirs, 1, sequences, head_dim**-0.5, window)
    exact = reference.paged_attention(
        expected.float(), theirs.float(), 1, plan_again(sequences), head_dim**-0.5, window
    )  # fmt: skip
    torch.testing.assert_close(attended.float(), exact, rtol=2**-6, atol=2**-5)


def plan_again(sequences: PagedSequences) -> PagedSequences:
    """The same step without the masks, which have the dtype of their first use."""
    return replace(
        sequences,
        decode=tuple(replace(group, masks={}) for group in sequences.decode),
        prefill=tuple(replace(sequence, masks={}) for sequence in sequences.prefill),
    )


@needs_compiler
@torch.inference_mode()
def test_a_sequences_bits_do_not_depend_on_the_others_nor_on_threads() -> None:
    cache = randn(200, 1, 2, 16, 3, 64)
    lengths = [700, 650, 600, 550, 500]
    sequences = plan(lengths, 1, cache)
    assert len(sequences.decode) == 1
    q_TNH = randn(5, 9, 64)
    together = kernels().paged_attention(q_TNH, cache, 0, sequences, 0.125, None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(kernels().paged_attention(q_TNH, cache, 0, sequences, 0.125, None), together)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@torch.inference_mode()
def test_a_decoder_with_c_kernels_gives_the_references_logprobs(
    config: ModelConfig, make_decoder: Callable[..., Decoder], make_server: Callable[..., Any]
) -> None:
    slow = make_decoder(config, dtype=torch.bfloat16)
    fast = Decoder(config, Ops("compiled"), dtype=torch.bfloat16)
    fast.load_state_dict(slow.state_dict())
    fast.requires_grad_(False).pack_weights()
    sequence = torch.arange(40) * 5 % 96
    results = []
    for decoder in (slow, fast):
        server = make_server(decoder)
        table = server.table(len(sequence))
        steps = [(0, 20), (20, 36), *((place, place + 1) for place in range(36, 40))]
        results.append(torch.cat([server.step([(sequence, *step, table)])[0] for step in steps]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0.3)


@needs_compiler
def test_what_needs_a_gradient_takes_the_references_way() -> None:
    x = randn(3, 8).requires_grad_()
    y = randn(3, 8)
    normed, _ = kernels().add_rms_norm(x, y, randn(8), 1e-5)
    assert normed.grad_fn is not None
    assert kernels().swiglu(x).grad_fn is not None


@needs_compiler
def test_an_engine_takes_c_kernels_in_bfloat16_on_a_cpu_alone() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert resolve_serving_kernels("auto", "cpu", bf16, deterministic=False) == "compiled"
    assert resolve_serving_kernels("auto", "cpu", fp32, deterministic=False) == "reference"
    assert resolve_serving_kernels("auto", "cpu", bf16, deterministic=True) == "reference"
    assert resolve_serving_kernels("reference", "cpu", bf16, deterministic=False) == "reference"
    assert resolve_serving_kernels("auto", "cuda", bf16, deterministic=False) == "fused"


def test_without_a_compiler_the_engine_takes_the_reference_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> object:
        return compiled_file(Path("unused"), "no-such-compiler")

    with caplog.at_level(logging.WARNING):
        assert resolve_serving_kernels("auto", "cpu", torch.bfloat16, deterministic=False, load=load) == "reference"
    assert "there is no C compiler 'no-such-compiler'" in caplog.text


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_source_is_compiled_once_and_a_failure_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    works = compiler(tmp_path, f'echo . >> {tmp_path}/calls; while [ "$1" != -o ]; do shift; done; echo library > "$2"')
    first = compiled_file(tmp_path / "cache", works)
    assert compiled_file(tmp_path / "cache", works) == first
    assert (first.read_text(), (tmp_path / "calls").read_text()) == ("library\n", ".\n")
    assert caplog.text.count("compiling the C kernels for this processor") == 1
    fails = compiler(tmp_path, "echo rows.c: no such flag >&2; exit 3")
    with pytest.raises(CompileError, match=r"ended with 3: rows\.c: no such flag"):
        compiled_file(tmp_path / "other", fails)
    assert list((tmp_path / "other").iterdir()) == []


@needs_compiler
@SETTINGS
@given(
    rows=st.one_of(st.integers(1, 70), st.just(130)),
    sizes=st.sampled_from(
        [(32, 32), (64, 96), (320, 576), (96, 1536), (48, 64), (64, 40), (1, 16), (23, 48), (99, 80)]
    ),
    has_bias=st.booleans(),
    threads=st.sampled_from([1, 3]),
)
@torch.inference_mode()
def test_products_of_few_rows_equal_the_reference(
    rows: int, sizes: tuple[int, int], has_bias: bool, threads: int
) -> None:
    """Sizes and numbers of rows that the processor's product does not take go to the reference."""
    x_TD, weight_ED = randn(rows, sizes[1], seed=1), randn(*sizes, seed=2)
    bias_E = randn(sizes[0], seed=3) if has_bias else None
    exact = torch.nn.functional.linear(x_TD.double(), weight_ED.double(), None if bias_E is None else bias_E.double())
    ours = with_threads(threads, lambda: kernels().linear(x_TD, kernels().pack(weight_ED), bias_E))
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-4 * sizes[1])
    if kernels().takes_product(x_TD, weight_ED, bias_E):
        alone = with_threads(1, lambda: [kernels().linear(x_D[None], weight_ED, bias_E) for x_D in x_TD])
        assert torch.equal(ours, torch.cat(alone)), "a row's bits depend on the others"


def with_threads(threads: int, compute: Callable[[], Any]) -> Any:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        return compute()
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 65])
@pytest.mark.parametrize("has_update", [False, True], ids=["first layer", "later layer"])
@torch.inference_mode()
def test_calls_that_hold_several_operations_give_the_bits_of_the_single_ones(rows: int, has_update: bool) -> None:
    x_TD, update_TD = randn(rows, 96), randn(rows, 96, seed=1) if has_update else None
    norm_D, weight_ED, bias_E = randn(96, seed=2), randn(128, 96, seed=3), randn(128, seed=4)
    single, whole = Ops("compiled"), kernels()
    if not whole.takes_product(x_TD, weight_ED, bias_E):
        assert whole.norm_linear(x_TD, update_TD, norm_D, 1e-5, weight_ED, bias_E) is None
        assert whole.norm_linear_swiglu(x_TD, update_TD, norm_D, 1e-5, weight_ED) is None
        return
    normed_TD, total_TD = single.norm_of_sum(x_TD, update_TD, norm_D, 1e-5)
    y_TE, total = whole.norm_linear(x_TD, update_TD, norm_D, 1e-5, weight_ED, bias_E)
    assert torch.equal(total, total_TD)
    assert torch.equal(y_TE, single.linear(normed_TD, weight_ED, bias_E))
    out_TF, total = whole.norm_linear_swiglu(x_TD, update_TD, norm_D, 1e-5, weight_ED)
    assert torch.equal(total, total_TD)
    assert torch.equal(out_TF, single.swiglu(single.linear(normed_TD, weight_ED)))


@needs_compiler
@torch.inference_mode()
def test_a_product_passes_on_numbers_that_are_not_finite() -> None:
    x_TD, weight_ED = torch.ones(5, 32, dtype=torch.bfloat16), torch.ones(32, 32, dtype=torch.bfloat16)
    x_TD[1, 3], x_TD[4, 8] = float("nan"), float("inf")
    assert kernels().linear(x_TD, weight_ED, None).isfinite().all(1).tolist() == [True, False, True, True, False]


def test_the_limits_of_a_product_are_its_own() -> None:
    tiles, vectors = PRODUCTS[1], PRODUCTS[2]
    assert tiles is not None
    assert vectors is not None
    assert [tiles.takes(rows) for rows in (0, 1, 64, 65)] == [False, True, True, False]
    assert [vectors.takes(rows) for rows in (0, 1, 64, 65)] == [False, True, True, True]
    assert [tiles.divides(*sizes) for sizes in ((32, 64), (33, 64), (32, 48))] == [True, False, False]
    assert [vectors.divides(*sizes) for sizes in ((33, 48), (32, 40))] == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_weight_is_packed_only_where_onednn_packs_it(dtype: torch.dtype) -> None:
    """Packing bfloat16 fails on a processor without AVX-512, so that no engine starts there."""
    x_TD, weight_ED = randn(3, 64).to(dtype), randn(32, 64, seed=1).to(dtype)
    packed = reference.pack(weight_ED)
    assert packed.is_mkldnn == (dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    exact = x_TD.double() @ weight_ED.double().T
    torch.testing.assert_close(reference.linear(x_TD, packed, None).double(), exact, rtol=2**-7, atol=1e-2)


@needs_compiler
@torch.inference_mode()
def test_products_of_torch_are_right_after_products_in_c() -> None:
    """Both use the processor's tiles, whose shape oneDNN sets once per thread and kernel."""
    x_TD, weight_ED = randn(40, 64), randn(96, 64, seed=1)
    packed = reference.pack(weight_ED)
    first = reference.linear(x_TD, packed, None)
    for rows in (1, 5, 16, 40):
        kernels().linear(x_TD[:rows], weight_ED, None)
        assert torch.equal(reference.linear(x_TD, packed, None), first)
