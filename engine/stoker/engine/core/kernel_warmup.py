"""Kernel warm-up: the first steps of an engine on a model of one layer, while the real weights are still being read.

Kernels are compiled at their first call, and libraries load then. Both happen here, so that neither delays the first
token. One layer has all the shapes that many have; its weights are zero.

Called by `core.build` while the executor is made; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.execution.executor import InProcess
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.sampling import SamplingParams
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.group_sums import GroupSums
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache

SEATS, BUDGET, BLOCKS, LENGTH, OUTPUT = 16, 512, 512, 1024, 3
PROMPT_LENGTHS = (1, 5, 48, 300)
"""Lengths that give one row, few rows, whole tiles, and a pass of many rows."""
NUM_REQUESTS = 12
SAMPLINGS = (SamplingParams(seed=0), SamplingParams(seed=0, top_p=0.9), SamplingParams(temperature=0))


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
    plan: EnginePlan, config: ModelConfig, ops: Ops, device: torch.device, sums: GroupSums | None
) -> None:
    """Run prompts of several lengths, every way of sampling, and decode steps of every number of rows.

    The steps are the same on every rank of a group.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    runner = one_layer_runner(plan, config, ops, device, sums)
    scheduler = Scheduler(
        BlockManager(BLOCKS, plan.block_size, prefix_cache=False),
        max_batch_tokens=BUDGET,
        max_requests=SEATS,
        max_queued_requests=SEATS,
    )
    engine = LLMEngine(InProcess(runner), scheduler, ModelLimits(config.vocab_size, runner.max_model_len, ()))
    for length in PROMPT_LENGTHS:
        for number, params in enumerate(SAMPLINGS):
            prompt = [0] * min(length, runner.max_model_len - OUTPUT, BLOCKS * plan.block_size // NUM_REQUESTS)
            engine.add_request(f"{length}-{number}", prompt, replace(params, max_tokens=OUTPUT))
            run_step(engine)
    while engine.has_unfinished:
        run_step(engine)
    runner.warm_up_sizes()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_step(engine: LLMEngine) -> None:
    """Compute one step. Raises RuntimeError where a request failed in it."""
    for _, delta in engine.step():
        if delta.error is not None:
            raise RuntimeError(f"the kernel warm-up failed: {delta.error}")


def one_layer_runner(
    plan: EnginePlan, config: ModelConfig, ops: Ops, device: torch.device, sums: GroupSums | None
) -> Runner:
    small = replace(config, num_layers=1)
    group = None if sums is None else sums.group
    made: Any = {"dtype": plan.dtype, "device": device, "group": group}
    decoder = Decoder(small, ops, expert_runs=plan.expert, copies_kv_heads=True, **made)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
    decoder.requires_grad_(False).eval()
    if sums is not None:
        decoder.defer_sums(sums)
    cache = KVCache(small, num_blocks=BLOCKS, block_size=plan.block_size, dtype=plan.dtype, device=device, group=group)
    return Runner(
        decoder,
        cache,
        num_seats=SEATS,
        max_model_len=min(LENGTH, config.max_position_embeddings),
        max_batch_tokens=BUDGET,
        attention=plan.attention,
        graphs=False,
    )
