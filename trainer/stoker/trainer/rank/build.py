"""Builds the loop of one rank from its context and its inputs.

Called once by the rank's `main`. Owns nothing: the loop owns the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stoker.checkpoint.errors import CheckpointError
from stoker.checkpoint.manifest import TensorInfo
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.model.decoder import Decoder
from stoker.model.kernels.kernel_set import resolve_kernels
from stoker.model.kernels.ops import Ops
from stoker.model.lora import adapter_parts
from stoker.model.parameter import Part
from stoker.pod.capabilities import AttentionName
from stoker.pod.plan.memory import OFFLOAD_PIECE
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.step_signals import SignalInbox
from stoker.trainer.rank.attend_maker import ContextGroup
from stoker.trainer.rank.bucket import EVERY_UNIT, Bucket, Decays, Reduction, make_buckets
from stoker.trainer.rank.bucket_state import DiskPlace, ZeroSettings
from stoker.trainer.rank.clip import GradientNorm
from stoker.trainer.rank.compile_clock import CompileClock
from stoker.trainer.rank.context_share import share_batches
from stoker.trainer.rank.copy_queues import queues_of
from stoker.trainer.rank.disk_update import DiskUpdate
from stoker.trainer.rank.fp8_weights import use_fp8
from stoker.trainer.rank.frozen import Fill
from stoker.trainer.rank.guards import Guards
from stoker.trainer.rank.initial_weights import whole_of
from stoker.trainer.rank.kernel_choice import DTYPES, make_ops
from stoker.trainer.rank.lamb import Lamb, sum_over_holders, tensor_sizes
from stoker.trainer.rank.loop import Loop, Progress
from stoker.trainer.rank.loss_scale import LossScale
from stoker.trainer.rank.memory_peak import MemoryPeak
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.metric_targets.open_targets import open_targets
from stoker.trainer.rank.metrics import MetricLog
from stoker.trainer.rank.offload import OffloadedUpdate
from stoker.trainer.rank.offloaded_lamb import CurrentPass, OffloadedLamb
from stoker.trainer.rank.optimizer import Adam, Optimizer
from stoker.trainer.rank.pipeline.executor import Executor, Wire
from stoker.trainer.rank.pipeline.passes import PipelinePasses
from stoker.trainer.rank.pipeline.slices import Model, all_parts, slices_of
from stoker.trainer.rank.pipeline.stage_maker import make_stage, stage_again
from stoker.trainer.rank.pipeline.tied_table import TiedTable
from stoker.trainer.rank.plan_check import PlanWatch, choose_layers, plan_run
from stoker.trainer.rank.resume import ResumePoint
from stoker.trainer.rank.run_inputs import RunInputs, lora_settings
from stoker.trainer.rank.save_group import SaveGroup
from stoker.trainer.rank.saver import Saver
from stoker.trainer.rank.skipped_batches import read_skipped, write_skipped
from stoker.trainer.rank.snapshot import all_state_tensors, check_same_adapters, load_state
from stoker.trainer.rank.state_file import StateFile
from stoker.trainer.rank.train_step import ForwardPass, Passes
from stoker.trainer.rank.weight_decay import decay_by_name
from stoker.trainer.rank.zero import Zero

if TYPE_CHECKING:
    from stoker.model.kernels.ahead.layered_cache import KernelLookups


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """The means of one rank for the length of a run: mesh, group for saves, channel to the agent, device."""

    mesh: Mesh
    save_group: SaveGroup
    channel: RankChannel
    device: torch.device
    lookups: KernelLookups | None = None
    """Of the shipped kernels, where this process looks there."""


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
    splits = mesh.dims.pipeline > 1 and config.parallelism.pipeline_schedule == "ZeroBubble"
    parts = all_parts(model)
    decays = decay_by_name(parts, config.optimization.no_decay, whole_names(model))
    buckets = [
        bucket
        for stage, decoder in slices_of(model).items()
        for bucket in stage_buckets(stage, decoder, mesh, device, decays, splits=splits)
    ]
    nvme = config.memory.nvme_offload
    disk = DiskPlace(StateFile(nvme.path, mesh.rank), offload_piece(config, buckets)) if nvme is not None else None
    settings = ZeroSettings(
        stage=config.memory.zero_stage,
        compute_dtype=DTYPES[config.memory.precision],
        any_data_parallel=config.training.any_data_parallel,
        offload=config.memory.cpu_offload or disk is not None,
        disk=disk,
    )
    zero = Zero(
        buckets,
        mesh,
        make_optimizer(config, model.ops, parts, mesh, buckets, disk),
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


@contextmanager
def open_loop(
    config: TrainerConfig,
    root: CheckpointRoot,
    context: RankContext,
    inputs: RunInputs,
    resume: ResumePoint | None,
    loss_scale: LossScale | None = None,
) -> Iterator[Loop]:
    """A loop that continues from `resume` or starts anew. At the end it waits for saves in flight and closes the log.

    `loss_scale`: where an fp16 run starts, if not at the usual scale.

    Raises:
        CheckpointError: the checkpoint is damaged.
        OtherModel: it is sound, but not of this model.
        DataError: the corpus is not that of the checkpoint.
    """
    compiled = CompileClock(context.device, context.lookups)
    peak = MemoryPeak(context.device)
    fill = None if inputs.initial_weights is None else inputs.initial_weights.fill
    zero = make_zero(config, inputs.model, context.mesh, context.device, fill)
    parts = all_parts(inputs.model)
    loss_scale = (loss_scale or LossScale()) if config.memory.precision == "fp16" else None
    guards = make_guards(config, root, context)
    tensors = all_state_tensors(parts, context.mesh, context.save_group)
    progress = Progress()
    if resume is not None:
        progress = _resume(config, root, resume, context, inputs, zero, tensors, loss_scale, guards)
    saver = make_saver(config, root, context, inputs, resume)
    with open_log(config, context, progress.step) as log:
        try:
            yield Loop(
                config,
                mesh=context.mesh,
                batches=share_batches(inputs.batches, context.mesh),
                passes=make_passes(config, context, inputs.model, zero),
                zero=zero,
                parts=parts,
                tensors=tensors,
                saver=saver,
                channel=context.channel,
                inbox=make_signal_inbox(config, context),
                log=log,
                watch=make_plan_watch(config, context, inputs.model, peak),
                meta=_meta(config, context, inputs, resume),
                progress=progress,
                total_steps=inputs.total_steps,
                loss_scale=loss_scale,
                guards=guards,
                compiled=compiled,
            )
        finally:
            saver.wait()
            zero.close()


def make_passes(
    config: TrainerConfig, context: RankContext, model: Model, zero: Zero, attention: AttentionName | None = None
) -> Passes:
    """Passes through the whole model, or through the stages of a pipeline.

    `attention`: as the configuration chooses it for the context's device, unless it is given.
    """
    attention = attention or make_ops(config, context.device)[1]
    recompute = config.memory.activation_checkpointing == "full"
    group = context.mesh.context
    shared = None if group is None else ContextGroup(group, config.parallelism.context_method)
    if isinstance(model, Decoder):
        return ForwardPass(
            *(model, attention, context.device, zero.ready),
            choices=choose_layers(config, model.config),
            gathered=zero.gathered,
            context=shared,
        )
    name, mesh = config.parallelism.pipeline_schedule, context.mesh
    stages = [
        make_stage(stage, decoder, zero, name, recompute, stage_again(config, stage, decoder, zero))
        for stage, decoder in model.decoders.items()
    ]
    wire = Wire(hidden_size=model.config.hidden_size, dtype=DTYPES[config.memory.precision], device=context.device)
    follow = None if zero.gathered is None else zero.gathered.follow
    executor = Executor(stages, mesh.links, wire, zero.check_complete, mesh.first_links, follow)
    cuts_tokens = config.parallelism.sequence_parallel
    return PipelinePasses(
        *(name, mesh.dims, mesh.stage, executor, model.config, model.ops, attention, context.device),
        cuts_tokens=cuts_tokens,
        context=shared,
    )


def make_plan_watch(config: TrainerConfig, context: RankContext, model: Model, peak: MemoryPeak) -> PlanWatch:
    plan = plan_run(config, model.config, context.device)
    return PlanWatch(plan, context.mesh.stage, context.channel, peak)


def make_saver(
    config: TrainerConfig, root: CheckpointRoot, context: RankContext, inputs: RunInputs, resume: ResumePoint | None
) -> Saver:
    return Saver(
        root,
        config.job.writer,
        context.save_group,
        context.channel,
        inputs.files,
        keep=config.checkpoint.max_to_keep if config.retention == "own" else None,
        verified=frozenset([resume.folder] if resume and resume.verified else []),
    )


def make_guards(config: TrainerConfig, root: CheckpointRoot, context: RankContext) -> Guards:
    """The guards, with the batches that earlier attempts left out: rank 0 reads them for all (collective)."""
    folder = Path(root.root)
    skipped = context.save_group.broadcast(list(read_skipped(folder)) if context.save_group.rank == 0 else None)
    return Guards(config.guards, skipped, lambda batches: write_skipped(folder, batches))


def make_signal_inbox(config: TrainerConfig, context: RankContext) -> SignalInbox:
    minutes = config.checkpoint.interval_minutes
    return SignalInbox(context.channel, minutes * 60 if minutes else None, context.mesh.rank)


def open_log(config: TrainerConfig, context: RankContext, done: int) -> MetricLog:
    """The metrics log; only the rank that leads writes it. `done`: steps of earlier attempts."""
    if not context.mesh.leads:
        return MetricLog(None, config.logging.every_steps)
    return MetricLog(config.logging.jsonl, config.logging.every_steps, open_targets(config, done))


def _resume(
    config: TrainerConfig,
    root: CheckpointRoot,
    point: ResumePoint,
    context: RankContext,
    inputs: RunInputs,
    zero: Zero,
    tensors: Sequence[TensorInfo],
    loss_scale: LossScale | None,
    guards: Guards,
) -> Progress:
    reader = CheckpointReader(point.path(root), point.digest)
    meta = reader.manifest.meta
    missing = [name for name in ("cursor", "tokens", "loss", "elapsed_s") if name not in meta]
    if missing:
        raise CheckpointError(
            f"{reader.folder}: its manifest's meta lacks {', '.join(missing)}: it was not written by this trainer"
        )
    inputs.batches.check(meta["cursor"])
    check_same_adapters(reader, _adapter_meta(config))
    load_state(zero, all_parts(inputs.model), tensors, reader, _loading(context))
    if loss_scale is not None:
        loss_scale.restore(meta.get("loss_scale"))
    guards.restore(meta.get("guards"))
    return Progress(
        reader.manifest.step,
        int(meta["tokens"]),
        meta["loss"],
        float(meta["elapsed_s"]),
        int(meta.get("skipped_steps", 0)),
        tuple(meta.get("lineage", {}).get("loss_spikes", ())),
    )


def _loading(context: RankContext) -> Any:
    return lambda message: context.channel.phase("Loading", message)


def _meta(config: TrainerConfig, context: RankContext, inputs: RunInputs, resume: ResumePoint | None) -> dict[str, Any]:
    return {
        "layout": {**context.mesh.dims.layout(), "zero_stage": config.memory.zero_stage},
        "config": config.model_dump(mode="json"),
        "rng": {
            "seed": config.training.seed,
            "kind": "none: nothing random after the initial weights and the data order",
        },
        "lineage": {
            "parent": {"folder": resume.folder, "digest": resume.digest} if resume else None,
            "job_uid": config.job.uid,
            "job": f"{config.job.namespace}/{config.job.name}",
            "attempt": config.job.attempt,
        },
        **({"adapter": adapter} if (adapter := _adapter_meta(config)) else {}),
        "corpus_fingerprint": inputs.fingerprint,
        "kernels": {
            "kernels": resolve_kernels(config.kernels, context.device.type),
            "attention": make_ops(config, context.device)[1],
            "torch": torch.__version__,
        },
    }


def _adapter_meta(config: TrainerConfig) -> dict[str, Any] | None:
    """What a reader needs to merge the adapters of a checkpoint."""
    lora = lora_settings(config)
    return None if lora is None else {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
