"""Tokens per second per GPU of the trainer on 1 to 4 GPUs, random tokens: rows T1 to T4 and T9.

    T1   Llama-3.1-8B shape, 8,192 tokens, 1 sequence per GPU, one micro-batch
    T2   the same, 4 micro-batches
    T3   T1 with 2 sequences per GPU, in fp8 (`bf16` behind the colon: in bf16)
    T4   Llama-3.2-1B shape, 2,048 tokens, 8 sequences per GPU
    T9   T2 with the optimizer's state in host memory, and the rate of a copy from there beside it

    python bench/gpu/trainer_gpu.py T1 --gpus 4
    python bench/gpu/trainer_gpu.py T1 T1:full T1:SameLayout T1:AnyDataParallel T2 T2:stage2 T4 --gpus 4
    python bench/gpu/trainer_gpu.py T3 T3:Rowwise T3:bf16 T4:fp8 --gpus 4 --profile T3
    python bench/gpu/trainer_gpu.py T1 --gpus 4 --profile T1  # kernels against floors, exposed communication, gaps

Behind the colon: full or selective (activation checkpointing), SameLayout, AnyDataParallel, stage0, stage2, stage3,
bf16, fp8 (Tensorwise), Rowwise, offload, nvme (state in a file in STOKER_BENCH_VOLUME), reference (kernels), or an
attention (cudnn, flash, stoker); reduce_ctas=N, gather_ctas=N, cluster=N (NCCL's share of the GPU); silent (nothing is
sent, so the numbers are wrong: the step without its communication). STOKER_BENCH_SITE names a folder with further
packages (flash-attn-4). One process per GPU, each
seeing only its own, as the agent starts them; inside it the product's own classes: Decoder, Zero, TrainStep and their
communicators. A step's time runs from one answer (loss and norm) to the next; the figure is the mean over the last half
of the steps. Results are written as they come, a profile after its figures. A run that fails or passes `--limit-s` is
ended and named, and the ranks are started again for the runs behind it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.pinned import pinned_memory
from stoker.pod.config_file import parse
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.communicator import DONE, Communicator, GpuShare, Pending, Total, make_communicator
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.initial_weights import InitialWeights
from stoker.trainer.rank.kernel_choice import make_ops
from stoker.trainer.rank.mesh import data_parallel_mesh
from stoker.trainer.rank.ordered_sum import sum_in_order
from stoker.trainer.rank.plan_check import choose_layers, plan_run
from stoker.trainer.rank.process_group import choose_device, process_group, set_threads
from stoker.trainer.rank.rank_info import find_rank_info
from stoker.trainer.rank.train_step import ForwardPass, TrainStep
from stoker.trainer.rank.zero_maker import make_zero

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "tie_embeddings": False,
}
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
    "tie_embeddings": True,
}
PEAK_FLOPS, PEAK_BYTES, PEAK_LINK = 780e12, 4.4e12, 350e9
"""Measured on this kind of machine: dense bf16 product on random data, copy (read and written bytes), and what NVLink
gives one GPU in one direction (assumed).
"""
KINDS = (
    ("attention", r"fmha|flash|cudnn|attention|attend"),
    ("nccl", r"nccl"),
    ("optimizer", r"adam"),
    ("squares", r"line_kernel|square|vector_norm"),
    ("sum of ranks", r"_sum_rows|_sum_lines"),
    ("casts", r"amax_kernel|cast_kernel"),
    ("product", r"gemm|nvjet|cutlass|xmma|matmul|mma_kernel|_tiled|linear"),
    ("loss", r"cross_entropy|softmax|row_statistics"),
    ("norm and swiglu", r"^(forward|backward)_kernel|norm|swiglu|silu"),
    ("rotary", r"rotat"),
    ("embedding", r"embed|index|gather|radix|unique|scatter|grad_weight"),
    ("copy", r"Memcpy|Memset|copy"),
    ("pointwise", r"elementwise|reduce|CatArray|fill"),
)


@dataclass(frozen=True)
class Row:
    model: dict[str, Any]
    sequence: int
    sequences: int
    micro_batches: int
    precision: str = "bf16"
    offload: bool = False


ROWS = {
    "T1": Row(LLAMA_8B, 8192, 1, 1),
    "T2": Row(LLAMA_8B, 8192, 1, 4),
    "T3": Row(LLAMA_8B, 8192, 2, 1, "fp8"),
    "T4": Row(LLAMA_1B, 2048, 8, 1),
    "T9": Row(LLAMA_8B, 8192, 1, 4, offload=True),
}


def trainer_config(row: Row, variants: list[str], gpus: int) -> TrainerConfig:
    fields: dict[str, Any] = {
        "job": {"name": "bench", "uid": "bench", "writer": "00000000"},
        "gang": {"ranks_per_node": gpus},
        "termination_log": "unused",
        "work_dir": "unused",
        "model": {},
        "training": {
            "total_steps": 1000,
            "global_batch_size": row.sequences * row.micro_batches * gpus,
            "micro_batch_size": row.sequences,
            "sequence_length": row.sequence,
        },
        "optimization": {"learning_rate": 1e-4},
        "memory": {"precision": row.precision, "cpu_offload": row.offload},
        "data": {"sources": [{"name": "none", "path": "none"}]},
        "checkpoint": {"root": "unused"},
    }
    for variant in variants:
        if variant == "silent" or "=" in variant:  # of the communicator
            continue
        if variant in ("full", "selective"):
            fields["memory"]["activation_checkpointing"] = variant
        elif variant == "offload":
            fields["memory"]["cpu_offload"] = True
        elif variant == "nvme":
            path = os.environ.get("STOKER_BENCH_VOLUME", tempfile.gettempdir())
            fields["memory"] |= {"cpu_offload": False, "nvme_offload": {"path": path}}
        elif variant in ("bf16", "fp8"):
            fields["memory"]["precision"] = variant
        elif variant in ("Tensorwise", "Rowwise"):
            fields["memory"] |= {"precision": "fp8", "fp8_recipe": variant}
        elif variant in ("SameLayout", "AnyDataParallel"):
            fields["training"]["deterministic"] = variant
        elif variant.startswith("stage"):
            fields["memory"]["zero_stage"] = int(variant.removeprefix("stage"))
        elif variant in ("reference", "fused"):
            fields["kernels"] = variant
        else:
            fields["attention"] = variant
    return parse(TrainerConfig, fields)


def model_config(row: Row, layers: int | None) -> ModelConfig:
    fields = {**row.model, **({"num_layers": layers} if layers else {})}
    return ModelConfig(architecture="llama", vocab_size=128256, max_position_embeddings=8192, rope_theta=5e5, **fields)


def micro_batches(row: Row, step: int, rank: int, vocab_size: int) -> Iterator[MicroBatch]:
    random = np.random.default_rng([step, rank])
    size = row.sequence * row.sequences
    cuts = np.arange(0, size + 1, row.sequence, dtype=np.int32)
    positions = np.tile(np.arange(row.sequence), row.sequences)
    for _ in range(row.micro_batches):
        tokens = random.integers(0, vocab_size, size + 1)
        yield MicroBatch(tokens[:-1], positions, tokens[1:], np.ones(size, np.float32), cuts, row.sequence)


class Silent:
    """A rank that sends and receives only small numbers: the step's time if communication were free."""

    eager, replicas, replica = True, 1, 0

    def __init__(self, real: Communicator) -> None:
        self.rank, self.size = real.rank, real.size
        self.shard, self.exchange = real.shard, real.exchange

    def reduce_scatter(
        self,
        flat: Tensor,
        out: Tensor,
        *,
        add: bool = False,
        total: Total = sum_in_order,
        last: bool = True,  # noqa: ARG002
    ) -> Pending:
        total(flat.view(self.size, -1).unbind(0), out, add=add)
        return DONE

    def all_gather(self, flat: Tensor) -> Pending:  # noqa: ARG002
        return DONE


class Communicators:
    """The communicators of this rank by their share of the GPU, made at their first use (collective) and kept."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._made: dict[GpuShare, Communicator] = {}

    def of(self, variants: list[str]) -> Communicator:
        share = gpu_share(variants)
        if share not in self._made:
            made = make_communicator(range(self._size), self._device, share=share)
            assert made is not None
            self._made[share] = made
        return Silent(self._made[share]) if "silent" in variants else self._made[share]


def gpu_share(variants: list[str]) -> GpuShare:
    named = [variant.split("=") for variant in variants if "=" in variant]
    return GpuShare(**{name: int(value) for name, value in named})


class Run:
    """One row on this rank."""

    def __init__(
        self,
        row: Row,
        variants: list[str],
        options: argparse.Namespace,
        device: torch.device,
        communicator: Communicator,
    ) -> None:
        self.row, self.communicator, self.device = row, communicator, device
        self.model = model_config(row, options.layers)
        self.config = trainer_config(row, variants, communicator.size)
        set_threads(self.config)
        begin = time.perf_counter()
        ops, self.attention = make_ops(self.config, device)
        self.decoder = decoder = Decoder(self.model, ops, device="meta")
        start = InitialWeights(decoder, 0, lambda _done, _total: None)
        self.zero = make_zero(self.config, decoder, data_parallel_mesh(communicator), device, start.fill)
        choices = choose_layers(self.config, self.model)
        forward = ForwardPass(
            decoder, self.attention, device, self.zero.ready, choices=choices, gathered=self.zero.gathered
        )
        self.train_step = TrainStep(forward, self.zero, self.config.optimization.gradient_clipping)
        torch.cuda.synchronize(device)
        self.init_s = time.perf_counter() - begin
        self.steps = 0
        self.losses: list[tuple[float, float]] = []

    def step(self) -> float:
        """Run a step and return the seconds until its answer."""
        begin = time.perf_counter()
        self.steps += 1
        batches = micro_batches(self.row, self.steps, self.communicator.rank, self.model.vocab_size)
        result = self.train_step(
            self.steps, batches, self.row.micro_batches, self.tokens * self.communicator.size, 1e-4, StepSignals
        )
        self.losses.append((result.loss, result.grad_norm))
        return time.perf_counter() - begin

    def wished(self, signals: StepSignals) -> bool:
        """Return whether any rank signals a save (collective; waits for the device)."""
        mine = torch.tensor([float(signals.save)], device=self.device)
        return bool(self.communicator.exchange(mine).max() > 0)

    @property
    def tokens(self) -> int:
        """Return the tokens of one step on one GPU."""
        return self.row.sequence * self.row.sequences * self.row.micro_batches


def measure(
    name: str, options: argparse.Namespace, device: torch.device, communicators: Communicators
) -> Iterator[dict[str, Any]]:
    """Yield the figures of one run, then its profile if requested."""
    row_name, *variants = name.split(":")
    torch.cuda.reset_peak_memory_stats(device)
    communicator = communicators.of(variants)
    run = Run(ROWS[row_name], variants, options, device, communicator)
    seconds = [run.step() for _ in range(options.steps)]
    half = seconds[len(seconds) // 2 :]
    mean = sum(half) / len(half)
    plan = plan_run(run.config, run.model, device)
    yield {
        "run": name,
        "gpus": communicator.size,
        "layers": run.model.num_layers,
        "parameters": run.model.num_parameters,
        "attention": run.attention,
        "kernels": run.config.kernels,
        "tokens_per_s_per_gpu": round(run.tokens / mean, 1),
        "step_ms": [round(1e3 * value, 1) for value in seconds],
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved(device) / 2**30, 2),
        "init_s": round(run.init_s, 2),
        "planned_step_ms": None if plan.time is None else round(1e3 * plan.time.total, 1),
        "planned_gib": round(plan.fullest.total / 2**30, 2),
        "losses": run.losses,
        **({"link_gb_per_s": link_rate(device)} if run.config.memory.cpu_offload else {}),
    }
    if name in options.profile:
        yield {"run": name, "gpus": communicator.size, "profile": profile(run, options)}
    run.zero.wait_parameters()  # torch keeps what a collective reads until a caller waits for it
    run.zero.close()


def link_rate(device: torch.device) -> list[float]:
    """Return GB/s of a copy from page-locked memory to the device, back, and of each while both run."""
    there, back = ((torch.empty(1 << 28, device=device), pinned_memory(1 << 28)) for _ in range(2))
    copies = [(there[0], there[1]), (back[1], back[0])]
    rates = []
    for at_once in (copies[:1], copies[1:], copies):
        streams = [torch.cuda.Stream(device) for _ in at_once]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for stream, (target, source) in zip(streams, at_once, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(round(there[0].nbytes / 1e9 / (time.perf_counter() - begin), 1))
    return rates


def profile(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Profile two steps and count the second one: from one optimizer's end to the next."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            run.step()
        torch.cuda.synchronize(run.device)
    inside, begin, finish = last_step(profiler.profiler)
    summary = summarise(inside, begin, finish)
    if run.communicator.rank == 0 and options.out is not None:
        names: dict[str, list[float]] = {}
        for start, end, name, _ in inside:
            entry = names.setdefault(name[:150], [0, 0.0])
            entry[0] += 1
            entry[1] += (end - start) / 1e6
        lines = [
            f"{ms:9.3f} ms {int(count):6d} x  {name}"
            for name, (count, ms) in sorted(names.items(), key=lambda item: -item[1][1])
        ]
        (options.out / f"kernels-{run.communicator.size}-{run.model.num_layers}.txt").write_text("\n".join(lines))
    return summary


def last_step(profiler: Any) -> tuple[list[Any], int, int]:
    """Return the device's events of the last whole step, from one optimizer's end to the next, and these two times."""
    events = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name(), event.device_resource_id())
        for event in profiler.kineto_results.events()
        if "CUDA" in str(event.device_type()) and event.duration_ns() > 0
    ]
    events.sort()
    ends = [end for _, end, name, _ in events if "adam" in name.lower()]
    if not ends:  # torch's own optimizer
        ends = [events[-1][1]]
    marks = [end for index, end in enumerate(ends[:-1]) if _gap_follows(events, end, ends[index + 1])]
    begin, finish = (marks[-2], marks[-1]) if len(marks) >= 2 else (events[0][0], events[-1][1])
    inside = [event for event in events if begin <= event[0] < finish]
    return inside, begin, finish


def _gap_follows(events: list[Any], end: int, next_end: int) -> bool:
    """Return whether `end` closes the last optimizer kernel of a step: products run before the next one."""
    return any(end <= start < next_end and kind_of(name) == "product" for start, _, name, _ in events)


def summarise(events: list[Any], begin: int, finish: int) -> dict[str, Any]:
    kinds: dict[str, list[float]] = {}
    for start, end, name, _ in events:
        entry = kinds.setdefault(kind_of(name), [0, 0.0])
        entry[0] += 1
        entry[1] += (end - start) / 1e6
    busy = covered([(start, end) for start, end, _, _ in events])
    computed = [event for event in events if kind_of(event[2]) not in ("nccl", "sum of ranks")]
    computing = covered([(start, end) for start, end, _, _ in computed])
    return {
        "step_ms": round((finish - begin) / 1e6, 2),
        "idle_ms": round((finish - begin - busy) / 1e6, 2),
        "only_communication_ms": round((busy - computing) / 1e6, 2),
        "kernels": len(events),
        "waits": waits(computed, begin),
        "kinds": {
            kind: {"count": int(count), "ms": round(ms, 2)}
            for kind, (count, ms) in sorted(kinds.items(), key=lambda item: -item[1][1])
        },
    }


def waits(events: list[Any], begin: int, most: int = 8) -> list[tuple[float, float, str, str]]:
    """Return the longest times without any of these kernels: start (ms), length (ms), kernel before, kernel after."""
    found, reach, last = [], begin, ""
    for start, end, name, _ in sorted(events):
        if start > reach:
            found.append((round((reach - begin) / 1e6, 2), round((start - reach) / 1e6, 3), last[:60], name[:60]))
        if end > reach:
            reach, last = end, name
    return sorted(found, key=lambda wait: -wait[1])[:most]


def covered(intervals: list[tuple[int, int]]) -> int:
    """Return the length of the union."""
    total, reach = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def floors(run_name: str, gpus: int) -> dict[str, float]:
    """Return the milliseconds that the parts of a step need at the limits."""
    row = ROWS[run_name]
    model = model_config(row, None)
    tokens = row.sequence * row.sequences * row.micro_batches
    in_products = model.num_parameters - (0 if model.tie_embeddings else model.vocab_size * model.hidden_size)
    attention = 3.5 * 2 * model.num_layers * model.num_heads * model.head_dim * row.sequence * tokens
    shard = model.num_parameters / gpus
    pointwise = tokens * model.num_layers * 2 * (17 * model.hidden_size + 8 * model.intermediate_size)
    sent = 2 * model.num_parameters * (gpus - 1) / gpus
    return {
        "product": round(6 * in_products * tokens / PEAK_FLOPS * 1e3, 1),
        "attention": round(attention / PEAK_FLOPS * 1e3, 1),
        "pointwise": round(pointwise / PEAK_BYTES * 1e3, 1),
        "optimizer": round(30 * shard / PEAK_BYTES * 1e3, 1),
        "communication, hidden": round(2 * sent / PEAK_LINK * 1e3, 1),
    }


def work(options: argparse.Namespace) -> None:
    """Run one rank: place and peers come from the environment."""
    first = trainer_config(ROWS["T1"], [], options.gpus)
    info = find_rank_info(first, os.environ)
    device = choose_device(first)
    torch.cuda.set_device(device)
    with process_group(first, info, device, None):
        communicators = Communicators(info.world_size, device)
        for name in options.runs[options.skip :]:
            try:
                for facts in measure(name, options, device, communicators):
                    tell(facts, info.rank)
            except torch.OutOfMemoryError as error:
                tell({"run": name, "gpus": options.gpus, "error": str(error)[:300]}, info.rank)
            gc.collect()
            torch.cuda.empty_cache()
            torch.use_deterministic_algorithms(False)


def tell(facts: dict[str, Any], rank: int) -> None:
    if rank == 0:
        print("RESULT " + json.dumps(facts), flush=True)


def spawn(
    program: Sequence[str], gpus: int, limit_s: float, keep: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Run Python with these arguments and `--rank`, once per GPU, and pass each result of rank 0 to `keep` at once.

    Without a result for `limit_s` all ranks are ended and print their stacks.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(gpus):
        info = {"RANK": rank, "WORLD_SIZE": gpus, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {
            **os.environ,
            **{name: str(value) for name, value in info.items()},
            "CUDA_VISIBLE_DEVICES": str(rank),
            "OMP_NUM_THREADS": "8",
            "PYTHONFAULTHANDLER": "1",
        }
        command = [sys.executable, *program, "--rank"]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE if rank == 0 else None, text=True)
        )
    for process in ranks:
        threading.Thread(target=end_all_after, args=(process, ranks), daemon=True).start()
    found = []
    assert ranks[0].stdout is not None
    alarm = start_alarm(ranks, limit_s)
    for line in ranks[0].stdout:
        if line.startswith("RESULT "):
            alarm.cancel()
            alarm = start_alarm(ranks, limit_s)
            found.append(json.loads(line.removeprefix("RESULT ")))
            keep(found[-1])
            show(found[-1])
        else:
            print(line, end="", flush=True)
    codes = [process.wait() for process in ranks]
    alarm.cancel()
    if any(codes):
        print(f"a rank failed: exit codes {codes}", flush=True)
    return found


def start_alarm(ranks: list[subprocess.Popen[str]], limit_s: float) -> threading.Timer:
    def abort() -> None:
        for process in ranks:
            process.send_signal(signal.SIGABRT)

    alarm = threading.Timer(limit_s, abort)
    alarm.daemon = True
    alarm.start()
    return alarm


def end_all_after(process: subprocess.Popen[str], ranks: list[subprocess.Popen[str]]) -> None:
    """End all ranks after one has failed: the others would wait for it."""
    if process.wait() != 0:
        for other in ranks:
            other.kill()


def show(facts: dict[str, Any]) -> None:
    if "error" in facts:
        print(f"{facts['run']}: {facts['error']}", flush=True)
        return
    if facts["run"] == "T7":
        print(json.dumps(facts, indent=1), flush=True)
        return
    if "profile" in facts:
        show_profile(facts)
        return
    print(
        f"{facts['run']} on {facts['gpus']}: {facts['tokens_per_s_per_gpu']} tokens/s/GPU, "
        f"peak {facts['peak_gib']} GiB "
        f"(reserved {facts['reserved_gib']}), init {facts['init_s']} s, attention {facts['attention']}, "
        f"steps {facts['step_ms']}, loss {facts['losses'][0][0]:.4f} -> {facts['losses'][-1][0]:.4f}",
        flush=True,
    )


def show_profile(facts: dict[str, Any]) -> None:
    found = facts["profile"]
    print(
        f"{facts['run']} on {facts['gpus']}, a step of {found['step_ms']} ms: idle {found['idle_ms']}, "
        f"only communication {found['only_communication_ms']}, {found['kernels']} kernels"
    )
    for kind, entry in found["kinds"].items():
        print(f"    {entry['ms']:9.2f} ms {entry['count']:6d} x  {kind}")
    for at, length, before, behind in found["waits"]:
        print(
            f"    at {at} ms nothing is computed for {length} ms, behind {before or 'the step before'}, before {behind}"
        )
    if facts["run"] in ROWS:
        print(f"    floors: {floors(facts['run'], facts['gpus'])}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="T1, T2, T4, each with variants behind colons")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the model has")
    parser.add_argument(
        "--profile", nargs="*", default=[], metavar="RUN", help="runs to profile after their measurement"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for results and kernel lists")
    parser.add_argument("--limit-s", type=float, default=150.0, help="until each result, the ranks' start included")
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)  # runs that are over
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def add_site(environment: Mapping[str, str] = os.environ) -> None:
    """Add a folder of packages outside of this Python, such as flash-attn-4, with their .pth files."""
    if "STOKER_BENCH_SITE" in environment:
        site.addsitedir(environment["STOKER_BENCH_SITE"])


def main() -> None:
    options = arguments()
    add_site()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.rank:
        work(options)
        return
    facts: dict[str, Any] = {"bench": "trainer_gpu", "torch": torch.__version__, "results": []}
    file = None if options.out is None else options.out / f"trainer_gpu-{options.gpus}-{int(time.time())}.json"

    def keep(found: dict[str, Any]) -> None:
        facts["results"].append(found)
        if file is not None:
            file.write_text(json.dumps(facts))

    over = 0
    while over < len(options.runs):
        found = spawn([*sys.argv, "--skip", str(over)], options.gpus, options.limit_s, keep)
        over += sum("profile" not in one for one in found)
        lost_a_profile = bool(found) and "profile" not in found[-1] and found[-1]["run"] in options.profile
        if over < len(options.runs) and not lost_a_profile:
            reason = f"a rank failed, or there was no result within {options.limit_s:g} s"
            keep({"run": options.runs[over], "error": reason})
            show(facts["results"][-1])
            over += 1
    short = [{key: value for key, value in one.items() if key not in ("losses", "profile")} for one in facts["results"]]
    print(json.dumps({**facts, "results": short}))


if __name__ == "__main__":
    main()
