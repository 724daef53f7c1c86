"""The engine on one GPU: throughput and latency of fixed workloads with random weights, made on the device.

    python bench/gpu/engine_gpu.py P1 P2 P4 P5 P6            # some rows
    python bench/gpu/engine_gpu.py P1:profile --out DIR      # kernel table, host gaps
    python bench/gpu/engine_gpu.py P1 P1:deterministic P1:no-overlap P1:no-graphs P1:block-size=64
    python bench/gpu/engine_gpu.py A1 A1:decode-graphs A1:no-graphs  # what graphs of steps with prompts bring

P1, P2: 256 requests drawn as nano-vllm's bench draws them (`random.seed(0)`, all prompts first, then the output
lengths), temperature 0.6, end tokens ignored: output tokens per second. P3: 256 requests of 1,024 tokens in and 256
out: all tokens per second; `:first-graphs` is the first round of a fresh server. P4, P5: one stream, 128 tokens in and
512 out: milliseconds per token. P6: one prompt of 8192 tokens: milliseconds to the first token. P8, P8S: P1's requests
and P4's stream with experts, and how the routers share a step of 256 decodes. P16: one stream at 120,000 tokens: its
prefill, and milliseconds per token. M1: chunks of 512 of a long prompt beside 16 streams: milliseconds per step at
several contexts. `:attention=flash` needs flash-attn-4, installed or in the folder of packages that STOKER_BENCH_SITE
names. A1, A2: requests of 64 to 256 tokens in and 256 out arrive one by one at a fixed pace while others decode: the
gaps between a request's tokens, and the time to its first one. One warm-up of the same kind comes before each. Start-up
(P9) is `engine_gpu_start.py`. Each row is written to `<out>/<row>.json` as soon as it is measured, before its profile;
one that fails or passes `--limit-s` leaves `<row>.error.txt`. The last line is JSON of all.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import site
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.model_shapes import LLAMA31_8B, QWEN3_06B, QWEN3_30B_A3B
from bench.gpu.router_report import counted_routes, report
from bench.gpu.row_limit import tried
from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.expert_stats import expert_stats
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.execution.executor import OnDevice
from stoker.engine.execution.load import capture_first
from stoker.engine.execution.runner import Runner
from stoker.engine.sampling import SamplingParams
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.hosted_experts import hosted_layers
from stoker.model.kernels.kernel_set import resolve_kernels
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache

HBM_BYTES_PER_S = 4.4e12
"""Rate of a copy on the machine for which the floors are given."""
DENSE_FLOPS = 780e12
CACHE_BYTES = 90 * 2**30
"""Largest size of the cache."""


@dataclass(frozen=True)
class Row:
    """One workload."""

    shape: ModelConfig
    run: Callable[[LLMEngine], dict[str, float]]
    max_len: int
    max_batch_tokens: int
    max_requests: int
    goal: str
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class Options:
    """Options of a row's run, written behind its name, as in `P1:deterministic:block-size=64`."""

    block_size: int = 64
    max_batch_tokens: int = 0
    """0: the row's."""
    kernels: str = "fused"
    deterministic: bool = False
    no_graphs: bool = False
    decode_graphs: bool = False
    """Graphs of decode steps only."""
    first_graphs: bool = False
    """Only the graphs that a server captures before it is ready, and no warm-up: its first round."""
    no_overlap: bool = False
    profile: bool = False
    rounds: int = 1
    attention: str = "auto"
    experts_on_device: int = 0
    """Experts of each layer on the device, the others in main memory; 0: all. The counts are in the row's file."""
    longest: int = 0
    """Most tokens of an answer of P1, P2 and P8; 0: as drawn. For steps that take too long for whole answers."""
    layers: int = 0
    """Number of layers below the shape's, to try the script out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROW[:OPTION[=VALUE]]...", help=f"rows: {', '.join(ROWS)}")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--limit-s", type=float, default=120.0, help="of one row, its engine's start included")
    arguments = parser.parse_args()
    if "STOKER_BENCH_SITE" in os.environ:
        site.addsitedir(os.environ["STOKER_BENCH_SITE"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for spec in arguments.rows:
        label = spec.replace(":profile", "").replace(":", "-").replace("=", "")
        found = tried(lambda spec=spec, label=label: measure(spec, label, arguments.out), arguments.limit_s)  # type: ignore[misc]
        results[label] = found
        if isinstance(found, str):
            print(f"{label}: {found}", flush=True)
            (arguments.out / f"{label}.error.txt").write_text(found + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(results))


def measure(spec: str, label: str, out: Path) -> dict[str, Any]:
    name, options = parse_row(spec)
    row = ROWS[name]
    engine, about = open_engine(row, options)
    if not options.first_graphs:
        warm_up(engine, row)
    if options.attention == "flash":
        compile_flash(engine, row)
    if options.longest:
        row = replace(row, run=partial(throughput, longest=options.longest))
    with timed_parts(engine) as parts:
        rounds = [row.run(engine) for _ in range(options.rounds)]
    if (experts := expert_stats(hosted_layers(engine.executor.runner.model))) is not None:  # type: ignore[attr-defined]
        about["experts"] = asdict(experts)
    best = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    if row.shape.num_experts is not None:
        about["router"] = routing(engine, row)
    result = {**best, "goal": row.goal, "rounds": rounds, "host_ms_per_step": parts, **about}
    shown = {**best, "goal": row.goal, "host_ms_per_step": parts, "router": about.get("router")}
    print(f"{label}: {json.dumps(shown)}", flush=True)
    (out / f"{label}.json").write_text(json.dumps(result, indent=1) + "\n")
    if options.profile:
        profile(engine, row, out / f"{label}-profile.txt")
    return result


def parse_row(spec: str) -> tuple[str, Options]:
    name, *given = spec.split(":")
    kinds = {item.name: type(item.default) for item in fields(Options)}
    values: dict[str, Any] = {}
    known = [key.replace("_", "-") for key in kinds]
    if name not in ROWS or not {option.partition("=")[0] for option in given} <= set(known):
        raise SystemExit(f"{spec}: rows are {', '.join(ROWS)}; options {', '.join(known)}")
    for option in given:
        key, _, value = option.partition("=")
        key = key.replace("-", "_")
        values[key] = True if kinds[key] is bool else kinds[key](value)
    return name, Options(**values)


def warm_up(engine: LLMEngine, row: Row) -> None:
    """Run some requests of the row's kind: two whole steps of prompts, and a few of decoding."""
    start_workload(engine, row, max_requests=64, max_tokens=4)
    drain(engine, 0.0)


def compile_flash(engine: LLMEngine, row: Row) -> None:
    """Run a prompt that flash-attn-4 attends for, which a server does before it is ready."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1, seed=0)
    engine.add_request("flash", [0] * min(4000, row.max_len - 1), params)
    drain(engine, 0.0)


# The engine.


def open_engine(row: Row, options: Options) -> tuple[LLMEngine, dict[str, Any]]:
    shape = replace(row.shape, num_layers=options.layers or row.shape.num_layers)
    ops = Ops(resolve_kernels(options.kernels, "cuda"), deterministic=options.deterministic)
    begin = time.perf_counter()
    decoder = random_decoder(shape, ops, options.experts_on_device or None)
    block_bytes = KVCache.block_bytes(shape, block_size=options.block_size, dtype=torch.bfloat16)
    num_blocks = min(CACHE_BYTES // block_bytes, row.max_requests * row.max_len // options.block_size)
    cache = KVCache(
        shape, num_blocks=num_blocks, block_size=options.block_size, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    budget = options.max_batch_tokens or row.max_batch_tokens
    runner = Runner(
        decoder,
        cache,
        num_seats=row.max_requests,
        max_model_len=row.max_len,
        max_batch_tokens=budget,
        attention=options.attention,
        graphs=not options.no_graphs,
    )
    scheduler = Scheduler(
        BlockManager(num_blocks, options.block_size, prefix_cache=False),
        max_batch_tokens=budget,
        max_requests=row.max_requests,
        max_queued_requests=1024,
        chunk_tokens=row.chunk_tokens,
    )
    engine = LLMEngine(
        OnDevice(runner), scheduler, ModelLimits(shape.vocab_size, row.max_len, ()), overlap=not options.no_overlap
    )
    assert runner.graphs is not None or options.kernels != "fused"
    if options.decode_graphs and runner.graphs is not None:
        runner.graphs.shapes = replace(runner.graphs.shapes, mixed=())
    torch.cuda.synchronize()
    opened, free_bytes = time.perf_counter(), torch.cuda.mem_get_info()[0]
    if options.first_graphs:
        capture_first(runner, 1.0, runner.capture)
    while not options.first_graphs and runner.capture_next_graph():
        pass
    graphs = len(runner.graphs.graphs) if runner.graphs is not None else 0
    torch.cuda.synchronize()
    graph_bytes = free_bytes - torch.cuda.mem_get_info()[0]
    about = {
        "parameters": shape.num_parameters,
        "num_blocks": num_blocks,
        "block_size": options.block_size,
        "max_batch_tokens": budget,
        "graphs": graphs,
        "graph_mib": graph_bytes >> 20,
        "capture_s": round(time.perf_counter() - opened, 3),
        "make_s": round(opened - begin, 3),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }
    print(f"opened: {json.dumps(about)}", flush=True)
    return engine, about


def random_decoder(shape: ModelConfig, ops: Ops, experts_on_device: int | None = None) -> Decoder:
    cuda = torch.device("cuda")
    decoder = Decoder(shape, ops, dtype=torch.bfloat16, device=cuda, experts_on_device=experts_on_device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            else:
                parameter.copy_(torch.empty_like(parameter, device=cuda).normal_(0, 0.02))
    decoder.requires_grad_(False).eval().pack_weights()
    return decoder


# Workloads.


def throughput(engine: LLMEngine, longest: int = 1024) -> dict[str, float]:
    """Measure a row as nano-vllm's bench does. `longest`: no answer gets more tokens."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    lengths = [min(rng.randint(100, 1024), longest) for _ in range(256)]
    begin = time.perf_counter()
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length, seed=index)
        engine.add_request(str(index), prompt, params)
    while engine.scheduler.waiting:
        engine.step()
    prefilled = time.perf_counter() - begin
    seconds, tokens, steps = drain(engine, begin)
    tokens = sum(lengths)
    return {
        "output_tokens_per_s": round(tokens / seconds, 1),
        "seconds": round(seconds, 3),
        "seconds_until_all_run": round(prefilled, 3),
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": tokens,
        "steps": steps,
    }


def long_answers(engine: LLMEngine) -> dict[str, float]:
    """Measure 256 requests of 1,024 tokens in and 256 out: tokens per second, both counted."""
    rng = random.Random(0)
    begin = time.perf_counter()
    for index in range(256):
        prompt = [rng.randint(0, 10000) for _ in range(1024)]
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=256, seed=index)
        engine.add_request(str(index), prompt, params)
    seconds, tokens, steps = drain(engine, begin)
    return {
        "total_tokens_per_s": round((256 * 1024 + tokens) / seconds, 1),
        "seconds": round(seconds, 3),
        "output_tokens": tokens,
        "steps": steps,
    }


def stamps_of_tokens(engine: LLMEngine) -> tuple[list[float], list[float]]:
    """Run the engine until nothing is left. Return the time of each token, and the sorted gaps between them."""
    stamps = []
    while engine.has_unfinished:
        deltas = engine.step()
        stamps += [time.perf_counter()] * len(deltas)
    return stamps, sorted(later - earlier for earlier, later in itertools.pairwise(stamps))


def one_stream(engine: LLMEngine) -> dict[str, float]:
    rng = random.Random(0)
    begin = time.perf_counter()
    prompt = [rng.randint(0, 10000) for _ in range(128)]
    engine.add_request("0", prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=512, seed=0))
    stamps, gaps = stamps_of_tokens(engine)
    return {
        "ms_per_token": round(1000 * (stamps[-1] - stamps[0]) / (len(stamps) - 1), 4),
        "ms_per_token_with_prompt": round(1000 * (stamps[-1] - begin) / len(stamps), 4),
        "first_token_ms": round(1000 * (stamps[0] - begin), 3),
        "p50_ms": round(1000 * gaps[len(gaps) // 2], 4),
        "p99_ms": round(1000 * gaps[len(gaps) * 99 // 100], 4),
    }


def paced(engine: LLMEngine, pace_s: float) -> dict[str, float]:
    """Send one request each `pace_s`, whatever the engine is doing; sleep while nothing runs."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(64, 256))] for _ in range(192)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=256, seed=0)
    stamps: dict[str, list[float]] = defaultdict(list)
    begin, arrived = time.perf_counter(), 0
    while arrived < len(prompts) or engine.has_unfinished:
        now = time.perf_counter() - begin
        while arrived < len(prompts) and arrived * pace_s <= now:
            engine.add_request(str(arrived), prompts[arrived], params)
            arrived += 1
        if not engine.has_unfinished:
            time.sleep(max(arrived * pace_s - now, 0))
        deltas = engine.step()
        now = time.perf_counter() - begin
        for _, delta in deltas:
            stamps[delta.request_id].append(now)
    gaps = sorted(later - earlier for one in stamps.values() for earlier, later in itertools.pairwise(one))
    firsts = sorted(one[0] - int(number) * pace_s for number, one in stamps.items())
    last = max(one[-1] for one in stamps.values())
    return {
        "output_tokens_per_s": round(256 * len(prompts) / last, 1),
        "gap_p50_ms": round(1000 * gaps[len(gaps) // 2], 3),
        "gap_p99_ms": round(1000 * gaps[len(gaps) * 99 // 100], 3),
        "first_p50_ms": round(1000 * firsts[len(firsts) // 2], 2),
        "first_p99_ms": round(1000 * firsts[len(firsts) * 99 // 100], 2),
    }


def paced_small(engine: LLMEngine) -> dict[str, float]:
    return paced(engine, 0.010)


def paced_large(engine: LLMEngine) -> dict[str, float]:
    return paced(engine, 0.025)


def first_token(engine: LLMEngine) -> dict[str, float]:
    """Return the median time to the first token of five requests."""
    rng = random.Random(0)
    times = []
    for number in range(5):
        prompt = [rng.randint(0, 10000) for _ in range(8192)]
        begin = time.perf_counter()
        engine.add_request(str(number), prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1, seed=0))
        drain(engine, begin)
        times.append(1000 * (time.perf_counter() - begin))
    return {"first_token_ms": round(statistics.median(times), 2), "best_ms": round(min(times), 2)}


def long_stream(engine: LLMEngine) -> dict[str, float]:
    """Measure the prefill of one prompt of 120,000 tokens, and the steps behind it."""
    rng = random.Random(0)
    prompt = [rng.randint(0, 10000) for _ in range(120_000)]
    begin = time.perf_counter()
    engine.add_request("0", prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=129, seed=0))
    stamps, gaps = stamps_of_tokens(engine)
    return {
        "prefill_s": round(stamps[0] - begin, 3),
        "ms_per_token": round(1000 * (stamps[-1] - stamps[0]) / (len(stamps) - 1), 4),
        "p50_ms": round(1000 * gaps[len(gaps) // 2], 4),
    }


def mixed_steps(engine: LLMEngine) -> dict[str, float]:
    """Measure the steps that compute 512 tokens of a prompt of 65,536 beside 16 streams, eighth by eighth."""
    rng = random.Random(0)
    for index in range(16):
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=400, seed=index)
        engine.add_request(str(index), [rng.randint(0, 10000) for _ in range(1024)], params)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(20):
        engine.step()
    prompt = [rng.randint(0, 10000) for _ in range(65_536)]
    engine.add_request("long", prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1, seed=0))
    stamps = [time.perf_counter()]
    while engine.has_unfinished:
        deltas = engine.step()
        stamps.append(time.perf_counter())
        if any(delta.request_id == "long" for _, delta in deltas):
            break
    engine.end_everything("abort")
    drain(engine, 0.0)
    eighth = (len(stamps) - 1) // 8
    found = {"steps": float(len(stamps) - 1), "prefill_s": round(stamps[-1] - stamps[0], 3)}
    for number in (0, 1, 3, 5, 7):
        seconds = stamps[(number + 1) * eighth] - stamps[number * eighth]
        found[f"ms_at_{number * 8192 + 4096}"] = round(1000 * seconds / eighth, 3)
    return found


def drain(engine: LLMEngine, begin: float) -> tuple[float, int, int]:
    """Run until nothing is left; return seconds, tokens and steps."""
    tokens, first = 0, engine.num_steps
    while engine.has_unfinished:
        for _, delta in engine.step():
            assert delta.error is None, delta.error
            tokens += len(delta.tokens)
    return time.perf_counter() - begin, tokens, engine.num_steps - first


ROWS = {
    "P1": Row(QWEN3_06B, throughput, 4096, 16384, 256, ">= 29500 tokens/s"),
    "P2": Row(LLAMA31_8B, throughput, 4096, 16384, 256, ">= 11000 tokens/s"),
    "P3": Row(LLAMA31_8B, long_answers, 4096, 16384, 256, ">= 33000 tokens/s"),
    "P4": Row(LLAMA31_8B, one_stream, 4096, 8192, 256, "<= 3.7 ms"),
    "P5": Row(QWEN3_06B, one_stream, 4096, 8192, 256, "<= 0.5 ms"),
    "P6": Row(LLAMA31_8B, first_token, 16384, 8192, 256, "<= 205 ms, 190 with flash"),
    "P16": Row(LLAMA31_8B, long_stream, 131072, 8192, 2, "<= 8.0 ms, prefill <= 9.3 s with flash"),
    "M1": Row(LLAMA31_8B, mixed_steps, 69632, 4096, 17, "-", chunk_tokens=512),
    "P8": Row(QWEN3_30B_A3B, throughput, 2304, 16384, 256, ">= 6700 tokens/s"),
    "P8S": Row(QWEN3_30B_A3B, one_stream, 2304, 8192, 256, "<= 2.5 ms"),
    "A1": Row(QWEN3_06B, paced_small, 4096, 8192, 256, "first token <= 10 ms"),
    "A2": Row(LLAMA31_8B, paced_large, 4096, 8192, 256, "first token <= 20 ms"),
}


# Time by part of a step.


@contextmanager
def timed_parts(engine: LLMEngine) -> Iterator[dict[str, float]]:
    """Record the milliseconds per step that the host spends in each part; `wait` is for the device."""
    parts: dict[str, float] = {}
    total: dict[str, float] = defaultdict(float)
    runner = engine.executor.runner  # type: ignore[attr-defined]
    places: list[tuple[str, Any, str]] = [
        ("schedule", engine.scheduler, "schedule"),
        ("submit", engine, "_submit"),
        ("launch", runner, "launch"),
        ("wait", engine, "_outcome"),
        ("collect", engine, "_collect"),
        ("step", engine, "step"),
    ]
    for name, owner, attribute in places:
        setattr(owner, attribute, timed(getattr(owner, attribute), name, total))
    first = engine.num_steps
    try:
        yield parts
    finally:
        for _, owner, attribute in places:
            delattr(owner, attribute)
        steps = max(engine.num_steps - first, 1)
        parts.update({name: round(1000 * seconds / steps, 4) for name, seconds in total.items()})
        parts["take"] = round(parts["collect"] - parts["wait"], 4)
        parts["build"] = round(parts["submit"] - parts["launch"], 4)


def timed(call: Callable[..., Any], name: str, total: dict[str, float]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            total[name] += time.perf_counter() - begin

    return wrapped


def profile(engine: LLMEngine, row: Row, file: Path) -> None:
    """Profile the kernels of some steps in the middle of the workload, and the idle time of the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    steps = 1 if row.run is first_token else 40
    start_workload(engine, row)
    for _ in range(0 if row.run is first_token else 200):
        engine.step()
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    engine.end_everything("abort")
    engine.step()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    averages = recorded.key_averages()
    kernels = sorted(averages, key=lambda event: -event.self_device_time_total)[:30]
    lines = [busy_line(spans, steps)]
    lines += [
        f"{event.self_device_time_total / steps:10.1f} us per step  {event.count / steps:6.1f} calls  "
        f"{event.self_device_time_total / max(event.count, 1):9.2f} us each  {event.key[:80]}"
        for event in kernels
        if event.self_device_time_total
    ]
    host = averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    file.write_text("\n".join([*lines, "", "By host time:", host]))
    print("\n".join(lines[:16]), flush=True)


def routing(engine: LLMEngine, row: Row) -> dict[str, float]:
    """Count the routers' choices in some steps of the most decodes, launched one by one."""
    runner = engine.executor.runner  # type: ignore[attr-defined]
    graphs, runner.graphs.graphs = runner.graphs.graphs, {}
    start_workload(engine, replace(row, run=throughput), max_requests=row.max_requests, max_tokens=64)
    while engine.scheduler.waiting:
        engine.step()
    with counted_routes(runner.model, row.max_requests) as counts:
        for _ in range(4):
            engine.step()
    engine.end_everything("abort")
    engine.step()
    runner.graphs.graphs = graphs
    return report(counts)


def start_workload(engine: LLMEngine, row: Row, max_requests: int = 256, max_tokens: int = 512) -> None:
    rng = random.Random(1)
    workloads: dict[Callable[[LLMEngine], dict[str, float]], tuple[int, int]]
    workloads = {throughput: (256, 500), one_stream: (1, 128), first_token: (1, 8192)}
    count, length = workloads.get(row.run, (64, 160))
    for index in range(min(count, max_requests)):
        prompt = [rng.randint(0, 10000) for _ in range(length)]
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens, seed=0)
        engine.add_request(str(index), prompt, params)


def busy_line(spans: list[tuple[float, float]], steps: int) -> str:
    if not spans:
        return "no kernels were recorded"
    busy, end = 0.0, spans[0][0]
    for begin, finish in spans:
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    whole = end - spans[0][0]
    idle = (whole - busy) / steps
    return f"{whole / steps:.1f} us per step, device busy {100 * busy / whole:.1f} %, idle {idle:.1f} us per step"


if __name__ == "__main__":
    main()
