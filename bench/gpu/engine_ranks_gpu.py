"""The engine over several GPUs of one host, with random weights made on the devices.

    python bench/gpu/engine_ranks_gpu.py P17 P17:tensor=1 --out DIR     # 8B: one stream, then P1's requests
    python bench/gpu/engine_ranks_gpu.py P17:profile P17:nccl P17:no-graphs
    python bench/gpu/engine_ranks_gpu.py P17:prompt:no-graphs:profile P17:prompt:no-graphs:whole   # long prompts alone
    python bench/gpu/engine_ranks_gpu.py P18:tensor=4 P19:tensor=4:expert=4
    python bench/gpu/engine_ranks_gpu.py P17:tensor=1:pipeline=2        # two stages, two or three steps in flight
    python bench/gpu/engine_ranks_gpu.py sums --tensor 2                # sums in one or two shots against NCCL, by size

P17 is Llama-3.1-8B's shape, P18 70B's, P19 Qwen3-30B-A3B's: milliseconds per token of one stream (128 in, 512 out),
output tokens per second of nano-vllm's 256 requests, milliseconds of one prompt of 8,192 tokens. `:nccl` sums over NCCL
alone. `:requests` and `:prompt` measure that figure alone. `:profile` writes the kernels of a decode step of one
stream, or of what is measured alone; `:whole` computes a prompt in one piece instead of two halves. Each figure is
printed and written as soon as it is measured. Several rows run in a process each. The last line is JSON of all.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import spawn

from bench.gpu.engine_gpu import CACHE_BYTES, Row, first_token, one_stream, profile, throughput, warm_up
from bench.gpu.model_shapes import LLAMA31_8B, LLAMA31_70B, QWEN3_30B_A3B
from bench.gpu.row_limit import tried
from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.step_flight import StepFlight
from stoker.engine.execution.executor import Executor, OnDevice
from stoker.engine.execution.load import make_decoder, make_runner
from stoker.engine.execution.peer_sums import Longest, peer_sums
from stoker.engine.execution.rank_place import place_of
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.executor import Ranks
from stoker.engine.ranks.link import Link
from stoker.engine.ranks.rendezvous import NCCL_DEFAULTS
from stoker.engine.ranks.worker import Worker
from stoker.engine.ranks.workers import Workers
from stoker.model.config import ModelConfig
from stoker.model.group_sums import GroupSums, ordered_sum
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache

SHAPES = {"P17": LLAMA31_8B, "P18": LLAMA31_70B, "P19": QWEN3_30B_A3B}
BLOCK, SEATS, BUDGET, MAX_LEN = 64, 256, 16384, 16384
SUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MEASURED: Sequence[tuple[str, Any]] = (
    ("one_stream", one_stream), ("requests", throughput), ("prompt_8192", first_token),
)  # fmt: skip
CALLS = 20
"""Sums of one captured graph."""
LATE_S = 0.003
"""Time by which rank 1 begins behind the others, to see how they bear the wait."""


@dataclass(frozen=True)
class Options:
    """Options of a row, written behind its name, as in `P17:tensor=1:profile`."""

    tensor: int = 2
    pipeline: int = 1
    expert: int = 1
    nccl: bool = False
    no_graphs: bool = False
    profile: bool = False
    prompt: bool = False
    requests: bool = False
    whole: bool = False
    layers: int = 0
    """Number of layers below the shape's, to try the script out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW[:OPTION[=VALUE]]...")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--limit-s", type=float, default=120.0, help="of one row, its engine's start included")
    parser.add_argument("--tensor", type=int, default=2, help="ranks of `sums`")
    parser.add_argument("--columns", type=int, default=LLAMA31_8B.hidden_size, help="of a row of `sums`")
    parser.add_argument("--worker", type=int, metavar="RANK", help=argparse.SUPPRESS)
    parser.add_argument("--link", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.worker is not None:
        work(arguments.worker, arguments.link)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = in_own_process if len(arguments.rows) > 1 else measure_row
    print(json.dumps({label_of(spec): run(spec, arguments) for spec in arguments.rows}), flush=True)


def label_of(spec: str) -> str:
    return spec.replace(":", "-").replace("=", "")


def in_own_process(spec: str, arguments: argparse.Namespace) -> dict[str, Any] | str:
    """A row that fails leaves its process group open, in which no other row could start."""
    result = arguments.out / f"ranks-{label_of(spec)}.json"
    result.unlink(missing_ok=True)
    options = ["--out", arguments.out, "--limit-s", arguments.limit_s]
    options += ["--tensor", arguments.tensor, "--columns", arguments.columns]
    ended = subprocess.run([sys.executable, __file__, spec, *map(str, options)], check=False)
    if not result.exists():
        return f"no figure; exit code {ended.returncode}"
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def measure_row(spec: str, arguments: argparse.Namespace) -> dict[str, Any] | str:
    out = arguments.out / f"ranks-{label_of(spec)}"
    sums = partial(measure_sums, arguments.tensor, arguments.columns, out)
    found = tried(sums if spec == "sums" else partial(measure, spec, out), arguments.limit_s)
    if isinstance(found, str):
        print(f"{label_of(spec)}: {found}", flush=True)
    return found


# An engine.


def measure(spec: str, out: Path) -> dict[str, Any]:
    name, options = parse_row(spec)
    shape = replace(SHAPES[name], num_layers=options.layers or SHAPES[name].num_layers)
    begin = time.perf_counter()
    engine = open_engine(plan_of(name, shape, options), shape)
    captured = time.perf_counter()
    graphs = 0
    while engine.executor.capture_next_graph():
        graphs += 1
    figures: dict[str, Any] = {"open_s": round(captured - begin, 2), "graphs_after_start": graphs}
    figures["capture_s"] = round(time.perf_counter() - captured, 2)
    figures |= {"tensor": options.tensor, "pipeline": options.pipeline, "expert": options.expert}
    figures |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    keep(out, spec, figures)
    try:
        for title, run in chosen(options):
            row = Row(shape, run, MAX_LEN, BUDGET, SEATS, "")
            warm_up(engine, row)
            figures[title] = run(engine)
            keep(out, spec, figures)
            if options.profile and run is chosen(options)[0][1]:
                profile(engine, row, out.with_suffix(".profile.txt"))
    finally:
        engine.close()
    return figures


def chosen(options: Options) -> Sequence[tuple[str, Any]]:
    """What is measured; the first of it is what is profiled."""
    wanted = {"requests": options.requests, "prompt_8192": options.prompt}
    return [row for row in MEASURED if wanted.get(row[0])] or MEASURED


def keep(out: Path, spec: str, figures: dict[str, Any]) -> None:
    print(f"{spec}: {json.dumps(figures)}", flush=True)
    out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


def parse_row(spec: str) -> tuple[str, Options]:
    name, *given = spec.split(":")
    kinds = {item.name: type(item.default) for item in fields(Options)}
    values: dict[str, Any] = {}
    for option in given:
        key, _, value = option.partition("=")
        key = key.replace("-", "_")
        if key not in kinds:
            raise SystemExit(f"{spec}: options are {', '.join(kinds)}")
        values[key] = True if kinds[key] is bool else kinds[key](value)
    if name not in SHAPES:
        raise SystemExit(f"{spec}: rows are {', '.join(SHAPES)}, sums")
    return name, Options(**values)


def plan_of(name: str, shape: ModelConfig, options: Options) -> EnginePlan:
    """The plan, whose model path is the row and its options: further ranks make the same model."""
    block_bytes = KVCache.block_bytes(shape, block_size=BLOCK, dtype=torch.bfloat16, tp_size=options.tensor)
    return EnginePlan(
        model_path=f"{name}:{options.layers}:{int(options.nccl)}:{int(options.whole)}",
        digest=None,
        device="cuda",
        dtype=torch.bfloat16,
        kernels="fused",
        attention=Ops("fused").attention("auto", torch.bfloat16, "paged"),
        deterministic=False,
        threads=1,
        block_size=BLOCK,
        num_blocks=min(CACHE_BYTES // 2 // block_bytes, SEATS * 4096 // BLOCK),
        max_model_len=MAX_LEN,
        max_batch_tokens=BUDGET,
        num_seats=SEATS,
        tensor=options.tensor,
        pipeline=options.pipeline,
        expert=options.expert,
        overlap=True,
        graphs=not options.no_graphs,
    )


def open_engine(plan: EnginePlan, shape: ModelConfig) -> LLMEngine:
    executor: Executor
    if plan.ranks == 1:
        torch.cuda.set_device(0)
        executor = OnDevice(random_runner(plan, None))
    else:
        workers = Workers(plan.ranks, "cuda", command=worker_command)
        workers.smallest_free_bytes()
        executor = Ranks(plan, workers, lambda part: print(part, flush=True), nothing_beside, random_runner)
    flight = StepFlight(plan.pipeline, overlap=True)
    scheduler = Scheduler(
        BlockManager(plan.num_blocks, BLOCK, prefix_cache=False),
        max_batch_tokens=BUDGET,
        max_requests=SEATS,
        max_queued_requests=1024,
        chunk_tokens=flight.chunk_tokens(None),
        flight=flight,
    )
    return LLMEngine(executor, scheduler, ModelLimits(shape.vocab_size, MAX_LEN, ()), overlap=True)


def nothing_beside(*_: Any) -> nullcontext[None]:
    return nullcontext()


def worker_command(rank: int, _: str, link: int) -> Sequence[str]:
    return [sys.executable, str(Path(__file__)), "--worker", str(rank), "--link", str(link)]


def work(rank: int, link: int) -> None:
    Worker(rank, "cuda", Link(socket.socket(fileno=link)), random_runner).run(nothing_beside)


def random_runner(
    plan: EnginePlan, group: ProcessGroup | None, progress: Callable[[str], None] = print, beside_weights: Any = None
) -> Runner:
    """A rank's runner with random weights: a rank's slices are as good as another's."""
    del beside_weights
    name, layers, nccl, whole = plan.model_path.split(":")
    shape = replace(SHAPES[name], num_layers=int(layers) or SHAPES[name].num_layers)
    device, ops = torch.device("cuda", torch.cuda.current_device()), Ops("fused")
    place = place_of(plan, shape, group, device)
    sums = None if place.tensor is None else GroupSums(place.tensor, ops)
    if sums is not None and nccl == "0":
        sums = peer_sums(sums, shape.hidden_size, plan.dtype) or sums
        progress(f"sums: {type(sums).__name__}")
    decoder = make_decoder(plan, shape, ops, device, place)
    torch.manual_seed(0 if group is None else dist.get_rank(group))
    with torch.no_grad():
        for parameter_name, parameter in decoder.named_parameters():
            parameter.fill_(1) if "norm" in parameter_name else parameter.normal_(0, 0.02)
    runner = make_runner(plan, decoder, sums, place.links)
    if whole == "1":
        runner.eager.halved = None
    return runner


# Sums alone.


def measure_sums(ranks: int, columns: int, out: Path) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        address = f"file://{folder}/rendezvous"
        spawn(sum_rank, (ranks, columns, address, str(out.with_suffix(".json"))), nprocs=ranks)
    found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    return found


def sum_rank(rank: int, ranks: int, columns: int, address: str, out: str) -> None:
    """Check and time the sums of one rank. Times are medians over graphs of some calls, in microseconds per call."""
    for key, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(key, value)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    ops, dtype = Ops("fused"), torch.bfloat16
    over_nccl = GroupSums(dist.group.WORLD, ops)
    over_nccl.agree(True)
    most_bytes = SUM_ROWS[-1] * columns * 2
    ways = {
        "one_shot": peer_sums(over_nccl, columns, dtype, Longest(most_bytes, 0)),
        "two_shot": peer_sums(over_nccl, columns, dtype, Longest(0, most_bytes)),
    }
    figures: dict[str, Any] = {"ranks": ranks, "columns": columns, "us": {}}
    for rows in SUM_ROWS:
        line = time_sums(rank, rows, columns, over_nccl, ways)
        figures["us"][f"{rows} rows, {rows * columns * 2 >> 10} KiB"] = line
        if rank == 0:
            print(f"sums of {rows} rows: {json.dumps(line)}", flush=True)
            Path(out).write_text(json.dumps(figures, indent=1) + "\n")
    torch.cuda.synchronize()
    os._exit(0)  # graphs hold the communicator


def time_sums(
    rank: int, rows: int, columns: int, over_nccl: GroupSums, ways: Mapping[str, GroupSums | None]
) -> dict[str, Any]:
    torch.manual_seed(100 * rows + rank)
    part_TD = torch.randn(rows, columns, device="cuda").to(torch.bfloat16)
    x_TD, norm_D = torch.randn_like(part_TD), torch.ones(columns, dtype=torch.bfloat16, device="cuda")
    line: dict[str, Any] = {"nccl": timed(lambda: over_nccl.sum(part_TD.clone()))}
    line["nccl_then_norm"] = timed(lambda: over_nccl.sum_norm(part_TD.clone(), x_TD, norm_D, 1e-5))
    line["clone"] = timed(lambda: part_TD.clone())
    parts_RTD = part_TD.new_empty(over_nccl.size, rows, columns)
    dist.all_gather_into_tensor(parts_RTD.view(-1, columns), part_TD)
    expected_TD = ordered_sum(parts_RTD)
    for name, peers in ways.items():
        if peers is not None:
            line[name] = timed(lambda peers=peers: peers.sum(part_TD))
            line[f"{name}_with_norm"] = timed(lambda peers=peers: peers.sum_norm(part_TD, x_TD, norm_D, 1e-5))
            line[f"{name}_late_ms"] = late_ms(rank, lambda peers=peers: peers.sum_norm(part_TD, x_TD, norm_D, 1e-5))
            exact = [torch.equal(peers.sum(part_TD), expected_TD) for _ in range(50)]
            line[f"{name}_exact"] = over_nccl.agree(all(exact))
    return line


def timed(call: Callable[[], Tensor | tuple[Tensor, Tensor]]) -> float:
    """Microseconds per call, captured."""
    return round(1000 * statistics.median(replays_ms(call, 0.0)) / CALLS, 2)


def late_ms(rank: int, call: Callable[[], Tensor | tuple[Tensor, Tensor]]) -> float:
    """Milliseconds of all captured calls, where rank 1 begins `LATE_S` after the others: the longest of some."""
    return round(max(replays_ms(call, LATE_S if rank == 1 else 0.0)), 2)


def replays_ms(call: Callable[[], Tensor | tuple[Tensor, Tensor]], late_s: float) -> list[float]:
    """Milliseconds of some replays of a graph of `CALLS` calls."""
    graph, kept = captured(call)
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier()
        torch.cuda.synchronize()
        time.sleep(late_s)
        begin.record()  # type: ignore[no-untyped-call]
        graph.replay()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()  # type: ignore[no-untyped-call]
        times.append(begin.elapsed_time(end))  # type: ignore[no-untyped-call]
    del kept
    return times


def captured(call: Callable[[], Tensor | tuple[Tensor, Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """Return a graph of `CALLS` calls, and what it writes to."""
    call()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        kept: list[object] = [call() for _ in range(CALLS)]
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, kept


if __name__ == "__main__":
    main()
