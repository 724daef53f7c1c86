"""Attention of decode steps by tile, number of splits and fewest keys of a split, on one GPU.

    python -m bench.gpu.decode_search [--out DIR] [--steps NAME ...] [--limit-s SECONDS]

Each step is a CUDA graph over four layers of one cache in the engine's order, blocks of 64 tokens in random order;
microseconds of one layer, the least of three orders' medians. The limit is that of reading keys and values at 4.4 TB/s.
Programs without keys count: a step is padded to the seats of its graph, and a sequence has as many programs as splits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gpu.attention_gpu import BYTES_PER_S, make_cache_step, time_graph
from bench.gpu.row_limit import tried
from stoker.model.kernels.fused.attention.decode import DecodeConfig, attend_decode
from stoker.model.kernels.fused.attention.splits import DecodeScratch

TILES = ((64, 4, 3), (64, 4, 2), (32, 2, 2), (32, 2, 3), (32, 2, 4), (32, 4, 3), (32, 4, 4), (64, 2, 2))
"""(keys, warps, stages)."""
SPLITS = (8, 4, 2)
FEWEST_KEYS = (1024, 512, 256)
HEAD_DIM = 128


@dataclass(frozen=True)
class Step:
    lengths: tuple[int, ...]
    seats: int
    heads: tuple[int, int]
    """Of queries, and of keys and values; of one rank in P17 to P19, over four GPUs."""


def drawn(count: int, least: int, most: int) -> tuple[int, ...]:
    rng = random.Random(0)
    return tuple(rng.randint(least, most) for _ in range(count))


STEPS = {
    "P1": Step(drawn(256, 400, 1324), 256, (16, 8)),
    "P1 late": Step(drawn(128, 600, 1624), 128, (16, 8)),
    "P1 end": Step(drawn(64, 800, 1800), 64, (16, 8)),
    "P2": Step(drawn(256, 400, 1324), 256, (32, 8)),
    "P7d": Step(drawn(200, 520, 639), 512, (32, 8)),
    "P7d full": Step(drawn(440, 520, 639), 512, (32, 8)),
    "P8": Step(drawn(256, 400, 1324), 256, (32, 4)),
    "P17": Step(drawn(256, 400, 1324), 256, (8, 2)),
    "P17 late": Step(drawn(128, 600, 1624), 128, (8, 2)),
    "P18": Step(drawn(256, 400, 1324), 256, (16, 2)),
    "P18 late": Step(drawn(128, 600, 1624), 128, (16, 2)),
    "P19": Step(drawn(256, 400, 1324), 256, (8, 1)),
    "P19 late": Step(drawn(128, 600, 1624), 128, (8, 1)),
    "few long": Step((8192,) * 8 + drawn(248, 200, 400), 256, (32, 8)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--limit-s", type=float, default=30.0, help="of one tile of one step")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, object]] = {}
    for name in arguments.steps:
        limit_us = 1e6 * 4 * sum(STEPS[name].lengths) * STEPS[name].heads[1] * HEAD_DIM / BYTES_PER_S
        found[name] = {"limit": round(limit_us, 1)}
        for tile in TILES:
            found[name] |= {str(tile): tried(partial(measure, STEPS[name], tile), arguments.limit_s)}
            (arguments.out / "decode_search.json").write_text(json.dumps(found, indent=1) + "\n")
        print(name, json.dumps(found[name]), flush=True)


def measure(step: Step, tile: tuple[int, int, int]) -> dict[str, float]:
    """Return microseconds by "splits/fewest keys"."""
    heads, kv_heads = step.heads
    lengths = [*step.lengths, *[0] * (step.seats - len(step.lengths))]
    keys, num_warps, num_stages = tile
    config = DecodeConfig(keys=keys, num_warps=num_warps, num_stages=num_stages)
    q = torch.randn(step.seats, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    scratch = DecodeScratch(step.seats, heads, kv_heads, HEAD_DIM, "cuda")
    parts = step.seats * max(SPLITS) * heads
    scratch.out, scratch.sums = scratch.out.new_empty(parts * HEAD_DIM), scratch.sums.new_empty(2 * parts)
    times: dict[str, float] = {}
    for _ in range(3):
        cache, tables, seq_lens = make_cache_step(lengths, kv_heads)
        for splits, fewest in itertools.product(SPLITS, FEWEST_KEYS):
            calls = [
                partial(
                    attend_decode,
                    *(q, cache[:, layer, 0], cache[:, layer, 1], seq_lens, tables, scratch),
                    num_sequences=step.seats,
                    scale=HEAD_DIM**-0.5,
                    window=None,
                    config=config,
                    splits=splits,
                    min_keys=fewest,
                )
                for layer in range(cache.shape[1])
            ]
            name = f"{splits}/{fewest}"
            times[name] = min(times.get(name, 1e9), round(1e6 * time_graph(calls), 1))
    return times


if __name__ == "__main__":
    main()
