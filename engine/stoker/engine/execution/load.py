"""One rank's part of the model, ready to run steps: weights, cache, kernels, graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed import ProcessGroup

from stoker.engine.core.kernel_warmup import rehearsal
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import Plan
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops, resolve_kernels
from stoker.model.memory import keep_freed_memory
from stoker.model.paged_attend import KVCache
from stoker.model.weights.source import open_weights

Progress = Callable[[str], None]
"""Told what is being done, in words for people."""


def load_runner(plan: Plan, group: ProcessGroup | None, progress: Progress = lambda _: None) -> Runner:
    """One rank's weights and cache, on this rank's device. Sets the process's intra-op threads."""
    torch.set_num_threads(plan.threads)
    keep_freed_memory()
    source = open_weights(plan.model_path, plan.digest)
    ops = Ops(resolve_kernels(plan.kernels, plan.device), plan.deterministic)
    device = torch.device(plan.device, torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
    with _rehearsed(plan, source.config, ops, device, group):
        decoder = Decoder(source.config, ops, dtype=plan.dtype, device=device, group=group)
        source.load_into(decoder, lambda done, total: progress(f"LoadingWeights {100 * done // max(total, 1)} %"))
        decoder.requires_grad_(False).eval().pack_weights()
        progress("CompilingKernels")
    progress("AllocatingCache")
    cache = KVCache(
        source.config,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        dtype=plan.dtype,
        device=device,
        group=group,
    )
    runner = Runner(
        decoder,
        cache,
        num_seats=plan.num_seats,
        max_model_len=plan.max_model_len,
        max_batch_tokens=plan.max_batch_tokens,
        attention=plan.attention,
        graphs=plan.graphs,
    )
    progress("CapturingGraphs")
    while runner.warm(first=True):
        pass
    return runner


def _rehearsed(
    plan: Plan, model: ModelConfig, ops: Ops, device: torch.device, group: ProcessGroup | None
) -> AbstractContextManager[None]:
    """Only kernels that are compiled here need it, and only one rank alone can do it."""
    if ops.kernels != "fused" or group is not None:
        return nullcontext()
    return rehearsal(model, ops, dtype=plan.dtype, device=device, block_size=plan.block_size, attention=plan.attention)
