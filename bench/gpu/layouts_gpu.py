"""Layouts of the trainer on 2 or 4 GPUs, measured in the program that users run: rows T5, T6 and T8.

Each run starts the real rank program (configuration, corpus of random tokens, mesh, loop), stops it after `--steps`
and reports tokens/s/GPU, memory and the plan's errors.

    python -m bench.gpu.layouts_gpu data zero3 tensor pipeline --gpus 2 --layers 16 --out DIR
    python -m bench.gpu.layouts_gpu context:Ring context:Ulysses --gpus 2 --profile context:Ring

Rows, all of the Llama-3.1-8B shape with 8,192 tokens a sequence unless named otherwise; N is `--gpus`:

    data       data parallel, ZeRO-1, two micro-batches of one sequence: the baseline
    zero3      the same with ZeRO-3
    tensor     tensor N with sequence parallel, the same tokens in two micro-batches
    mixed      tensor 2 x data N/2
    pipeline   pipeline N, 4 N micro-batches; behind a colon GPipe, OneFOneB, Interleaved (2 stages a rank), ZeroBubble
    context    context N, one sequence of 8,192 N; behind a colon AllGather, Ring, Ulysses
    long       the same with 16,384 N tokens
    experts    Qwen3-30B-A3B shape, experts over N ranks, 2 x 4,096 tokens a GPU
    experts-data   the same without expert parallel

Behind further colons: `full` or `selective` (recompute), an attention (flash, cudnn, stoker), `Tensorwise`, `Rowwise`
(fp8), `offload`, `stageN`. STOKER_BENCH_SITE names a folder with further packages (flash-attn-4).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from bench.gpu.random_model import tokenizer
from bench.gpu.trainer_gpu import LLAMA_8B, add_site, last_step, spawn, summarise
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.messages import Event, PlanEvent, StepEvent, StopCommand
from stoker.trainer.rank.main import leave, open_rank

VOCABULARY = 128256
QWEN3_30B_A3B = {
    "architecture": "qwen3-moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_layers": 24,
    "num_heads": 32,
    "num_kv_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_token": 8,
    "tie_embeddings": False,
}
SCHEDULES = ("GPipe", "OneFOneB", "Interleaved", "ZeroBubble")
METHODS = ("AllGather", "Ring", "Ulysses")
RECIPES = ("Tensorwise", "Rowwise")


@dataclass(frozen=True)
class Layout:
    """One row: the model, the batch of a step, and the fields of `parallelism` and `memory`."""

    sequence: int
    sequences: int
    """Of one step over all GPUs."""
    micro_batch: int
    parallelism: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: {"architecture": "llama", **LLAMA_8B})


def layout(name: str, gpus: int) -> Layout:
    """Return the row of this name on so many GPUs."""
    experts = {"model": QWEN3_30B_A3B}
    rows: dict[str, Layout] = {
        "data": Layout(8192, 2 * gpus, 1),
        "zero3": Layout(8192, 2 * gpus, 1, memory={"zero_stage": 3}),
        "tensor": Layout(8192, 2 * gpus, gpus, {"tensor": gpus, "sequence_parallel": True}),
        "mixed": Layout(8192, 2 * gpus, 2, {"tensor": 2, "sequence_parallel": True}),
        "pipeline": Layout(8192, 4 * gpus, 1, {"pipeline": gpus}),
        "context": Layout(8192 * gpus, 1, 1, {"context": gpus}),
        "long": Layout(16384 * gpus, 1, 1, {"context": gpus}),
        "experts": Layout(4096, 2 * gpus, 2, {"expert": gpus}, **experts),
        "experts-data": Layout(4096, 2 * gpus, 2, **experts),
    }
    return rows[name]


def configuration(name: str, gpus: int, layers: int | None, folder: Path) -> dict[str, Any]:
    """Return the trainer's configuration of a run, `row:variant:...`."""
    row_name, *variants = name.split(":")
    row = layout(row_name, gpus)
    model = {"vocab_size": VOCABULARY, "max_position_embeddings": row.sequence, "rope_theta": 5e5, **row.model}
    fields: dict[str, Any] = {
        "job": {"name": "bench", "uid": "bench", "writer": "00000000"},
        "gang": {"ranks_per_node": gpus},
        "termination_log": str(folder / "termination"),
        "work_dir": str(folder),
        "model": model | ({"num_layers": layers} if layers else {}),
        "parallelism": dict(row.parallelism),
        "training": {
            "total_steps": 1000,
            "global_batch_size": row.sequences,
            "micro_batch_size": row.micro_batch,
            "sequence_length": row.sequence,
        },
        "optimization": {"learning_rate": 1e-4},
        "memory": {"precision": "bf16", **row.memory},
        "data": {
            "sources": [{"name": "random", "path": str(folder / "random.npy"), "format": "tokens"}],
            "tokenizer": {"kind": "path", "path": str(folder / "tokenizer")},
        },
        "checkpoint": {"root": str(folder / "checkpoints")},
    }
    for variant in variants:
        apply_variant(fields, variant)
    return fields


def apply_variant(fields: dict[str, Any], variant: str) -> None:
    if variant in SCHEDULES:
        fields["parallelism"] |= {"pipeline_schedule": variant, "stages_per_rank": 2 if variant == "Interleaved" else 1}
    elif variant in METHODS:
        fields["parallelism"]["context_method"] = variant
    elif variant in RECIPES:
        fields["memory"] |= {"precision": "fp8", "fp8_recipe": variant}
    elif variant in ("full", "selective"):
        fields["memory"]["activation_checkpointing"] = variant
    elif variant == "offload":
        fields["memory"]["cpu_offload"] = True
    elif variant.startswith("stage"):
        fields["memory"]["zero_stage"] = int(variant.removeprefix("stage"))
    else:
        fields["attention"] = variant


def write_corpus(folder: Path, tokens: int = 4 << 20) -> None:
    """Write one document of random tokens, and a tokenizer with a token for each of them."""
    numbers = np.random.default_rng(0).integers(1, VOCABULARY, tokens)
    np.save(folder / "random.npy", numbers.astype(np.uint32))
    (folder / "random.npy.json").write_text(json.dumps({"eos_token_id": 0}))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(tokenizer(VOCABULARY))


class Recorder(RankChannel):
    """A channel without an agent that keeps the steps, profiles two of them, and stops the run after `steps`."""

    def __init__(self, steps: int, profiles: bool) -> None:
        super().__init__(None)
        self.steps: list[StepEvent] = []
        self.plan: PlanEvent | None = None
        self.first_step_at = 0.0
        self._number = steps
        self._profiler = Profile() if profiles else None

    def send(self, event: Event) -> None:
        if isinstance(event, PlanEvent):
            self.plan = event
        if not isinstance(event, StepEvent):
            return
        self.steps.append(event)
        print(f"step {len(self.steps)} of rank {os.environ['RANK']}: {event.step_s:.2f} s", flush=True)
        if len(self.steps) == 1:
            self.first_step_at = time.time()
        if self._profiler is not None and len(self.steps) == self._number:
            self._profiler.__enter__()
        if len(self.steps) == self._number + (3 if self._profiler is not None else 0):
            self.put(StopCommand(mode="cancel", save=False))

    def profile(self) -> dict[str, Any] | None:
        """Return what one profiled step consists of."""
        return None if self._profiler is None else self._profiler.finish()


class Profile:
    """torch's profiler of the device, from its start to the end of the run."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __enter__(self) -> Self:
        self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.__exit__(kind, error, trace)

    def finish(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        self.__exit__(None, None, None)
        return summarise(*last_step(self._profiler.profiler))


def work(options: argparse.Namespace) -> None:
    """Run one rank of one row and print its figures."""
    name = options.runs[0]
    channel = Recorder(options.steps, options.profiles)
    began = time.time()
    rank_options = argparse.Namespace(config=options.config, channel_fd=None, master_listen_fd=None)
    with open_rank(rank_options, os.environ, channel) as loop:
        opened = time.time()
        loop.train()
        profiled = channel.profile()
        if os.environ["RANK"] == "0":
            print("RESULT " + json.dumps(figures(name, options, channel, opened - began, opened)), flush=True)
            if profiled is not None:
                print("RESULT " + json.dumps({"run": name, "gpus": options.gpus, "profile": profiled}), flush=True)
    leave(0)


def figures(name: str, options: argparse.Namespace, channel: Recorder, init_s: float, opened: float) -> dict[str, Any]:
    fields = json.loads(options.config.read_text())
    tokens = fields["training"]["global_batch_size"] * fields["training"]["sequence_length"]
    seconds = [step.step_s for step in channel.steps[: options.steps]]
    half = seconds[len(seconds) // 2 :]
    plan = channel.plan
    return {
        "run": name,
        "gpus": options.gpus,
        "layers": fields["model"]["num_layers"],
        "attention": fields.get("attention", "auto"),
        "tokens_per_s_per_gpu": round(tokens / options.gpus / (sum(half) / len(half)), 1),
        "step_ms": [round(1e3 * value, 1) for value in seconds],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "planned_gib": None if plan is None else round(plan.predicted_bytes / 2**30, 2),
        "memory_error": None if plan is None else plan.memory_error,
        "step_error": None if plan is None else plan.step_error,
        "expert_imbalance": channel.steps[-1].expert_imbalance,
        "init_s": round(init_s, 2),
        "first_step_s": round(channel.first_step_at - opened, 2),
        "losses": [(step.loss, step.grad_norm) for step in channel.steps],
    }


def measure(name: str, options: argparse.Namespace, folder: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """Start the ranks of one row and keep its figures, or the fact that it failed."""
    config = folder / f"{name.replace(':', '-')}.json"
    config.write_text(json.dumps(configuration(name, options.gpus, options.layers, folder)))
    program = ["-m", "bench.gpu.layouts_gpu", name, "--gpus", str(options.gpus), "--steps", str(options.steps)]
    program += ["--config", str(config), *(["--profiles"] if name in options.profile else [])]
    found = spawn(program, options.gpus, options.limit_s, keep)
    if not found:
        keep({"run": name, "gpus": options.gpus, "error": f"a rank failed, or no result in {options.limit_s:g} s"})


class Results:
    """The results so far, in a file that is whole after each of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.facts: dict[str, Any] = {"bench": "layouts_gpu", "torch": torch.__version__, "results": []}
        name = f"layouts_gpu-{options.gpus}-{int(time.time())}.json"
        self._file = None if options.out is None else options.out / name

    def keep(self, found: dict[str, Any]) -> None:
        self.facts["results"].append(found)
        if self._file is not None:
            self._file.write_text(json.dumps(self.facts))
        if "planned_gib" in found:
            line = (
                "{run}: plan {planned_gib} GiB (error {memory_error}), step {step_error}, first step {first_step_s} s"
            )
            print(line.format_map(found), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="rows, each with variants behind colons")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the model has")
    parser.add_argument("--profile", nargs="*", default=[], metavar="RUN", help="runs to profile behind their steps")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--limit-s", type=float, default=90.0, help="until the result of a run")
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--profiles", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main(environment: Mapping[str, str] = os.environ) -> None:
    options = arguments()
    add_site(environment)
    if options.rank:
        work(options)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        results = Results(options)
        for run in options.runs:
            measure(run, options, folder, results.keep)
    print(json.dumps(results.facts))


if __name__ == "__main__":
    main()
