from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.model.attend import LayerAttention, PackedAttend
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache, PagedAttend, PagedBatch, PagedSize
from stoker.model.rotary import RotaryTable

SEQUENCES = [torch.arange(length) * 5 % 96 for length in (60, 21, 9, 33)]


def expected_logprobs(decoder: Decoder, sequence: torch.Tensor) -> torch.Tensor:
    attend = PackedAttend(decoder.ops, "auto", torch.tensor([0, len(sequence)]))
    return decoder.ops.log_softmax(decoder.logits(decoder(sequence, torch.arange(len(sequence)), attend)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.3)])
@torch.inference_mode()
def test_prefill_chunks_and_decode_in_one_step_equal_the_packed_pass(
    config: ModelConfig,
    dtype: torch.dtype,
    tolerance: float,
    make_decoder: Callable[..., Decoder],
    make_server: Callable[..., Any],
) -> None:
    decoder = make_decoder(config, dtype=dtype)
    server = make_server(decoder)
    tables = [server.table(len(sequence)) for sequence in SEQUENCES]
    seen: list[list[torch.Tensor]] = [[] for _ in SEQUENCES]
    # prefill alone; prefill chunk, decode, whole prompt; decode of far lengths (two groups);
    # decode in order (the whole pass)
    for step in [
        [(0, 0, 50)],
        [(1, 0, 20), (0, 50, 51), (2, 0, 4), (3, 0, 20)],
        [(3, 20, 32), (2, 4, 8), (0, 51, 58)],
        [(0, 58, 59), (1, 20, 21), (2, 8, 9)],
        [(0, 59, 60), (3, 32, 33)],
    ]:
        results = server.step([(SEQUENCES[i], begin, end, tables[i]) for i, begin, end in step])
        for (i, _, _), result in zip(step, results, strict=True):
            seen[i].append(result)
    for sequence, results in zip(SEQUENCES, seen, strict=True):
        torch.testing.assert_close(torch.cat(results), expected_logprobs(decoder, sequence), rtol=0, atol=tolerance)


@torch.inference_mode()
def test_a_prefix_in_another_sequences_blocks_serves(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], make_server: Callable[..., Any]
) -> None:
    decoder = make_decoder(llama)
    server = make_server(decoder)
    first = SEQUENCES[0]
    second = torch.cat((first[:16], SEQUENCES[3].flip(0)))
    table = server.table(60)
    server.step([(first, 0, 60, table)])
    other = table[:2] + server.table(40)
    (result,) = server.step([(second, 16, len(second), other)])
    torch.testing.assert_close(result, expected_logprobs(decoder, second)[16:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@torch.inference_mode()
def test_a_window_hides_old_keys_in_both_ways(deterministic: bool, qwen3: ModelConfig) -> None:
    ops, rope = Ops(deterministic=deterministic), RotaryTable(qwen3)
    spec = LayerAttention(
        layer=1, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, norm_eps=1e-5, rope=rope, window=7
    )
    q, k, v = (torch.randn(30, heads, 16) for heads in (4, 2, 2))
    packed = PackedAttend(ops, "auto", torch.tensor([0, 30]))(spec, q, k, v, torch.arange(30))
    cache = KVCache(qwen3, num_blocks=8, block_size=8, dtype=torch.float32)
    attend = PagedAttend(ops, "auto", cache, PagedSize(max_tokens=32, max_sequences=2, max_blocks=4))
    outputs = []
    for begin, end in ((0, 18), (18, 19), (19, 29), (29, 30)):
        attend.prepare(batch(begin, end, [3, 5, 0, 7], 8))
        outputs.append(attend(spec, q[begin:end], k[begin:end], v[begin:end], torch.arange(begin, end)))
    torch.testing.assert_close(torch.cat(outputs), packed, rtol=0, atol=1e-5)


def batch(begin: int, end: int, table: list[int], block_size: int) -> PagedBatch:
    """Return a batch of one sequence's tokens begin..end."""
    slots = [table[p // block_size] * block_size + p % block_size for p in range(begin, end)]
    numbers = {"query_start": [0, end - begin], "seq_lens": [end], "slot_mapping": slots}
    fields: dict[str, Any] = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
    return PagedBatch(**fields, block_tables=torch.tensor([table], dtype=torch.int32), num_tokens=end - begin)


def test_a_step_that_does_not_fit_is_refused_with_the_numbers(llama: ModelConfig) -> None:
    cache = KVCache(llama, num_blocks=8, block_size=8, dtype=torch.float32)
    attend = PagedAttend(Ops(), "auto", cache, PagedSize(max_tokens=16, max_sequences=1, max_blocks=2))
    with pytest.raises(ValueError, match="20 tokens of 1 sequences with 3 blocks exceed PagedSize"):
        attend.prepare(batch(0, 20, [0, 1, 2], 8))
    with pytest.raises(ValueError, match="do not fit"):
        attend.prepare(replace(batch(0, 9, [0, 1], 8), block_tables=torch.zeros(1, 1, dtype=torch.int32)))
    with pytest.raises(ValueError, match="num_tokens 8 do not fit"):
        attend.prepare(replace(batch(0, 9, [0, 1], 8), num_tokens=8))


def test_a_block_is_one_piece_of_memory_over_all_layers(llama: ModelConfig) -> None:
    cache = KVCache(llama, num_blocks=5, block_size=4, dtype=torch.bfloat16)
    assert cache.data.shape == (5, 2, 2, 4, 2, 12)
    assert cache.data[0].is_contiguous()
    assert cache.data[0].nbytes == KVCache.block_bytes(llama, block_size=4, dtype=torch.bfloat16)
    assert (cache.num_blocks, cache.block_size) == (5, 4)


def test_blocks_are_copied_whole(llama: ModelConfig) -> None:
    cache = KVCache(llama, num_blocks=4, block_size=4, dtype=torch.float32)
    cache.data.copy_(torch.arange(4.0)[:, None, None, None, None, None].expand_as(cache.data))
    cache.copy_blocks([1, 3], [0, 2])
    assert cache.data[:, 0, 0, 0, 0, 0].tolist() == [1, 1, 3, 3]
    assert (cache.data == cache.data[:, :1, :1, :1, :1, :1]).all()


def test_a_position_beyond_the_models_context_is_refused(llama: ModelConfig) -> None:
    with pytest.raises(IndexError):
        RotaryTable(llama).rows(torch.tensor([256]))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' /proc")
def test_a_cache_takes_memory_as_its_blocks_are_used(llama: ModelConfig) -> None:
    block_mib = KVCache.block_bytes(llama, block_size=256, dtype=torch.bfloat16) / 2**20
    num_blocks = round(512 / block_mib)
    before_mib = anonymous_mib()
    cache = KVCache(llama, num_blocks=num_blocks, block_size=256, dtype=torch.bfloat16)
    assert anonymous_mib() - before_mib < 64
    assert not cache.data[[0, num_blocks // 2, num_blocks - 1]].any()
    cache.data[: num_blocks // 4].fill_(1)
    assert 100 < anonymous_mib() - before_mib < 250
    assert cache.data.is_contiguous()
    assert cache.data.data_ptr() % 64 == 0


def anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024
