"""Puts a rank's parts together: from a decoder and its batches to a loop that is ready to train."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.checkpoint.errors import CheckpointError
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops, resolve_kernels
from stoker.pod.capabilities import AttentionName
from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.channel import Beacon
from stoker.trainer.protocol.config import TrainerConfig, TrainingConfig
from stoker.trainer.protocol.step_signals import Inbox
from stoker.trainer.rank.bucket import make_buckets
from stoker.trainer.rank.clip import GradientNorm
from stoker.trainer.rank.communicator import Communicator
from stoker.trainer.rank.data.loader import Loader
from stoker.trainer.rank.initial_weights import Start
from stoker.trainer.rank.loop import Batches, Loop, Progress
from stoker.trainer.rank.metrics import MetricLog
from stoker.trainer.rank.optimizer import Adam
from stoker.trainer.rank.resume import ResumePoint
from stoker.trainer.rank.save_group import SaveGroup
from stoker.trainer.rank.saver import Saver
from stoker.trainer.rank.snapshot import load_state
from stoker.trainer.rank.train_step import ForwardPass
from stoker.trainer.rank.zero import STATE_KINDS, Fill, Zero, ZeroSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Team:
    """This rank's means to work with the others, and to talk to its agent."""

    communicator: Communicator
    save_group: SaveGroup
    beacon: Beacon
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What a run is made of."""

    decoder: Decoder
    """fp32, empty (on the meta device) or with its starting weights (any weights, when the run resumes)."""
    batches: Batches
    files: Mapping[str, bytes]
    """`config.json`, tokenizer files and so on, for every checkpoint."""
    total_steps: int
    fingerprint: str
    """Of the corpus."""
    start: Start | None = None
    """Fills an empty decoder."""


def make_ops(config: TrainerConfig, device: torch.device) -> tuple[Ops, AttentionName]:
    """The kernels that the configuration chooses. Raises ConfigError for one that is not built.

    The reference kernels repeat a run bitwise only in their deterministic form. The fused ones do so by themselves when torch is told to be deterministic
    (`set_threads`), and their own deterministic form, whose results do not depend on a row's batch, is for comparing trainer and engine.
    """
    try:
        kernels = resolve_kernels(config.kernels, device.type)
        ops = Ops(kernels, deterministic=config.training.deterministic != "Off" and kernels == "reference")
        return ops, ops.attention(config.attention, DTYPES.get(config.memory.precision))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def make_zero(
    config: TrainerConfig,
    decoder: Decoder,
    communicator: Communicator,
    device: torch.device,
    fill: Fill | None = None,
) -> Zero:
    """Move the decoder's parameters into flat buckets: embedding, one per block, and the head. `fill` gives values to those of an empty decoder."""
    blocks = {f"blocks.{index}": block for index, block in enumerate(decoder.blocks)}
    assert decoder.embedding is not None
    assert decoder.final_norm is not None
    last = [decoder.final_norm] if decoder.lm_head is None else [decoder.final_norm, decoder.lm_head]
    groups = {"embedding": decoder.embedding, **blocks, "head": nn.ModuleList(last)}
    settings = ZeroSettings(
        stage=config.memory.zero_stage,
        compute_dtype=DTYPES[config.memory.precision],
        any_data_parallel=config.training.deterministic == "AnyDataParallel",
    )
    buckets = make_buckets(list(groups.items()), decoder, communicator.size, device)
    return Zero(
        buckets,
        communicator,
        Adam(config.optimization, decoder.ops),
        GradientNorm(decoder.ops, by_line=settings.any_data_parallel),
        settings,
        fill=fill,
        placed=[*blocks, "head"],
    )


@contextmanager
def open_loop(
    config: TrainerConfig, root: CheckpointRoot, team: Team, materials: Materials, resume: ResumePoint | None
) -> Iterator[Loop]:
    """A loop that goes on from `resume` or begins anew. Waits for saves in flight and closes the log at the end.

    Raises:
        CheckpointError: the checkpoint is damaged.
        OtherModel: it is sound, but not of this model.
        DataError: the corpus is not that of the checkpoint.
    """
    fill = None if materials.start is None else materials.start.fill
    zero = make_zero(config, materials.decoder, team.communicator, team.device, fill)
    parts = list(materials.decoder.named_parts())
    progress = Progress() if resume is None else _resume(root, resume, team, materials, zero)
    saver = make_saver(config, root, team, materials, resume)
    with open_log(config, team) as log:
        try:
            yield Loop(
                config,
                batches=materials.batches,
                forward=make_forward(config, team, materials.decoder, zero),
                zero=zero,
                parts=parts,
                saver=saver,
                beacon=team.beacon,
                inbox=make_inbox(config, team),
                log=log,
                meta=_meta(config, team, materials, resume),
                progress=progress,
                total_steps=materials.total_steps,
            )
        finally:
            saver.wait()
            zero.close()


def make_forward(config: TrainerConfig, team: Team, decoder: Decoder, zero: Zero) -> ForwardPass:
    _, attention = make_ops(config, team.device)
    recompute = config.memory.activation_checkpointing == "full"
    return ForwardPass(decoder, attention, team.device, zero.ready, recompute=recompute)


def make_saver(
    config: TrainerConfig, root: CheckpointRoot, team: Team, materials: Materials, resume: ResumePoint | None
) -> Saver:
    return Saver(
        root,
        config.job.writer,
        team.save_group,
        team.beacon,
        materials.files,
        keep=config.checkpoint.max_to_keep if config.retention == "own" else None,
        verified=frozenset([resume.folder] if resume and resume.verified else []),
    )


def make_inbox(config: TrainerConfig, team: Team) -> Inbox:
    minutes = config.checkpoint.interval_minutes
    return Inbox(team.beacon, minutes * 60 if minutes else None, team.communicator.rank)


def open_log(config: TrainerConfig, team: Team) -> MetricLog:
    """Rank 0 writes."""
    return MetricLog(config.logging.jsonl if team.communicator.rank == 0 else None, config.logging.every_steps)


def _resume(root: CheckpointRoot, point: ResumePoint, team: Team, materials: Materials, zero: Zero) -> Progress:
    reader = CheckpointReader(point.path(root), point.digest)
    meta = reader.manifest.meta
    missing = [name for name in ("cursor", "tokens", "loss", "elapsed_s") if name not in meta]
    if missing:
        raise CheckpointError(
            f"{reader.folder}: its manifest's meta lacks {', '.join(missing)}: no trainer of ours wrote it"
        )
    materials.batches.check(meta["cursor"])
    load_state(zero, list(materials.decoder.named_parts()), reader, STATE_KINDS, _loading(team))
    return Progress(reader.manifest.step, int(meta["tokens"]), meta["loss"], float(meta["elapsed_s"]))


def _loading(team: Team) -> Any:
    return lambda message: team.beacon.phase("Loading", message)


def _meta(config: TrainerConfig, team: Team, materials: Materials, resume: ResumePoint | None) -> dict[str, Any]:
    size = team.communicator.size
    return {
        "layout": {"world_size": size, "data_parallel": size, "zero_stage": config.memory.zero_stage},
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
        "corpus_fingerprint": materials.fingerprint,
        "kernels": {
            "kernels": resolve_kernels(config.kernels, team.device.type),
            "attention": make_ops(config, team.device)[1],
            "torch": torch.__version__,
        },
    }


def plan_total_steps(training: TrainingConfig, loader: Loader) -> int:
    """Optimizer steps of the whole run."""
    if training.total_steps is not None:
        return training.total_steps
    if training.total_tokens is not None:
        return -(-training.total_tokens // (training.global_batch_size * training.sequence_length))
    assert training.epochs is not None
    return loader.steps_in(training.epochs)


def travelling_files(decoder: Decoder, precision: str, tokenizer_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """`config.json` and the tokenizer's files as they lie in every checkpoint."""
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    return {**tokenizer_files, "config.json": json.dumps(decoder.config.to_hugging_face(dtype), indent=2).encode()}
