"""Times of the fused kernels on one GPU against the limits of its memory and tensor cores.

The shapes are those of Llama-3.1-8B and Qwen3-0.6B; `experts` are the layers of Qwen3-30B-A3B with an even router.

`python -m bench.gpu.kernels_gpu --out FOLDER [--only NAME ...] [--limit-s SECONDS]` writes kernels.json and kernels.md
anew after each row; rows that fail or pass their limit are listed with the reason. Each time is that of one call inside
a CUDA graph of many, over inputs that take turns so that none is left in the cache; `limit` is the larger of bytes /
4.4 TB/s and operations / 780 TFLOP/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.row_limit import tried
from stoker.model.kernels.adam import AdamStep
from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.sampling import SampleRows, SamplingTable

BYTES_PER_S = 4.4e12
OPERATIONS_PER_S = 780e12
COLD_BYTES = 160 * 2**20
"""Least total size of the inputs that take turns."""
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that the kernels depend on."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    has_norm: bool

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of a layer's products and of the head."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
            "head": (self.vocab, self.hidden),
        }


SHAPES = (
    Shape("8B", 4096, 14336, 32, 8, 128, 128256, False),
    Shape("0.6B", 1024, 3072, 16, 8, 128, 151936, True),
)


@dataclass(frozen=True)
class Work:
    """One kernel on one shape: `make` gives a call on fresh inputs."""

    kernel: str
    shape: str
    num_bytes: float
    operations: float
    make: Callable[[], Callable[[], object]]
    turns: int = 1


@dataclass(frozen=True)
class Time:
    kernel: str
    shape: str
    limit_us: float
    reached_us: float
    twin_us: float | None
    """Time of torch, where that is not the same kernel."""
    share: float
    """limit / reached"""


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def turns_for(num_bytes: float) -> int:
    return max(1, min(32, math.ceil(COLD_BYTES / max(num_bytes, 1))))


def time_us(make: Callable[[], Callable[[], object]], turns: int) -> float:
    """Return the median over replays of a graph that calls each of `turns` copies once or more."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # backward runs on the stream of its forward
        calls = [make() for _ in range(turns)]
    return graph_us(calls, stream, rounds=max(1, 16 // turns))


def graph_us(calls: Sequence[Callable[[], object]], stream: torch.cuda.Stream, rounds: int = 1) -> float:
    """Return the median over replays of a graph of all calls, of one call."""
    with torch.cuda.stream(stream):
        for call in calls[:2] * 2:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    return replay_us(graph) / (rounds * len(calls))


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[2:])


# The measured kernels.


def forward_works(shape: Shape, tokens: int, ops: Ops) -> Iterator[Work]:
    """Yield the kernels of one layer without gradient."""
    hidden, ffn, name = shape.hidden, shape.ffn, f"{shape.name} T={tokens}"
    num_bytes = 2 * 4 * tokens * hidden

    def norm() -> Callable[[], object]:
        x, residual, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
        return lambda: ops.add_rms_norm(x, residual, weight, 1e-5)

    yield Work("add_rms_norm", name, num_bytes, 0, norm, turns_for(num_bytes))

    def glu() -> Callable[[], object]:
        gate_up = random(tokens, 2 * ffn)
        return lambda: ops.swiglu(gate_up)

    yield Work("swiglu", name, 2 * 3 * tokens * ffn, 0, glu, turns_for(2 * 3 * tokens * ffn))
    yield rotate_work(shape, tokens, ops, name)


@dataclass(frozen=True)
class Pass:
    slots: Tensor
    slot_rows: Tensor
    num_tokens: int


def rotate_work(shape: Shape, tokens: int, ops: Ops, name: str) -> Work:
    num_bytes = 2 * 2 * tokens * shape.qkv + 8 * tokens * shape.head_dim
    blocks = tokens // 16 + 1

    def make() -> Callable[[], object]:
        qkv = random(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        cos, sin = (random(tokens, 1, shape.head_dim, dtype=torch.float32) for _ in range(2))
        norms = [random(shape.head_dim) if shape.has_norm else None for _ in range(2)]
        cache = torch.zeros(blocks, 2, 2, 16, shape.kv_heads, shape.head_dim, dtype=BF16, device="cuda")
        slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
        layer = 1
        block, offset = slots.long() // 16, slots.long() % 16
        rows = [((block * 2 + index) * 2 + kind) * 16 + offset for index in range(2) for kind in range(2)]
        sequences = Pass(slots, torch.cat(rows).view(2, -1), tokens)
        rotation = Rotation(cos, sin, *norms, 1e-6)
        into = CacheLayer(cache, layer, sequences)  # type: ignore[arg-type]
        return lambda: ops.rotate_and_write(q, k, v, rotation, into)

    return Work("rotate_and_write", name, num_bytes, 0, make, turns_for(num_bytes))


def product_works(shape: Shape, tokens: int, ops: Ops) -> Iterator[Work]:
    for product, (outputs, depth) in shape.products.items():
        if product == "head" and tokens > 256:
            continue
        num_bytes = 2 * (outputs * depth + tokens * (outputs + depth))
        turns = turns_for(num_bytes)

        def make(outputs: int = outputs, depth: int = depth) -> Callable[[], object]:
            x, weight = random(tokens, depth), random(outputs, depth)
            return lambda: ops.linear(x, weight)

        kernel = f"linear {product}" + (" deterministic" if ops.deterministic else "")
        yield Work(kernel, f"{shape.name} T={tokens}", num_bytes, 2.0 * tokens * outputs * depth, make, turns)


def sampler_works(shape: Shape, rows: int, ops: Ops) -> Iterator[Work]:
    """Yield the sampler's kernels on float32 logits, as the output layer gives them on a GPU.

    Both kinds of logits come with limits.
    """
    numbers = {
        "greedy": (0.0, 1, 0, 0, 0, 0, 1),
        "temperature": (0.6, 1, 0, 0, 0, 0, 1),
        "top-k 50": (1.0, 1, 50, 0, 0, 0, 1),
        "top-p 0.9": (1.0, 0.9, 0, 0, 0, 0, 1),
        "top-k 50, top-p 0.9": (1.0, 0.9, 50, 0, 0, 0, 1),
    }
    num_bytes = 4 * rows * shape.vocab
    for (name, values), peaked in itertools.product(numbers.items(), (False, True)):
        if peaked and "top" not in name:
            continue

        def make(name: str = name, values: tuple[float, ...] = values, peaked: bool = peaked) -> Callable[[], object]:
            logits = peaked_logits(rows, shape.vocab) if peaked else random(rows, shape.vocab, dtype=torch.float32) * 3
            table = SamplingTable(
                torch.tensor([values] * rows, device="cuda", dtype=torch.float32),
                torch.ones(rows, 2, dtype=torch.int64, device="cuda"),
            )
            places = torch.arange(rows, dtype=torch.int32, device="cuda")
            seats = SampleRows(places, places, "top" in name)
            return lambda: ops.sample(logits, seats, table)

        kind = "" if "top" not in name else ", peaked" if peaked else ", flat"
        yield Work(f"sample {name}{kind}", f"{shape.name} B={rows}", num_bytes, 0, make, turns_for(num_bytes))


def peaked_logits(rows: int, vocab: int) -> Tensor:
    """Return logits like a language model's: probabilities fall with the power 1.5 of the rank, in random places.

    Their entropy is 3.2 nats.

    The others are nearly flat.
    """
    order = torch.rand(rows, vocab, device="cuda").argsort(1)
    ranks = torch.arange(1, vocab + 1, device="cuda", dtype=torch.float32)
    return (-1.5 * ranks.log()).expand(rows, -1).gather(1, order)


def backward(forward: Callable[[], tuple[Tensor, list[Tensor]]]) -> Callable[[], object]:
    """Return the gradient alone: the forward pass runs once."""
    output, leaves = forward()
    grad = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True)


def training_works(shape: Shape, tokens: int, ops: Ops) -> Iterator[Work]:
    name, hidden, ffn = f"{shape.name} T={tokens}", shape.hidden, shape.ffn

    def norm() -> Callable[[], object]:
        leaves = [random(tokens, hidden).requires_grad_(), random(tokens, hidden).requires_grad_()]
        weight = random(hidden).requires_grad_()
        outputs = ops.add_rms_norm(*leaves, weight, 1e-5)
        grads = [random(tokens, hidden), random(tokens, hidden)]
        return lambda: torch.autograd.grad(outputs, [*leaves, weight], grads, retain_graph=True)

    yield Work("add_rms_norm backward", name, 2 * 4 * tokens * hidden, 0, norm, 2)

    def glu() -> tuple[Tensor, list[Tensor]]:
        gate_up = random(tokens, 2 * ffn).requires_grad_()
        return ops.swiglu(gate_up), [gate_up]

    yield Work("swiglu backward", name, 2 * 5 * tokens * ffn, 0, lambda: backward(glu), 2)
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim * tokens

    def turned() -> Callable[[], object]:
        qkv = random(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim).requires_grad_()
        q, k, _ = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        cos, sin = (random(tokens, 1, shape.head_dim, dtype=torch.float32) for _ in range(2))
        norms = [random(shape.head_dim).requires_grad_() if shape.has_norm else None for _ in range(2)]
        outputs = ops.rotate(q, k, Rotation(cos, sin, *norms, 1e-6))
        grads = [torch.randn_like(output) for output in outputs]
        leaves = [leaf for leaf in (q, k, *norms) if leaf is not None]
        return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    yield Work("rotate backward", name, 2 * rotated * (3 if shape.has_norm else 2), 0, turned, 2)
    yield loss_work(shape, tokens, ops, name)


def loss_work(shape: Shape, tokens: int, ops: Ops, name: str) -> Work:
    """Return the loss: three products.

    The logits are written once and read twice, their gradient written once and read twice.
    """

    def make() -> Callable[[], object]:
        hidden, table = random(tokens, shape.hidden).requires_grad_(), random(shape.vocab, shape.hidden)
        table = (table * 0.02).requires_grad_()
        targets, weights = torch.randint(shape.vocab, (tokens,)), torch.ones(tokens)
        places = targets.pin_memory(), weights.pin_memory()
        return lambda: ops.cross_entropy(hidden, table, *places).loss_sum.backward()  # type: ignore[no-untyped-call]

    operations = 6.0 * tokens * shape.hidden * shape.vocab
    return Work("cross_entropy forward + backward", name, 0, operations, make)


def optimizer_works(ops: Ops) -> Iterator[Work]:
    size = 256 * 2**20
    rule = AdamStep(
        decoupled=True,
        learning_rate=1e-4,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        decay_end=size,
        step=7,
    )

    def adam() -> Callable[[], object]:
        state = [torch.rand(size, device="cuda") for _ in range(4)]
        cast, scale = torch.empty(size, dtype=BF16, device="cuda"), torch.ones((), device="cuda")
        return lambda: ops.adam_(*state, cast, rule, scale)

    def squares() -> Callable[[], object]:
        flat = torch.rand(size, device="cuda")
        return lambda: ops.sum_of_squares(flat)

    def lines() -> Callable[[], object]:
        flat = torch.rand(size, device="cuda")
        return lambda: ops.line_squares(flat, 1024)

    name = "256 Mi elements"
    yield Work("adam_", name, 30.0 * size, 0, adam)
    yield Work("sum_of_squares", name, 4.0 * size, 0, squares)
    yield Work("line_squares", name, 4.0 * size, 0, lines)


def expert_works(ops: Ops) -> Iterator[Work]:
    """Yield a whole layer of experts, choice and order included; the bytes are those of the experts that are chosen."""
    experts, choices, hidden, width = 128, 8, 2048, 768
    for tokens in (1, 8, 32, 256, 2048, 16384):
        distinct = experts * (1 - (1 - choices / experts) ** tokens)
        operations = 6.0 * tokens * choices * hidden * width

        def make(tokens: int = tokens) -> Callable[[], object]:
            router, gate_up = random(experts, hidden), random(experts * 2 * width, hidden)
            down = random(experts * hidden, width)
            weights, x = ExpertWeights(router, gate_up, down, choices, True), random(tokens, hidden)
            return lambda: ops.experts(x, weights)

        yield Work("experts", f"30B-A3B T={tokens}", 6 * distinct * hidden * width, operations, make, 4)


def works(ops: Ops) -> Iterator[Work]:
    for shape in SHAPES:
        for tokens in (1, 32, 256, 8192):
            if not ops.deterministic:
                yield from forward_works(shape, tokens, ops)
            yield from product_works(shape, tokens, ops)
        if ops.deterministic:
            continue
        yield from (work for rows in (1, 32, 256) for work in sampler_works(shape, rows, ops))
        yield from training_works(shape, 8192, ops)
    if not ops.deterministic:
        yield from expert_works(ops)
        yield from optimizer_works(ops)


UNCAPTURED = ("cross_entropy",)
"""Kernels timed by events, because they wait for the host or hold autograd's own streams."""
TWINLESS = ("sample", "cross_entropy", "adam_", "experts")
"""Kernels without a time of torch's own, which waits for the device or does not fit."""


def eager_us(make: Callable[[], Callable[[], object]]) -> float:
    call = make()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[2:])


def measure(work: Work, twin: Work | None) -> Time:
    limit = 1e6 * max(work.num_bytes / BYTES_PER_S, work.operations / OPERATIONS_PER_S)
    timer = (lambda w: eager_us(w.make)) if work.kernel.startswith(UNCAPTURED) else (lambda w: time_us(w.make, w.turns))
    grad = "backward" in work.kernel
    with torch.set_grad_enabled(grad):
        reached = timer(work)
        torch.cuda.empty_cache()
        try:
            twin_us = None if twin is None or work.kernel.startswith(TWINLESS) else timer(twin)
        except (RuntimeError, TypeError):  # torch's way cannot be captured
            torch.cuda.synchronize()
            twin_us = None
        torch.cuda.empty_cache()
    return Time(work.kernel, work.shape, limit, reached, twin_us, limit / reached)


def markdown(times: list[Time]) -> str:
    lines = ["| kernel | shape | limit us | reached us | of the limit | torch us |", "|---|---|---|---|---|---|"]
    for time in times:
        twin = "-" if time.twin_us is None else f"{time.twin_us:.1f}"
        lines.append(
            f"| {time.kernel} | {time.shape} | {time.limit_us:.1f} | {time.reached_us:.1f} "
            f"| {100 * time.share:.0f} % | {twin} |"
        )
    return "\n".join(lines) + "\n"


def write(out: Path, times: list[Time], failed: dict[str, str]) -> None:
    (out / "kernels.json").write_text(json.dumps([asdict(time) for time in times], indent=1))
    lines = "".join(f"\n{name}: {reason}\n" for name, reason in failed.items())
    (out / "kernels.md").write_text(markdown(times) + lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="kernels whose names begin with one of these")
    parser.add_argument("--limit-s", type=float, default=20.0, help="of one row, its compilation included")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    times: list[Time] = []
    failed: dict[str, str] = {}
    for ops in (Ops("fused"), Ops("fused", deterministic=True)):
        twins = {(work.kernel.removesuffix(" deterministic"), work.shape): work for work in works(Ops())}
        for work in works(ops):
            if arguments.only and not work.kernel.startswith(tuple(arguments.only)):
                continue
            twin = twins.get((work.kernel.removesuffix(" deterministic"), work.shape))
            time = tried(lambda work=work, twin=twin: measure(work, twin), arguments.limit_s)  # type: ignore[misc]
            print(time, flush=True)
            if isinstance(time, Time):
                times.append(time)
            else:
                failed[f"{work.kernel} {work.shape}"] = time
            write(arguments.out, times, failed)


if __name__ == "__main__":
    main()
