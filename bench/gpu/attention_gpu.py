"""Attention on one GPU: decode against the memory's speed, prefill and training against the matrix units'.

    python -m bench.gpu.attention_gpu [--parts decode,splits,prefill,flash,training] [--json FILE] [--limit-s SECONDS]

Calls are captured in a CUDA graph over several layers in turn, so that no cache stays in the L2; times are medians per
call. Limits: 4.4 TB/s and 780 TFLOP/s (measured on an H200). TFLOP/s count the causal half only. FILE is written anew
after each row; a row that fails or passes its limit is named and leaves the others alone. `splits`: one long sequence
cut for more or fewer programs; `flash`: long prompts over the cache by our kernel and by flash-attn-4. `--site DIR`
adds a folder of packages (flash-attn-4), whose rows are left out where it cannot be imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import site
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.row_limit import tried
from stoker.model.kernels.fused.attention.decode import DecodeConfig, attend_decode
from stoker.model.kernels.fused.attention.flash import attend_varlen, import_flash
from stoker.model.kernels.fused.attention.gather import gather_keys
from stoker.model.kernels.fused.attention.packed import packed_attention
from stoker.model.kernels.fused.attention.paged import paged_attention, paged_attention_deterministic
from stoker.model.kernels.fused.attention.splits import DecodeScratch
from stoker.model.kernels.kernel_set import has_flash
from stoker.model.kernels.long_prompts import PromptAttention
from stoker.model.kernels.sequences import DeviceSequences, pack_sequences
from stoker.model.paged_batch import PagedBatch, PagedSize
from stoker.model.paged_buffers import PagedBuffers
from stoker.model.paged_prompts import PromptPlan

BYTES_PER_S = 4.4e12
FLOP_PER_S = 780e12
LAYERS = 4
Row = dict[str, object]
Rows = Iterator[partial[Row]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="decode,splits,prefill,flash,training")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--site", type=Path, default=os.environ.get("STOKER_BENCH_SITE"))
    parser.add_argument("--limit-s", type=float, default=30.0, help="of one row, its compilation included")
    arguments = parser.parse_args()
    if arguments.site is not None:
        site.addsitedir(str(arguments.site))
    rows: list[Row] = []
    for part in arguments.parts.split(","):
        for make in PARTS[part]():
            found = tried(make, arguments.limit_s)
            row: Row = {part: str(make.args)[:80], "error": found} if isinstance(found, str) else found
            rows.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(rows, indent=1))
        torch.cuda.empty_cache()


def decode_rows() -> Rows:
    generator = torch.Generator().manual_seed(0)
    many = torch.randint(100, 2049, (256,), generator=generator).tolist()
    for heads in (32, 16):
        for block_size in (16, 64, 128, 256):
            yield partial(decode_row, "256 of 100-2048", many, heads, block_size)
    yield partial(decode_row, "256 of 100-2048, each layer alone", many, 32, 16, is_strided=False)
    yield partial(decode_row, "256 of 100-2048, each layer alone", many, 32, 128, is_strided=False)
    yield partial(decode_row, "256 of 100-2048, deterministic", many, 32, 16, is_deterministic=True)
    for lengths in ([128], [640], [8192], [640] * 8, [1024] * 32, [1024] * 64, [32768]):
        for block_size in (16, 64):
            yield partial(decode_row, f"{len(lengths)} of {lengths[0]}", lengths, 32, block_size)
    yield partial(decode_row, "1 of 640", [640], 16, 16)
    for length in (640, 8192):
        yield partial(decode_row, f"1 of {length}, deterministic", [length], 32, 16, is_deterministic=True)


def decode_row(
    name: str,
    lengths: list[int],
    heads: int,
    block_size: int,
    *,
    is_strided: bool = True,
    is_deterministic: bool = False,
) -> Row:
    caches, sequences = make_step([(length - 1, 1) for length in lengths], heads, block_size, is_strided)
    q = torch.randn(len(lengths), heads, 128, dtype=torch.bfloat16, device="cuda")
    function = paged_attention_deterministic if is_deterministic else paged_attention
    calls = [partial(function, q, cache, layer, sequences, 128**-0.5, None) for cache, layer in caches]
    seconds = time_graph(calls)
    num_bytes = 2 * 2 * sum(lengths) * 8 * 128
    return {
        "decode": name,
        "heads": f"{heads}/8",
        "block_size": block_size,
        "us": round(seconds * 1e6, 1),
        "TB/s": round(num_bytes / seconds / 1e12, 2),
        "limit_us": round(num_bytes / BYTES_PER_S * 1e6, 1),
    }


def prefill_rows() -> Rows:
    for name, chunks in (
        ("8192 whole", [(0, 8192)]),
        ("2048 at 8192", [(8192, 2048)]),
        ("2048 whole", [(0, 2048)]),
        ("16 of 512", [(0, 512)] * 16),
        ("64 decodes of 1024 and 2048 whole", [(1024, 1)] * 64 + [(0, 2048)]),
    ):
        for block_size in (16, 64, 128):
            yield partial(prefill_row, name, chunks, 32, block_size)


def prefill_row(name: str, chunks: list[tuple[int, int]], heads: int, block_size: int) -> Row:
    caches, sequences = make_step(chunks, heads, block_size, True)
    q = torch.randn(sum(new for _, new in chunks), heads, 128, dtype=torch.bfloat16, device="cuda")
    calls = [partial(paged_attention, q, cache, layer, sequences, 128**-0.5, None) for cache, layer in caches]
    seconds = time_graph(calls)
    flop = sum(4 * heads * 128 * (old * new + new * (new + 1) / 2) for old, new in chunks)
    return {
        "prefill": name,
        "heads": f"{heads}/8",
        "block_size": block_size,
        "us": round(seconds * 1e6, 1),
        "TFLOP/s": round(flop / seconds / 1e12),
        "limit_us": round(flop / FLOP_PER_S * 1e6, 1),
    }


def make_step(
    chunks: list[tuple[int, int]], heads: int, block_size: int, is_strided: bool
) -> tuple[list[tuple[Tensor, int]], DeviceSequences]:
    """Return calls over the layers of one cache in the engine's order, or over a cache for each layer.

    Blocks are in random order.
    """
    lengths = [old + new for old, new in chunks]
    needs = [-(-length // block_size) for length in lengths]
    shape = (sum(needs), LAYERS if is_strided else 1, 2, block_size, 8, 128)
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(1 if is_strided else LAYERS)]
    tables = random_tables(needs)
    news = [new for _, new in chunks]
    size = PagedSize(max_tokens=sum(news), max_sequences=len(chunks), max_blocks=max(needs))
    sequences = PagedBuffers(tensors[0], heads, size).take(
        PagedBatch(
            query_start=torch.tensor([0, *itertools.accumulate(news)], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.full((sum(news),), -1, dtype=torch.int32),
            num_tokens=sum(news),
        )
    )
    return [(tensor, layer) for tensor in tensors for layer in range(tensor.shape[1])], sequences


def make_cache_step(lengths: list[int], kv_heads: int, block_size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return a cache of some layers in the engine's order, block tables and lengths, for decodes."""
    needs = [-(-length // block_size) for length in lengths]
    shape = (sum(needs), LAYERS, 2, block_size, kv_heads, 128)
    cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return cache, random_tables(needs).cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")


def random_tables(needs: list[int]) -> Tensor:
    """Return block tables of sequences that need so many blocks, which lie in random order."""
    tables = torch.zeros(len(needs), max(needs), dtype=torch.int32)
    blocks = torch.randperm(sum(needs), dtype=torch.int32)
    for row, (end, need) in enumerate(zip(itertools.accumulate(needs), needs, strict=True)):
        tables[row, :need] = blocks[end - need : end]
    return tables


def splits_rows() -> Rows:
    for lengths in ([120_000], [640], [32_768], [8192], [120_000] * 2, [65_536], [640] * 2, [2048]):
        for config in ("32,2,2", "32,2,3", "32,2,4"):
            yield partial(splits_row, config, lengths)


def splits_row(config: str, lengths: list[int]) -> Row:
    """`config`: keys of a tile, warps, stages. Medians over three orders of blocks, with the least and the most."""
    keys, num_warps, num_stages = map(int, config.split(","))
    chosen = DecodeConfig(keys=keys, num_warps=num_warps, num_stages=num_stages)
    orders = [make_step([(length - 1, 1) for length in lengths], 32, 64, True) for _ in range(3)]
    q = torch.randn(len(lengths), 32, 128, dtype=torch.bfloat16, device="cuda")
    num_bytes = 2 * 2 * sum(lengths) * 8 * 128
    row: Row = {"splits": f"{len(lengths)} of {lengths[0]}", "config": config}
    row["limit_us"] = round(num_bytes / BYTES_PER_S * 1e6, 1)
    for splits in (32, 64):
        scratch = DecodeScratch(len(lengths), 32, 8, 128, "cuda")
        scratch.out = scratch.out.new_empty(len(lengths) * splits * 32 * 128)
        scratch.sums = scratch.sums.new_empty(2 * len(lengths) * splits * 32)
        times = sorted(time_graph(split_calls(q, *order, scratch, chosen, splits)) * 1e6 for order in orders)
        row[f"us {splits}"] = f"{times[1]:.1f} ({times[0]:.1f} to {times[2]:.1f})"
    return row


def split_calls(
    q: Tensor,
    caches: list[tuple[Tensor, int]],
    sequences: DeviceSequences,
    scratch: DecodeScratch,
    config: DecodeConfig,
    splits: int,
) -> list[Callable[[], object]]:
    return [
        partial(
            attend_decode,
            *(q, cache[:, layer, 0], cache[:, layer, 1], sequences.seq_lens, sequences.block_tables, scratch),
            num_sequences=len(q),
            scale=128**-0.5,
            window=None,
            config=config,
            splits=splits,
        )
        for cache, layer in caches
    ]


def flash_rows() -> Rows:
    if not has_flash():
        return
    for name, chunks in (
        ("8192 whole", [(0, 8192)]),
        ("8192 at 56000", [(56_000, 8192)]),
        ("8192 at 112000", [(112_000, 8192)]),
        ("16 of 512", [(0, 512)] * 16),
        ("8 of 1024", [(0, 1024)] * 8),
        ("2048 whole", [(0, 2048)]),
        ("2048 at 8192", [(8192, 2048)]),
        ("512 whole", [(0, 512)]),
        ("512 at 2048", [(2048, 512)]),
        ("512 at 8192", [(8192, 512)]),
        ("512 at 32768", [(32_768, 512)]),
        ("512 at 65536", [(65_536, 512)]),
        ("256 at 65536", [(65_536, 256)]),
        ("64 at 65536", [(65_536, 64)]),
    ):
        yield partial(flash_row, name, chunks)


def flash_row(name: str, chunks: list[tuple[int, int]]) -> Row:
    """Our kernel, flash-attn-4 with the copy of the keys, the copy alone, and flash-attn-4 over the blocks."""
    caches, sequences = make_step(chunks, 32, 64, True)
    cache = caches[0][0]
    q = torch.randn(sum(new for _, new in chunks), 32, 128, dtype=torch.bfloat16, device="cuda")
    bounds = [0, *itertools.accumulate(new for _, new in chunks)]
    batch = PagedBatch(
        query_start=torch.tensor(bounds, dtype=torch.int32),
        seq_lens=torch.tensor([old + new for old, new in chunks], dtype=torch.int32),
        block_tables=sequences.block_tables,
        slot_mapping=sequences.slots,
        num_tokens=len(q),
    )
    plan = PromptPlan(cache, sum(old + new for old, new in chunks), PromptAttention(attend_varlen, 1, 1))
    planned = replace(sequences, prompts=plan.plan(batch, 0))
    assert planned.prompts is not None
    starts = planned.prompts.groups[0]
    keys, values = planned.prompts.keys, planned.prompts.values
    longest = starts.group.longest
    k, v = cache[:, 0, 0], cache[:, 0, 1]
    ways: dict[str, Callable[[], object]] = {
        "stoker": partial(paged_attention, q, cache, 0, sequences, 128**-0.5, None),
        "flash": partial(paged_attention, q, cache, 0, planned, 128**-0.5, None),
        "copy": partial(gather_keys, k, v, sequences.block_tables, starts.key_start, longest[1], keys, values),
        "flash over blocks": partial(flash_over_blocks, q, k, v, sequences, starts.query_start, longest),
    }
    flop = sum(4 * 32 * 128 * (old * new + new * (new + 1) / 2) for old, new in chunks)
    row: Row = {"flash": name, "pairs": round(flop / 4 / 32 / 128)}
    for way, call in ways.items():
        seconds = tried(partial(time_calls, call, 10), 60.0)
        row[way] = seconds if isinstance(seconds, str) else f"{seconds * 1e6:.0f} us {flop / seconds / 1e12:.0f}"
    return row


def flash_over_blocks(
    q: Tensor, k: Tensor, v: Tensor, sequences: DeviceSequences, query_start: Tensor, longest: tuple[int, int]
) -> object:
    return import_flash().flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=query_start,
        seqused_k=sequences.seq_lens,
        page_table=sequences.block_tables,
        max_seqlen_q=max(longest[0], 256),
        max_seqlen_k=longest[1],
        softmax_scale=128**-0.5,
        causal=True,
    )


def training_rows() -> Rows:
    names = ["cudnn", "stoker"]
    if importlib.util.find_spec("flash_attn") is not None:
        names += ["flash", "flash deterministic"]
    for lengths, heads, kv_heads, head_dim in (
        ([8192], 32, 8, 128),
        ([2048] * 8, 32, 8, 64),
        ([2048] * 4, 32, 8, 128),
        ([3000, 500, 1700, 100, 2892], 32, 8, 128),
    ):
        for name in names:
            yield partial(training_row, name, lengths, heads, kv_heads, head_dim)


def training_row(name: str, lengths: list[int], heads: int, kv_heads: int, head_dim: int) -> Row:
    attention, _, flag = name.partition(" ")
    torch.use_deterministic_algorithms(bool(flag), warn_only=True)
    sequences = pack_sequences(torch.tensor([0, *itertools.accumulate(lengths)]), device="cuda")
    tokens = sum(lengths)
    q, k, v = (
        torch.randn(tokens, n, head_dim, dtype=torch.bfloat16, device="cuda").requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    grad = torch.randn_like(q)
    scale = head_dim**-0.5
    forward_s = time_calls(lambda: packed_attention(q, k, v, sequences, scale, None, attention))
    out = packed_attention(q, k, v, sequences, scale, None, attention)
    backward_s = time_calls(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    torch.use_deterministic_algorithms(False)
    flop = sum(4 * heads * head_dim * length * length / 2 for length in lengths)
    return {
        "training": f"{lengths if len(set(lengths)) > 1 else f'{len(lengths)} x {lengths[0]}'}",
        "heads": f"{heads}/{kv_heads} x {head_dim}",
        "attention": name,
        "forward_us": round(forward_s * 1e6),
        "backward_us": round(backward_s * 1e6),
        "TFLOP/s forward": round(flop / forward_s / 1e12),
        "backward": round(2.5 * flop / backward_s / 1e12),
        "both": round(3.5 * flop / (forward_s + backward_s) / 1e12),
    }


def time_graph(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Return the median seconds of one call, all captured in one graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return time_calls(graph.replay, repeats) / len(calls)


def time_calls(call: Callable[[], object], repeats: int = 20) -> float:
    """Return the median seconds between events around a call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


PARTS: dict[str, Callable[[], Rows]] = {
    "decode": decode_rows,
    "splits": splits_rows,
    "prefill": prefill_rows,
    "flash": flash_rows,
    "training": training_rows,
}

if __name__ == "__main__":
    main()
