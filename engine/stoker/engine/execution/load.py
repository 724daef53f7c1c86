"""Load one rank: weights, cache, kernels, graphs.

Called once per rank: by `core.build` or `ranks` in the core's process, by `ranks.worker` in each further one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed import ProcessGroup

from stoker.engine.execution.kernel_cache import bound_kernel_caches
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops, resolve_kernels
from stoker.model.memory import keep_freed_memory
from stoker.model.paged_attend import KVCache
from stoker.model.weights.source import open_weights

Progress = Callable[[str], None]
"""Called with the present part of the loading, in words for people."""
BesideWeights = Callable[
    [EnginePlan, ModelConfig, Ops, torch.device, ProcessGroup | None], AbstractContextManager[None]
]
"""Returns the context in which the weights are read. Work that it starts has ended when the context is left."""


def load_runner(
    plan: EnginePlan,
    group: ProcessGroup | None,
    progress: Progress = lambda _: None,
    beside_weights: BesideWeights = lambda *_: nullcontext(),
) -> Runner:
    """Load one rank's weights and cache onto its device. Sets the process's intra-op threads."""
    torch.set_num_threads(plan.threads)
    keep_freed_memory()
    bound_kernel_caches()
    source = open_weights(plan.model_path, plan.digest)
    ops = Ops(resolve_kernels(plan.kernels, plan.device), plan.deterministic)
    device = torch.device(plan.device, torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
    with beside_weights(plan, source.config, ops, device, group):
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
        timed=plan.timed,
    )
    progress("CapturingGraphs")
    runner.capture_first_graphs(plan.capture_s)
    return runner
