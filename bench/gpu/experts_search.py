"""Times of the kernels of a layer of experts for candidate tiles, so that the best can be put into their tables.

    python -m bench.gpu.experts_search --out DIR [--tokens 1 256 ...] [--warm 12] [--only-layer] [--held 32]
        [--skew 0.12]

The shape is Qwen3-30B-A3B's: 128 experts, 8 of a token, hidden 2,048, 768 columns of an expert. `--held`: experts that
this rank holds of the 128. Routers are even; `--skew` adds a common part of that size to all tokens, as real hidden
states have one (0.12 at 256 tokens: the fullest expert has twice the mean, as in P8's steps). First
`--warm` processes compile all candidates, then each is timed alone, in a graph of several calls whose tokens, and so
experts, take turns. `limit` is the larger of bytes / 4.4 TB/s, with the experts that were chosen, and operations / 780
TFLOP/s. Whole layers are timed with the tables as they are, against the single operations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.kernels_gpu import BYTES_PER_S, OPERATIONS_PER_S, graph_us
from stoker.model.kernels.expert_rows import sort_rows
from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.fused.expert_order import RowOrder, order_rows
from stoker.model.kernels.fused.expert_pairs import PairTile, pair_down, pair_gate_up, pair_products
from stoker.model.kernels.fused.expert_products import grouped_down, grouped_gate_up, grouped_products, sum_choices
from stoker.model.kernels.fused.expert_router import Choices, route_few, route_rows
from stoker.model.kernels.fused.expert_tiles import ExpertTile, tiles_for
from stoker.model.kernels.ops import Ops

EXPERTS, CHOICES, HIDDEN, WIDTH = 128, 8, 2048, 768
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 16384)
MAX_PAIRS = 8
"""Most tokens for which pairs are timed."""
TURNS = 8
BF16 = torch.bfloat16
SHOWN = 4
"""Best candidates that are printed."""

Call = Callable[[], object]


class Inputs(NamedTuple):
    x: Tensor
    choices: Choices
    order: RowOrder
    activated: Tensor
    distinct: int
    fullest: int
    """Rows of the fullest expert."""
    rows: int
    """Of all experts that are held."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--warm", type=int, default=0, help="processes that compile first")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--held", type=int, default=EXPERTS, help="experts that the rank holds")
    parser.add_argument("--skew", type=float, default=0.0, help="common part of all tokens")
    parser.add_argument("--only-layer", action="store_true", help="whole layers with the tables as they are")
    arguments = parser.parse_args()
    if arguments.share:
        compile_share(*map(int, arguments.share.split("/")), arguments.held)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if arguments.warm and not arguments.only_layer:
        warm_up(arguments.warm, arguments.out, arguments.held)
    print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    results: list[dict[str, Any]] = []
    weights = random_weights(arguments.held)
    with torch.inference_mode():
        for tokens in arguments.tokens:
            found = measure(weights, tokens, arguments.only_layer, arguments.skew)
            results += found
            show(tokens, found)
            (arguments.out / "experts.json").write_text(json.dumps(results) + "\n")
    print(f"done in {time.perf_counter() - begin:.1f} s", flush=True)


def show(tokens: int, found: list[dict[str, Any]]) -> None:
    for kernel in dict.fromkeys(row["kernel"] for row in found):
        rows = sorted((row for row in found if row["kernel"] == kernel), key=lambda row: row["us"])
        best = "; ".join(f"{row['us']:.1f} {row['tile']}" for row in rows[:SHOWN])
        print(f"T={tokens} {kernel}: limit {rows[0]['limit_us']:.1f} us; {best}", flush=True)


# Candidates.


def gate_up_tiles(mean_rows: float) -> Iterator[ExpertTile]:
    shapes = [
        (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4),
        (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3),
    ]  # fmt: skip
    yield from tiles(mean_rows, shapes, [(64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 8, 3)])


def down_tiles(mean_rows: float) -> Iterator[ExpertTile]:
    shapes = [
        (64, 64, 4, 6), (64, 256, 4, 3), (128, 256, 8, 3), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6),
        (128, 64, 4, 4), (128, 64, 4, 6),
        (128, 128, 4, 3), (128, 128, 8, 3), (128, 64, 8, 4), (256, 64, 8, 4),
    ]  # fmt: skip
    yield from tiles(mean_rows, shapes, [(64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3)])


def tiles(mean_rows: float, shapes: list[Any], plain: list[Any]) -> Iterator[ExpertTile]:
    for rows in row_sizes(mean_rows):
        for outputs, columns, warps, stages in shapes:
            yield ExpertTile(rows, outputs, columns, warps, stages)
            if rows >= 32:
                yield ExpertTile(rows, outputs, columns, warps, stages, mapped=True)
        for outputs, columns, warps, stages in plain:
            yield ExpertTile(rows, outputs, columns, warps, stages, described=False, mapped=rows == 128)


def row_sizes(mean_rows: float) -> tuple[int, ...]:
    if mean_rows <= 6:
        return (16,)
    if mean_rows <= 12:
        return (16, 32)
    return (32, 64) if mean_rows <= 40 else (64, 128)


def pair_tiles() -> Iterator[PairTile]:
    for outputs, warps in ((1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8)):
        yield PairTile(outputs, warps)


def pair_down_tiles() -> Iterator[PairTile]:
    for tile, columns in itertools.product(pair_tiles(), (128, 256)):
        yield tile._replace(columns=columns)


# Compilation.


def warm_up(processes: int, out: Path, held: int) -> None:
    """Compile all candidates; what fails in a process fails again when it is timed, and is reported there."""
    command = [sys.executable, "-m", "bench.gpu.experts_search", "--out", str(out), "--held", str(held), "--share"]
    children = [subprocess.Popen([*command, f"{number}/{processes}"]) for number in range(processes)]
    for child in children:
        child.wait()


def compile_share(number: int, processes: int, held: int) -> None:
    weights, calls = random_weights(held), []
    with torch.inference_mode():
        inputs = make_inputs(weights, 16, 0.0)
        for tile in dict.fromkeys(tile for mean in (1, 8, 16, 128) for tile in gate_up_tiles(mean)):
            calls.append(partial(grouped_gate_up, inputs.x, inputs.order, weights, tile))
        for tile in dict.fromkeys(tile for mean in (1, 8, 16, 128) for tile in down_tiles(mean)):
            calls.append(partial(grouped_down, inputs.activated, inputs.order, weights, tile))
        for call in calls[number::processes]:
            tried(call)
        torch.cuda.synchronize()


def tried(call: Call) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  a tile that does not fit the chip must not end the search
        return f"{type(error).__name__}: {error}"[:120]
    return ""


# Times.


def random_weights(held: int) -> ExpertWeights:
    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device="cuda").normal_(0, 0.02)

    torch.manual_seed(0)
    gate_up, down = random(held * 2 * WIDTH, HIDDEN), random(held * HIDDEN, WIDTH)
    return ExpertWeights(random(EXPERTS, HIDDEN), gate_up, down, CHOICES, True)


def make_inputs(weights: ExpertWeights, tokens: int, skew: float) -> Inputs:
    common = skew * torch.randn(HIDDEN, device="cuda")
    x = (torch.randn(tokens, HIDDEN, device="cuda") + common).to(BF16)
    choices = route_rows(x, weights)
    order = order_rows(choices.experts, weights.num_own)
    activated = torch.randn(tokens * CHOICES, WIDTH, device="cuda").to(BF16)
    rows_E = torch.bincount(choices.experts.flatten(), minlength=EXPERTS)[: weights.num_own]
    return Inputs(x, choices, order, activated, int((rows_E > 0).sum()), int(rows_E.max()), int(rows_E.sum()))


def measure(weights: ExpertWeights, tokens: int, only_layer: bool, skew: float) -> list[dict[str, Any]]:
    turns = [make_inputs(weights, tokens, skew) for _ in range(TURNS if tokens <= 2048 else 1)]
    print(f"T={tokens}: rows of the fullest expert {[one.fullest for one in turns]}", flush=True)
    distinct = sum(one.distinct for one in turns) / len(turns)
    rows = tokens * CHOICES
    expert_us = 2e6 * HIDDEN * WIDTH * distinct / BYTES_PER_S
    work_us = 2e6 * sum(one.rows for one in turns) / len(turns) * HIDDEN * WIDTH / OPERATIONS_PER_S
    results: list[dict[str, Any]] = []

    def timed(kernel: str, parts: int, tile: Any, make: Callable[[Inputs], Call]) -> None:
        limit = max(parts * expert_us, parts * work_us)
        found = {"kernel": kernel, "tokens": tokens, "tile": shown(tile), "limit_us": limit, "distinct": distinct}
        calls = [make(one) for one in turns]
        problem = tried(lambda: found.update(us=graph_us(calls, torch.cuda.Stream())))
        results.append({"us": float("inf"), "problem": problem} | found)

    timed("layer", 3, "table", lambda one: partial(layer, one.x, weights))
    timed("route rows", 0, "", lambda one: partial(route_rows, one.x, weights))
    timed("order rows", 0, "", lambda one: partial(order_rows, one.choices.experts, weights.num_own))
    y = torch.randn(rows, HIDDEN, device="cuda").to(BF16)
    timed("sum choices", 0, "", lambda one: partial(sum_choices, y, one.choices, weights.first, weights.num_own))
    table = tiles_for(rows, EXPERTS, BF16)
    timed("grouped", 3, "table", lambda one: partial(grouped_products, one.x, one.choices, one.order, weights, table))
    if weights.num_own == EXPERTS:
        timed("single operations", 3, "", lambda one: partial(single_operations, one.x, weights))
    if tokens >= 256 and weights.num_own == EXPERTS:
        timed("torch", 3, "", lambda one: partial(products_by_torch, one.x, one.choices, weights))
    if tokens <= MAX_PAIRS:
        timed("route few", 0, "", lambda one: partial(route_few, one.x, None, weights))
        timed("pairs", 3, "table", lambda one: partial(pair_products, one.x, one.choices, weights))
    if only_layer:
        return results
    if tokens <= MAX_PAIRS:
        for tile in pair_tiles():
            timed(
                "pair gate_up", 2, tile, lambda one, tile=tile: partial(pair_gate_up, one.x, one.choices, weights, tile)
            )
        for tile in pair_down_tiles():
            timed(
                "pair down",
                1,
                tile,
                lambda one, tile=tile: partial(pair_down, one.activated, one.choices, weights, tile),
            )
    if tokens >= 2:
        for wide in gate_up_tiles(rows / EXPERTS):
            timed("gate_up", 2, wide, lambda one, tile=wide: partial(grouped_gate_up, one.x, one.order, weights, tile))
        for wide in down_tiles(rows / EXPERTS):
            timed(
                "down", 1, wide, lambda one, tile=wide: partial(grouped_down, one.activated, one.order, weights, tile)
            )
    return results


def shown(tile: Any) -> str:
    return str(tuple(int(value) for value in tile)) if isinstance(tile, tuple) else str(tile)


def layer(x_TD: Tensor, weights: ExpertWeights) -> object:
    y_TD = Ops("fused").experts(x_TD, weights)
    assert y_TD is not None
    return y_TD


def single_operations(x_TD: Tensor, weights: ExpertWeights) -> object:
    """What a layer computes without kernels for the whole."""
    ops = Ops("fused")
    routes = ops.route(ops.linear(x_TD.float(), weights.router.float()), CHOICES, True)
    rows = sort_rows(routes.experts, EXPERTS)
    gate_up = ops.grouped_linear(ops.dispatch(x_TD, rows), weights.gate_up, rows.ends)
    return ops.combine(ops.grouped_linear(ops.swiglu(gate_up), weights.down, rows.ends), routes.weights, rows)


def products_by_torch(x_TD: Tensor, choices: Choices, weights: ExpertWeights) -> object:
    """The products by torch's grouped kernel, and the operations around them; without the choice of experts."""
    ops, rows = Ops("fused"), sort_rows(choices.experts.long(), EXPERTS)
    gate_up_EFD, down_EDF = (weight.view(EXPERTS, -1, weight.shape[1]) for weight in (weights.gate_up, weights.down))
    gate_up = F.grouped_mm(ops.dispatch(x_TD, rows), gate_up_EFD.transpose(1, 2), offs=rows.ends)
    y = F.grouped_mm(ops.swiglu(gate_up), down_EDF.transpose(1, 2), offs=rows.ends)
    return ops.combine(y, choices.weights, rows)


if __name__ == "__main__":
    main()
