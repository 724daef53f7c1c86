"""Products of several rows with a weight by tile, against cuBLAS, on one GPU.

    python -m bench.gpu.rows_search --out DIR [--shapes 8B ...] [--rows 4 8 ...] [--warm 14]

Microseconds of one call among many with other weights, in a CUDA graph; the limit is that of reading the weight at 4.4
TB/s. Of gate and up SwiGLU is a part. First `--warm` processes compile all candidates. An arrow marks the tile that the
engine takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.kernels_gpu import BYTES_PER_S, graph_us, random, turns_for
from stoker.model.kernels.fused.row_tiles import SHARED_BYTES, STAGES, RowTile, row_tile
from stoker.model.kernels.fused.several_rows import several_rows
from stoker.model.kernels.fused.swiglu import swiglu

LEAST_BYTES = 28 * 1024
"""On their way to a program."""
SHOWN = 3
WORST = 0.02
"""Largest difference from cuBLAS, of the largest value."""


class Weight(NamedTuple):
    rows: int
    depth: int
    is_gated: bool = False


SHAPES = {
    "8B": (Weight(6144, 4096), Weight(4096, 4096), Weight(28672, 4096, True), Weight(4096, 14336)),
    "8B/2": (Weight(3072, 4096), Weight(4096, 2048), Weight(14336, 4096, True), Weight(4096, 7168)),
    "8B/4": (Weight(1536, 4096), Weight(4096, 1024), Weight(7168, 4096, True), Weight(4096, 3584)),
    "0.6B": (Weight(4096, 1024), Weight(1024, 2048), Weight(6144, 1024, True), Weight(1024, 3072)),
    "1B": (Weight(3072, 2048), Weight(2048, 2048), Weight(16384, 2048, True), Weight(2048, 8192)),
    "70B/4": (Weight(2560, 8192), Weight(8192, 2048), Weight(14336, 8192, True), Weight(8192, 7168)),
    "30B": (Weight(5120, 2048), Weight(2048, 4096)),
    "30B/4": (Weight(1280, 2048), Weight(2048, 1024)),
}
"""Weights of a layer, or of its part of one of several ranks: q, k and v; output; gate and up; down."""
ROWS = (4, 8, 16, 32, 64, 128)


def candidates(num_rows: int, weight: Weight) -> Iterator[RowTile]:
    rows, halves = max(16, 1 << (num_rows - 1).bit_length()), 2 if weight.is_gated else 1
    for outputs, columns, warps, stages in itertools.product((32, 64, 128), (64, 128, 256), (4, 8), STAGES):
        stage_bytes = 2 * columns * (outputs * halves + rows)
        fits = stage_bytes * (stages - 1) >= LEAST_BYTES and stage_bytes * stages <= SHARED_BYTES
        if not fits or (warps == 8 and outputs < 128) or (outputs == 32 and rows > 64):
            continue
        tiles = -(-weight.rows // halves // outputs)
        for splits in (1, 2, 4, 8):
            enough, most = tiles * splits >= 100 or splits == 8, splits == 1 or tiles * splits <= 530
            if enough and most and weight.depth >= 2 * columns * splits:
                yield RowTile(rows, outputs, columns, warps, stages, splits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--warm", type=int, default=0, help="processes that compile first")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share:
        number, processes = map(int, arguments.share.split("/"))
        compile_all(kernels_of(arguments.shapes, arguments.rows)[number::processes])
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    warm_up(arguments.warm)
    print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    results = []
    for name, rows in itertools.product(arguments.shapes, arguments.rows):
        for weight in SHAPES[name]:
            results.append({"shape": name, "weight": weight, "rows": rows} | measure(rows, weight))
            show(results[-1])
        (arguments.out / "rows.json").write_text(json.dumps(results) + "\n")
    print(f"done in {time.perf_counter() - begin:.1f} s", flush=True)


def kernels_of(shapes: Sequence[str], rows: Sequence[int]) -> list[tuple[RowTile, bool]]:
    """Return the tiles of all products that are timed, and whether they are gated."""
    products = itertools.product((weight for name in shapes for weight in SHAPES[name]), rows)
    return list(
        dict.fromkeys((tile, weight.is_gated) for weight, number in products for tile in candidates(number, weight))
    )


def warm_up(processes: int) -> None:
    """Compile all candidates in processes with the arguments of this one."""
    command = [sys.executable, "-m", "bench.gpu.rows_search", *sys.argv[1:], "--share"]
    children = [subprocess.Popen([*command, f"{number}/{processes}"]) for number in range(processes)]
    for child in children:
        child.wait()


def compile_all(kernels: list[tuple[RowTile, bool]]) -> None:
    x, weight = random(16, 4096), random(1024, 4096)
    for tile, is_gated in kernels:
        several_rows(x, weight, tile, is_gated=is_gated)
    torch.cuda.synchronize()


def measure(rows: int, weight: Weight) -> dict[str, Any]:
    num_bytes = 2 * weight.rows * weight.depth
    weights = [0.02 * random(weight.rows, weight.depth) for _ in range(turns_for(num_bytes))]
    x, stream, is_gated = random(rows, weight.depth), torch.cuda.Stream(), weight.is_gated
    expected = by_cublas(x, weights[0], is_gated)
    found = []
    for tile in candidates(rows, weight):
        y = several_rows(x, weights[0], tile, is_gated=is_gated)
        difference = (y.float() - expected.float()).abs().max() / expected.float().abs().max()
        assert difference < WORST, (rows, weight, tile, float(difference))
        calls = [partial(several_rows, x, one, tile, is_gated=is_gated) for one in weights]
        found.append((graph_us(calls, stream), tile))
    cublas_us = graph_us([partial(by_cublas, x, one, is_gated) for one in weights], stream)
    return {"limit_us": 1e6 * num_bytes / BYTES_PER_S, "cublas_us": cublas_us, "tiles": sorted(found)}


def by_cublas(x_TD: Tensor, weight_ED: Tensor, is_gated: bool) -> Tensor:
    y_TE = F.linear(x_TD, weight_ED)
    return swiglu(y_TE) if is_gated else y_TE


def show(result: dict[str, Any]) -> None:
    weight = result["weight"]
    ours = row_tile(result["rows"], weight.rows // (2 if weight.is_gated else 1), weight.depth, weight.is_gated)
    shown = [(us, tile) for place, (us, tile) in enumerate(result["tiles"]) if place < SHOWN or tile == ours]
    best = "; ".join(f"{'-> ' if tile == ours else ''}{us:.1f} {tuple(tile)[1:]}" for us, tile in shown)
    print(f"{result['shape']} {weight.rows} x {weight.depth}, {result['rows']} rows:", end=" ")
    print(f"limit {result['limit_us']:.1f}, cuBLAS {result['cublas_us']:.1f}; {best}", flush=True)


if __name__ == "__main__":
    main()
