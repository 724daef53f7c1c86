"""What each technique of the engine gains: the same requests with it off and on, in one table.

Both engines stand side by side and take turns, so that a change of the machine's speed meets both; the best round of
each counts. Every technique has the load that it is for. Greedy tokens of both sides must be the same unless the
technique rounds otherwise. Techniques that this machine cannot run are named with the reason.

    make model                                              # once: brings the weights
    python -m bench.techniques                              # SmolLM2-135M; about 5 minutes on two cores
    python -m bench.techniques prefix-cache overlap         # some of them
    python -m bench.techniques --device cuda --model FOLDER

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from stoker.engine.config import EngineConfig
from stoker.engine.llm import LLM
from stoker.engine.sampling import SamplingParams
from stoker.pod.config_file import parse

FOLDER = Path(os.environ.get("STOKER_CACHE", Path.home() / ".cache/stoker")) / "models/smollm2-135m-instruct"
Settings = Mapping[str, Any]
"""Sections of an engine's configuration."""
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """One request of a load."""

    prompt: Tokens
    output: int
    after_step: int = 0
    """Steps of the engine after which it comes."""


@dataclass(frozen=True)
class Figures:
    """What one round measured."""

    tokens_per_s: float
    first_token_ms: float
    """Median over the requests."""
    gap_ms: float
    """The longest time between two tokens of a request."""
    outputs: tuple[Tokens, ...] = field(repr=False)


@dataclass(frozen=True)
class Technique:
    """One technique: what turns it off and on, and the load that it is for."""

    name: str
    load: Callable[[Prompts], Sequence[Ask]]
    off: Settings
    on: Settings
    figure: str = "tokens_per_s"
    """The figure of `Figures` that it is for."""
    exact: bool = True
    """Whether the tokens do not change."""
    needs: Callable[[Machine], str] = lambda _: ""
    """Why a machine cannot run it; empty where it can."""


@dataclass(frozen=True)
class Machine:
    device: str
    gpus: int


class Prompts:
    """Prompts of random tokens, the same for every engine."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._draw, self._vocab_size = random.Random(seed), vocab_size

    def of(self, length: int, beginning: Tokens = ()) -> Tokens:
        """A prompt of `length` tokens behind a beginning."""
        low = min(100, self._vocab_size // 2)
        return (*beginning, *(self._draw.randrange(low, self._vocab_size) for _ in range(length)))


def many_streams(prompts: Prompts) -> Sequence[Ask]:
    return [Ask(prompts.of(32), 24) for _ in range(8)]


def one_stream(prompts: Prompts) -> Sequence[Ask]:
    return [Ask(prompts.of(32), 32)]


def shared_beginning(prompts: Prompts) -> Sequence[Ask]:
    beginning = prompts.of(384)
    return [Ask(prompts.of(16, beginning), 4, after_step=6 * number) for number in range(8)]


def long_prompts_between(prompts: Prompts) -> Sequence[Ask]:
    """Streams that run while long prompts come."""
    streams = [Ask(prompts.of(16), 48) for _ in range(4)]
    return [*streams, *(Ask(prompts.of(768), 2, after_step=after) for after in (8, 24))]


def conversations_that_come_back(prompts: Prompts) -> Sequence[Ask]:
    """Six long prompts and their next turns: more than the cache of the device holds."""
    turns = [prompts.of(256) for _ in range(6)]
    first = [Ask(turn, 2, after_step=6 * number) for number, turn in enumerate(turns)]
    return [*first, *(Ask(prompts.of(16, turn), 2, after_step=36 + 6 * n) for n, turn in enumerate(turns))]


def more_than_fits(prompts: Prompts) -> Sequence[Ask]:
    """Streams whose blocks do not all fit at once, so that some are preempted."""
    return [Ask(prompts.of(96), 64) for _ in range(6)]


SMALL = {"num_blocks": 48, "block_size": 16}
HOST = 256 << 20
TECHNIQUES = (
    Technique("continuous-batching", many_streams, {"scheduler": {"max_requests": 1}}, {}, exact=False),
    Technique(
        "prefix-cache", shared_beginning, {"cache": {"prefix_cache": False}}, {}, figure="first_token_ms", exact=False
    ),
    Technique(
        "chunked-prefill", long_prompts_between, {"scheduler": {"mixed_tokens": 2048}},
        {"scheduler": {"mixed_tokens": 64}}, figure="gap_ms", exact=False,
    ),
    Technique("overlap", many_streams, {"scheduler": {"overlap": False}}, {"scheduler": {"overlap": True}}),
    Technique("fused-kernels", many_streams, {"kernels": "reference"}, {"kernels": "auto"}, exact=False),
    Technique(
        "bfloat16", one_stream, {"model": {"dtype": "float32"}}, {"model": {"dtype": "bfloat16"}}, exact=False
    ),
    Technique(
        "host-tier", conversations_that_come_back, {"cache": SMALL},
        {"cache": {**SMALL, "host_memory_bytes": HOST}}, figure="first_token_ms", exact=False,
    ),
    Technique(
        "swap", more_than_fits, {"cache": {**SMALL, "host_memory_bytes": HOST, "preemption": "recompute"}},
        {"cache": {**SMALL, "host_memory_bytes": HOST, "preemption": "swap"}}, exact=False,
    ),
    Technique(
        "tensor-parallel", many_streams, {}, {"parallelism": {"tensor": 2}}, exact=False,
        needs=lambda machine: "" if machine.device == "cpu" or machine.gpus > 1 else "needs two GPUs",
    ),
    Technique(
        "graphs", one_stream, {"graphs": False}, {"graphs": True},
        needs=lambda machine: "" if machine.device == "cuda" else "needs a GPU",
    ),
)  # fmt: skip
ELSEWHERE = {
    "prefill and decode apart": "bench.gpu.pd_gpu, on two GPUs of one host",
    "copies of the model (data parallel)": "bench.router_load; each copy is a process of its own",
    "experts over ranks": "bench.gpu.engine_ranks_gpu; needs a model with experts",
    "speculative decoding": "the engine has none",
    "quantised weights": "the engine has none",
}
"""Techniques without a row, and where they are measured or why they are not."""


def measure(llm: LLM, asks: Sequence[Ask], clock: Callable[[], float] = time.perf_counter) -> Figures:
    """Send a load and time its tokens. Raises RuntimeError where a request fails."""
    engine = llm.engine
    waiting = sorted(enumerate(asks), key=lambda one: one[1].after_step)
    begun: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    outputs: dict[str, Tokens] = {}
    start_s, steps = clock(), 0
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][1].after_step <= steps or not engine.has_unfinished):
            number, ask = waiting.pop(0)
            name = str(number)
            begun[name], times[name], outputs[name] = clock(), [], ()
            params = SamplingParams(temperature=0, max_tokens=ask.output, ignore_eos=True)
            engine.add_request(name, ask.prompt, params)
        for _, delta in engine.step():
            if delta.error is not None:
                raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
            times[delta.request_id] += [clock()] * bool(delta.tokens)
            outputs[delta.request_id] += delta.tokens
        steps += 1
    gaps = [later - earlier for one in times.values() for earlier, later in pairwise(one)]
    return Figures(
        sum(map(len, outputs.values())) / (clock() - start_s),
        1000 * statistics.median(one[0] - begun[name] for name, one in times.items()),
        1000 * max(gaps, default=0.0),
        tuple(outputs[str(number)] for number in range(len(asks))),
    )


Measure = Callable[[LLM, Sequence[Ask]], Figures]


def compared(technique: Technique, base: Settings, rounds: int, measured: Measure = measure) -> dict[str, Any]:
    """The figure of a technique off and on, and its gain: above 1 is better on. Raises RuntimeError on other tokens."""
    with ExitStack() as stack:
        sides = {
            side: stack.enter_context(LLM(parse(EngineConfig, joined(base, settings))))
            for side, settings in (("off", technique.off), ("on", technique.on))
        }
        found: dict[str, list[Figures]] = {side: [] for side in sides}
        for number in range(rounds + 1):  # the first one warms up
            for side, llm in sides.items():
                asks = technique.load(Prompts(llm.engine.limits.vocab_size, number))
                found[side].append(measured(llm, asks))
    if technique.exact and any(a.outputs != b.outputs for a, b in zip(found["off"], found["on"], strict=True)):
        raise RuntimeError(f"{technique.name}: the tokens differ, and should not")
    higher = technique.figure == "tokens_per_s"
    off, on = (
        (max if higher else min)(getattr(one, technique.figure) for one in found[side][1:]) for side in ("off", "on")
    )
    gain = on / off if higher else off / on
    return {"figure": technique.figure, "off": round(off, 1), "on": round(on, 1), "gain": round(gain, 2)}


def joined(one: Settings, other: Settings) -> dict[str, Any]:
    """Two configurations as one; the second's values count."""
    both = {**one, **other}
    for name, value in other.items():
        if isinstance(value, Mapping):
            both[name] = joined(one.get(name) or {}, value)
    return both


def rows(chosen: Sequence[Technique], base: Settings, machine: Machine, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each technique; one that cannot run here has its reason."""
    for technique in chosen:
        why = technique.needs(machine)
        yield {"technique": technique.name, **({"why_not": why} if why else compared(technique, base, rounds))}


def line(row: Mapping[str, Any]) -> str:
    """One row of the table."""
    if "why_not" in row:
        return f"{row['technique']:22} {row['why_not']}"
    figure = row["figure"].replace("_per_s", "/s").replace("_ms", ", ms").replace("_", " ")
    return f"{row['technique']:22} {figure:18} {row['off']:>10} {row['on']:>10} {row['gain']:>7.2f} x"


def main() -> None:
    arguments = parse_arguments()
    chosen = [one for one in TECHNIQUES if not arguments.names or one.name in arguments.names]
    machine = Machine(arguments.device, gpus_of(arguments.device))
    base = {
        "model": {"path": str(arguments.model)},
        "device": arguments.device,
        "threads": arguments.threads,
        "cache": {"num_blocks": 400, "block_size": 16},
        "scheduler": {"max_requests": 16},
    }
    print(f"{'technique':22} {'figure':18} {'off':>10} {'on':>10} {'gain':>9}")
    found = []
    for row in rows(chosen, base, machine, arguments.rounds):
        found.append(row)
        print(line(row), flush=True)
    for name, where in ELSEWHERE.items():
        print(f"not here: {name}: {where}")
    print(json.dumps({"model": arguments.model.name, "device": arguments.device, "techniques": found}))


def gpus_of(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "cuda" else 0


def parse_arguments() -> argparse.Namespace:
    names = [one.name for one in TECHNIQUES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TECHNIQUE", help=f"default all: {', '.join(names)}")
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="threads on the CPU (default: its cores)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(names)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    return arguments


if __name__ == "__main__":
    main()
