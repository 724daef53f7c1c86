"""Kernel warm-up: the first steps of an engine on a model of one layer, while the real weights are still being read.

Kernels are compiled at their first call, and libraries load then. Both happen here, so that neither delays the first
token. One layer has all the shapes that many have; its weights are zero.

Called by `core.build` while the executor is made; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.execution.executor import Executor, InProcess
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.sampling import SamplingParams
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.group_sums import GroupSums
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache
from stoker.model.paged_prompts import choose_prompts

OUTPUT = 3
"""Tokens of each answer."""


@dataclass(frozen=True)
class WarmupLoad:
    """What a warm-up computes, and in which sizes."""

    requests: tuple[tuple[int, SamplingParams], ...]
    """Length of the prompt and sampling of each."""
    num_seats: int = 16
    max_batch_tokens: int = 512
    num_blocks: int = 512
    max_model_len: int = 1024


SAMPLINGS = (SamplingParams(seed=0), SamplingParams(seed=0, top_p=0.9), SamplingParams(temperature=0))
AT_START = WarmupLoad(tuple((length, params) for length in (1, 5, 48, 300) for params in SAMPLINGS))
"""Lengths that give one row, few rows, whole tiles, and a pass of many rows."""


@contextmanager
def kernel_warmup(
    plan: EnginePlan, config: ModelConfig, ops: Ops, device: torch.device, sums: GroupSums | None = None
) -> Iterator[None]:
    """Compile kernels in a thread while the block runs; its end waits for the thread and raises what went wrong
    there."""
    with ThreadPoolExecutor(1, thread_name_prefix="kernel-warmup") as pool:
        compiled = pool.submit(compile_kernels, plan, config, ops, device, sums)
        yield
        compiled.result()


def warm_up_beside_weights(
    plan: EnginePlan, config: ModelConfig, ops: Ops, device: torch.device, sums: GroupSums | None
) -> AbstractContextManager[None]:
    """The kernel warm-up, on all ranks together; nothing for kernels that are not compiled here."""
    if ops.kernels != "fused":
        return nullcontext()
    return kernel_warmup(plan, config, ops, device, sums)


def compile_kernels(
    plan: EnginePlan,
    config: ModelConfig,
    ops: Ops,
    device: torch.device,
    sums: GroupSums | None,
    load: WarmupLoad = AT_START,
    executor: Callable[[Runner], Executor] = InProcess,
) -> None:
    """Run prompts of several lengths, several ways of sampling, and decode steps of every number of rows.

    The steps are the same on every rank of a group.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    runner = one_layer_runner(plan, config, ops, device, sums, load)
    run_requests(executor(runner), plan, ModelLimits(config.vocab_size, runner.max_model_len, ()), load)
    runner.warm_up_sizes()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_requests(executor: Executor, plan: EnginePlan, limits: ModelLimits, load: WarmupLoad) -> None:
    """Begin one more request with each step, then finish all."""
    scheduler = Scheduler(
        BlockManager(load.num_blocks, plan.block_size, prefix_cache=False),
        max_batch_tokens=load.max_batch_tokens,
        max_requests=load.num_seats,
        max_queued_requests=len(load.requests),
    )
    engine = LLMEngine(executor, scheduler, limits)
    longest = min(limits.max_model_len - OUTPUT, load.num_blocks * plan.block_size // len(load.requests))
    for number, (length, params) in enumerate(load.requests):
        engine.add_request(str(number), [0] * min(length, longest), replace(params, max_tokens=OUTPUT))
        run_step(engine)
    while engine.has_unfinished:
        run_step(engine)


def run_step(engine: LLMEngine) -> None:
    """Compute one step. Raises RuntimeError where a request failed in it."""
    for _, delta in engine.step():
        if delta.error is not None:
            raise RuntimeError(f"the kernel warm-up failed: {delta.error}")


def one_layer_runner(
    plan: EnginePlan, config: ModelConfig, ops: Ops, device: torch.device, sums: GroupSums | None, load: WarmupLoad
) -> Runner:
    positions = min(load.max_model_len, config.max_position_embeddings)
    small = replace(config, num_layers=1, max_position_embeddings=positions)
    group = None if sums is None else sums.group
    made: Any = {"dtype": plan.dtype, "device": device, "group": group}
    made |= {"expert_runs": plan.expert, "experts_on_device": plan.experts_on_device}
    decoder = Decoder(small, ops, copies_kv_heads=True, **made)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
    decoder.requires_grad_(False).eval()
    if sums is not None:
        decoder.defer_sums(sums)
    cache = KVCache(
        small, num_blocks=load.num_blocks, block_size=plan.block_size, dtype=plan.dtype, device=device, group=group
    )
    prompts = choose_prompts(ops, plan.attention, plan.dtype, None)
    return Runner(
        decoder,
        cache,
        num_seats=load.num_seats,
        max_model_len=positions,
        max_batch_tokens=load.max_batch_tokens,
        attention=plan.attention,
        graphs=False,
        # flash-attn-4 attends here for every prompt; our kernel is compiled by the steps of every size
        long_prompts=None if prompts is None else replace(prompts, fewest_pairs=1, ungraphed_pairs=1),
    )
