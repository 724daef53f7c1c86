"""Makes the state of one rank under ZeRO from its model: buckets, optimizer, and where the state is kept.

Called by `build` once; `Zero` owns what is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.lora import adapter_parts
from stoker.model.parameter import Part
from stoker.pod.plan.memory import OFFLOAD_PIECE
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.bucket import EVERY_UNIT, Bucket, Decays, Reduction, make_buckets
from stoker.trainer.rank.bucket_state import DiskPlace, ZeroSettings
from stoker.trainer.rank.clip import GradientNorm
from stoker.trainer.rank.copy_queues import queues_of
from stoker.trainer.rank.disk_update import DiskUpdate
from stoker.trainer.rank.fp8_weights import use_fp8
from stoker.trainer.rank.frozen import Fill
from stoker.trainer.rank.initial_weights import whole_of
from stoker.trainer.rank.kernel_choice import DTYPES
from stoker.trainer.rank.lamb import Lamb, sum_over_holders, tensor_sizes
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.offload import OffloadedUpdate
from stoker.trainer.rank.offloaded_lamb import CurrentPass, OffloadedLamb
from stoker.trainer.rank.optimizer import Adam, Optimizer
from stoker.trainer.rank.pipeline.slices import Model, all_parts, slices_of
from stoker.trainer.rank.pipeline.tied_table import TiedTable
from stoker.trainer.rank.state_file import StateFile
from stoker.trainer.rank.weight_decay import decay_by_name
from stoker.trainer.rank.zero import Zero


def make_zero(
    config: TrainerConfig,
    model: Model,
    mesh: Mesh,
    device: torch.device,
    fill: Fill | None = None,
) -> Zero:
    """Move the model's parameters into flat buckets: embedding, one per block, and the head.

    `fill` writes the initial values of an empty model.
    """
    buckets = make_rank_buckets(config, model, mesh, device)
    settings = zero_settings(config, mesh, buckets)
    zero = Zero(
        buckets,
        mesh,
        make_optimizer(config, model.ops, all_parts(model), mesh, buckets, settings.disk),
        GradientNorm(model.ops, by_line=settings.any_data_parallel),
        settings,
        fill=fill,
        used_once=[bucket.name for bucket in buckets if bucket.unit.startswith(("blocks.", "head", "table copy"))],
    )
    for decoder in slices_of(model).values():
        use_fp8(config, decoder)
    if model.config.tie_embeddings and mesh.pipeline is not None:
        tables = [state for state in zero.states if state.bucket.unit in ("embedding", "table copy")]
        zero.ties = [TiedTable(state, mesh.pipeline) for state in tables]
    return zero


def make_rank_buckets(config: TrainerConfig, model: Model, mesh: Mesh, device: torch.device) -> list[Bucket]:
    """Return the buckets of all that a rank holds, stage by stage."""
    splits = mesh.dims.pipeline > 1 and config.parallelism.pipeline_schedule == "ZeroBubble"
    decays = decay_by_name(all_parts(model), config.optimization.no_decay, whole_names(model))
    return [
        bucket
        for stage, decoder in slices_of(model).items()
        for bucket in stage_buckets(stage, decoder, mesh, device, decays, splits=splits)
    ]


def zero_settings(config: TrainerConfig, mesh: Mesh, buckets: Sequence[Bucket]) -> ZeroSettings:
    """Return how the state is held; opens the file of a state that is offloaded into one."""
    nvme = config.memory.nvme_offload
    disk = DiskPlace(StateFile(nvme.path, mesh.rank), offload_piece(config, buckets)) if nvme is not None else None
    return ZeroSettings(
        stage=config.memory.zero_stage,
        compute_dtype=DTYPES[config.memory.precision],
        any_data_parallel=config.training.any_data_parallel,
        offload=config.memory.cpu_offload or disk is not None,
        disk=disk,
    )


def stage_buckets(
    stage: int, decoder: Decoder, mesh: Mesh, device: torch.device, decays: Decays, *, splits: bool
) -> Iterator[Bucket]:
    """Yield the buckets of one pipeline stage. Its units are `embedding`, `blocks.5` (by layer), `head`, `table copy`.

    The copy of a tied table has a bucket of its own, laid out like that of the original.
    """
    units: dict[str, nn.Module] = {} if decoder.embedding is None else {"embedding": decoder.embedding}
    units |= {f"blocks.{layer}": block for layer, block in zip(decoder.layers, decoder.blocks, strict=True)}
    head, table = decoder.final_norm, decoder.lm_head
    if head is not None:
        units["head"] = nn.ModuleList([head] if table is None or decoder.has_table_copy else [head, table])
    if decoder.has_table_copy and table is not None:
        units["table copy"] = table
    adapters = {id(part.parameter) for part in adapter_parts(decoder)}
    kinds = reductions(decoder, mesh)
    for bucket in make_buckets(list(units.items()), decoder, mesh.cuts, device, kinds, decays, adapters):
        bucket.stage = stage
        if bucket.unit == EVERY_UNIT and mesh.dims.pipeline > 1:
            bucket.name += f" of stage {stage}"
        bucket.is_late = splits and not is_complete_early(bucket)
        yield bucket


def is_complete_early(bucket: Bucket) -> bool:
    """Whether all gradients of a bucket come from the backward pass of the inputs, also where that is split.

    Those of experts do: kept until later they would be as large as their weights, for each micro-batch.
    """
    of_experts = bucket.reduction == "expert" and bucket.unit != EVERY_UNIT
    return of_experts or bucket.unit in ("head", "table copy")


def whole_names(model: Model) -> list[str]:
    """The names of all tensors of the model, wherever they are; of the adapters those of this rank."""
    whole = whole_of(model)
    names = [*(part.hf_name for part in all_parts(whole)), *sorted(whole.names_elsewhere())]
    return list(dict.fromkeys([*names, *(part.hf_name for part in all_parts(model))]))


def make_optimizer(
    config: TrainerConfig,
    ops: Ops,
    parts: Sequence[Part],
    mesh: Mesh,
    buckets: Sequence[Bucket],
    disk: DiskPlace | None = None,
) -> Optimizer:
    device = buckets[0].device
    if config.optimization.optimizer != "lamb":
        adam = Adam(config.optimization, ops)
        if disk is not None:
            return DiskUpdate(adam, device, disk.piece, disk.file)
        if config.memory.cpu_offload:
            return OffloadedUpdate(adam, device, offload_piece(config, buckets))
        return adam
    lamb = Lamb(
        config.optimization,
        ops,
        lambda kind, cells: sum_over_holders(cells, kind, mesh, is_whole=config.memory.zero_stage == 0),
        by_line=config.training.any_data_parallel,
        sizes=tensor_sizes(parts),
    )
    if disk is None and not config.memory.cpu_offload:
        return lamb
    current, queues = CurrentPass(), queues_of(device)
    if disk is not None:
        return OffloadedLamb(lamb, current, DiskUpdate(current, device, disk.piece, disk.file, queues), queues)
    lanes = OffloadedUpdate(current, device, offload_piece(config, buckets), queues)
    return OffloadedLamb(lamb, current, lanes, queues)


def offload_piece(config: TrainerConfig, buckets: Sequence[Bucket]) -> int:
    """The elements of offloaded state that are moved and updated at once."""
    plans = [bucket.plan for bucket in buckets]
    largest = max(plan.numel if config.memory.zero_stage == 0 else plan.shard_numel for plan in plans)
    return min(OFFLOAD_PIECE, largest)


def reductions(decoder: Decoder, mesh: Mesh) -> Mapping[int, Reduction]:
    """By id, the parameters whose gradient is not summed over the ranks of `gradient` alone."""
    kinds: dict[int, Reduction] = {}
    if mesh.dims.tensor > 1:
        kinds = {id(part.parameter): "replicated" for part in all_parts(decoder) if part.shard_dim is None}
    if mesh.expert is not None:
        kinds |= {id(held): "expert" for layer in decoder.experts() for held in layer.held_by_expert()}
    return kinds
