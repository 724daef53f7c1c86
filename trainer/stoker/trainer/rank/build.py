"""Builds the loop of one rank from its context and its inputs.

Called once by the rank's `main`. Owns nothing: the loop owns the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stoker.checkpoint.errors import CheckpointError
from stoker.checkpoint.manifest import Manifest, TensorInfo
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.pod.capabilities import AttentionName
from stoker.pod.config_file import ConfigError
from stoker.pod.field_names import manifest_name
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.step_signals import SignalInbox
from stoker.trainer.rank.attend_maker import ContextGroup
from stoker.trainer.rank.compile_clock import CompileClock
from stoker.trainer.rank.context_share import share_batches
from stoker.trainer.rank.guards import Guards
from stoker.trainer.rank.kernel_choice import DTYPES, make_ops
from stoker.trainer.rank.loop import Loop, Progress, validates
from stoker.trainer.rank.loss_scale import LossScale
from stoker.trainer.rank.memory_peak import MemoryPeak
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.metric_targets.open_targets import open_targets
from stoker.trainer.rank.metrics import MetricLog
from stoker.trainer.rank.pipeline.executor import Executor, Wire
from stoker.trainer.rank.pipeline.passes import PipelinePasses
from stoker.trainer.rank.pipeline.slices import Model, Slices, all_parts
from stoker.trainer.rank.pipeline.stage_maker import make_stage, stage_again
from stoker.trainer.rank.plan_check import PlanWatch, choose_layers, plan_run
from stoker.trainer.rank.resume import ResumePoint
from stoker.trainer.rank.run_facts import adapter_facts, run_facts
from stoker.trainer.rank.run_inputs import RunInputs
from stoker.trainer.rank.save_group import SaveGroup
from stoker.trainer.rank.saver import Saver
from stoker.trainer.rank.skipped_batches import list_file, read_skipped, write_skipped
from stoker.trainer.rank.snapshot import all_state_tensors, check_same_adapters, load_state
from stoker.trainer.rank.train_step import ForwardPass, Passes
from stoker.trainer.rank.zero import Zero
from stoker.trainer.rank.zero_maker import make_zero

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
        ConfigError: the checkpoint is another job's, and the run would have no step.
    """
    compiled = CompileClock(context.device, context.lookups)
    peak = MemoryPeak(context.device)
    fill = None if inputs.initial_weights is None else inputs.initial_weights.fill
    zero = make_zero(config, inputs.model, context.mesh, context.device, fill)
    parts = all_parts(inputs.model)
    loss_scale = (loss_scale or LossScale()) if config.memory.precision == "fp16" else None
    guards = make_guards(config, root, context, inputs)
    tensors = all_state_tensors(parts, context.mesh, context.save_group)
    progress = Progress()
    if resume is not None:
        progress = _resume(config, root, resume, context, inputs, zero, tensors, loss_scale, guards)
    saver = make_saver(config, root, context, inputs, resume)
    with open_log(config, context, progress.step, inputs.total_steps) as log:
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
                meta=run_facts(config, context.mesh, context.device, inputs.fingerprint, resume),
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
    group = context.mesh.context
    shared = None if group is None else ContextGroup(group, config.parallelism.context_method)
    if isinstance(model, Slices):
        return make_pipeline_passes(config, context, model, zero, attention, shared)
    return ForwardPass(
        *(model, attention, context.device, zero.ready),
        choices=choose_layers(config, model.config),
        gathered=zero.gathered,
        context=shared,
    )


def make_pipeline_passes(
    config: TrainerConfig,
    context: RankContext,
    model: Slices,
    zero: Zero,
    attention: AttentionName,
    shared: ContextGroup | None,
) -> PipelinePasses:
    """Passes through the stages that this rank holds. `shared`: the ranks that share each sequence."""
    name, mesh, device = config.parallelism.pipeline_schedule, context.mesh, context.device
    recompute = config.memory.activation_checkpointing == "full"
    stages = [
        make_stage(stage, decoder, zero, name, recompute, stage_again(config, stage, decoder, zero))
        for stage, decoder in model.decoders.items()
    ]
    wire = Wire(hidden_size=model.config.hidden_size, dtype=DTYPES[config.memory.precision], device=device)
    follow = None if zero.gathered is None else zero.gathered.follow
    executor = Executor(stages, mesh.links, wire, zero.check_complete, mesh.first_links, follow)
    return PipelinePasses(
        *(name, mesh.dims, mesh.stage, executor, model.config, model.ops, attention, device),
        cuts_tokens=config.parallelism.sequence_parallel,
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


def make_guards(config: TrainerConfig, root: CheckpointRoot, context: RankContext, inputs: RunInputs) -> Guards:
    """The guards, with the batches that earlier attempts left out; rank 0 reads and writes the list (collective)."""
    file = list_file(Path(root.root), config.job.uid, inputs.batches.cursor(0))
    skipped = context.save_group.broadcast(list(read_skipped(file)) if context.save_group.rank == 0 else None)
    if not context.mesh.leads:
        return Guards(config.guards, skipped)
    return Guards(config.guards, skipped, lambda batches: write_skipped(file, batches))


def make_signal_inbox(config: TrainerConfig, context: RankContext) -> SignalInbox:
    minutes = config.checkpoint.interval_minutes
    return SignalInbox(context.channel, minutes * 60 if minutes else None, context.mesh.rank)


def open_log(config: TrainerConfig, context: RankContext, done: int, total_steps: int) -> MetricLog:
    """The metrics log; only the rank that leads writes it. `done`: steps of earlier attempts."""
    logging = config.logging
    if not context.mesh.leads:
        return MetricLog(None, logging.every_steps)
    return MetricLog(logging.jsonl, logging.every_steps, open_targets(config, done), completed=done >= total_steps)


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
    check_steps_left(config, reader.manifest, inputs.total_steps)
    check_same_adapters(reader, adapter_facts(config))
    load_state(zero, all_parts(inputs.model), tensors, reader, _loading(context))
    if loss_scale is not None:
        loss_scale.restore(meta.get("loss_scale"))
    lineage = meta.get("lineage", {})
    guards.restore(meta.get("guards"), lineage.get("skipped_batches", ()))
    return Progress(
        reader.manifest.step,
        int(meta["tokens"]),
        meta["loss"],
        float(meta["elapsed_s"]),
        int(meta.get("skipped_steps", 0)),
        tuple(lineage.get("loss_spikes", ())),
        makes_up_validation(config, reader.manifest, inputs.total_steps),
    )


def makes_up_validation(config: TrainerConfig, manifest: Manifest, total_steps: int) -> bool:
    """Whether a run begins with the validation that a stop has left.

    The first attempt after the stop does: where each one was stopped during it, none would come to train. That of the
    last step delays no training.
    """
    if not manifest.meta.get("validation_due") or not validates(config, manifest.step, total_steps):
        return False
    stopped = manifest.meta.get("lineage", {}).get("attempt", 0)
    return manifest.step == total_steps or config.job.attempt <= stopped + 1


def check_steps_left(config: TrainerConfig, manifest: Manifest, total_steps: int) -> None:
    """Check that a run which begins at another job's checkpoint has steps to train.

    Raises:
        ConfigError: it has none. A run that resumes a save of its own may have ended with its last step.
    """
    own = manifest.meta.get("lineage", {}).get("job_uid") == config.job.uid
    if config.resume is not None and not own and manifest.step >= total_steps:
        given = next(name for name in ("total_steps", "total_tokens", "epochs") if getattr(config.training, name))
        raise ConfigError(
            f"training.{manifest_name(given)} {getattr(config.training, given)} makes {total_steps} steps, and the "
            f"checkpoint of modelFrom is at step {manifest.step}: steps count from the first job's start; give more, "
            "or take its Weights alone"
        )


def _loading(context: RankContext) -> Any:
    return lambda message: context.channel.phase("Loading", message)
