"""Load one rank: weights, cache, kernels, graphs.

Called once per rank: by `core.build` or `ranks` in the core's process, by `ranks.worker` in each further one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed import ProcessGroup

from stoker.engine.execution.kernel_cache import bound_kernel_caches
from stoker.engine.execution.pass_shape import PassShape, all_output_rows
from stoker.engine.execution.peer_sums import group_sums
from stoker.engine.execution.rank_place import RankPlace, place_of
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.stage_links import StageLinks
from stoker.engine.plan import EnginePlan
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.expert_peers import ExpertCut, ExpertPeers
from stoker.model.group_sums import GroupSums
from stoker.model.kernels.ahead.look_up import look_up_shipped_kernels
from stoker.model.kernels.kernel_set import resolve_kernels
from stoker.model.kernels.ops import Ops
from stoker.model.memory import keep_freed_memory
from stoker.model.paged_attend import KVCache
from stoker.model.weights.source import open_weights

log = logging.getLogger("stoker.engine")

LoadRunner = Callable[..., Runner]
"""`load_runner`, or what makes the same runner without a folder of weights."""
Progress = Callable[[str], None]
"""Called with the present part of the loading, in words for people."""
BesideWeights = Callable[[EnginePlan, ModelConfig, Ops, torch.device, GroupSums | None], AbstractContextManager[None]]
"""Returns the context in which the weights are read. Work that it starts has ended when the context is left."""


def load_runner(
    plan: EnginePlan,
    group: ProcessGroup | None,
    progress: Progress = lambda _: None,
    beside_weights: BesideWeights = lambda *_: nullcontext(),
    peers: ExpertPeers | None = None,
) -> Runner:
    """Load one rank's weights and cache onto its device. Sets the process's intra-op threads.

    `group`: all ranks of the model. Several ranks capture graphs later, together: `ranks` chooses the shapes.
    `peers`: data-parallel ranks that have the other experts.
    """
    torch.set_num_threads(plan.threads)
    keep_freed_memory()
    bound_kernel_caches()
    source = open_weights(plan.model_path, plan.digest)
    ops = Ops(resolve_kernels(plan.kernels, plan.device), plan.deterministic)
    device = torch.device(plan.device, torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
    lookups = look_up_shipped_kernels(ops.kernels, device)
    place = place_of(plan, source.config, group, device)
    sums = group_sums(plan, source.config, ops, place.tensor)
    with beside_weights(plan, source.config, ops, device, sums):
        decoder = make_decoder(plan, source.config, ops, device, place, peers)
        source.load_into(decoder, lambda done, total: progress(f"LoadingWeights {100 * done // max(total, 1)} %"))
        load_output_kernels(decoder, plan.num_seats)
        progress("CompilingKernels")
    progress("AllocatingCache")
    runner = make_runner(plan, decoder, sums, place.links)
    if group is None:
        progress("CapturingGraphs")
        capture_first(runner, plan.capture_s, runner.capture)
    if lookups is not None:
        log.info("kernels at the start: %s", lookups.describe())
    return runner


def make_decoder(
    plan: EnginePlan,
    config: ModelConfig,
    ops: Ops,
    device: torch.device,
    place: RankPlace,
    peers: ExpertPeers | None = None,
) -> Decoder:
    """Make a rank's part of the model, without numbers yet."""
    decoder = Decoder(
        config,
        ops,
        dtype=plan.dtype,
        device=device,
        group=place.tensor,
        expert_runs=plan.expert,
        expert_cut=ExpertCut(peers.rank, peers.size) if peers is not None else None,
        experts_on_device=plan.experts_on_device,
        layers=place.layers,
        copies_kv_heads=True,
    )
    if peers is not None:
        decoder.share_experts(peers)
    return decoder


def make_runner(plan: EnginePlan, decoder: Decoder, sums: GroupSums | None, links: StageLinks | None = None) -> Runner:
    """Make the cache of a loaded model and its runner. Packs the weights.

    `sums`: of the ranks that share each layer; `links`: to a pipeline's other stages.
    """
    decoder.requires_grad_(False).eval().pack_weights()
    if sums is not None:
        decoder.defer_sums(sums)
    cache = KVCache(
        decoder.config,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        dtype=plan.dtype,
        device=next(decoder.parameters()).device,
        group=decoder.group,
        layers=decoder.layers,
    )
    return Runner(
        decoder,
        cache,
        num_seats=plan.num_seats,
        max_model_len=plan.max_model_len,
        max_batch_tokens=plan.max_batch_tokens,
        attention=plan.attention,
        graphs=plan.graphs,
        sums=sums,
        links=links,
    )


@torch.inference_mode()
def load_output_kernels(decoder: Decoder, num_seats: int) -> None:
    """Compute a rank's part of the output layer once for every number of rows that steps outside of graphs have; and
    make the rotary table. All beside the kernel warm-up, which usually takes longer than the weights.

    cuBLAS loads a kernel at its first use, which waits until the device is idle: in a busy server for one or two steps.
    Samples beside prompts have no graph. Nothing is exchanged, because the warm-up exchanges beside it.
    """
    if decoder.ops.kernels != "fused":
        return
    device = next(decoder.parameters()).device
    decoder.rope.on(device)
    if not decoder.is_last:
        return
    numbers = all_output_rows(num_seats)
    hidden_PD = torch.zeros(numbers[0], decoder.config.hidden_size, dtype=decoder.head.weight.dtype, device=device)
    for rows in numbers:
        decoder.head.part_logits(hidden_PD[:rows])


def capture_first(
    runner: Runner,
    seconds: float,
    capture: Callable[[PassShape], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Call `capture` for the shapes that are always captured before the first request, then for others for so many
    seconds."""
    until_s = clock() + seconds
    while (shape := runner.next_capture(first=True)) is not None:
        capture(shape)
    while clock() < until_s and (shape := runner.next_capture()) is not None:
        capture(shape)
