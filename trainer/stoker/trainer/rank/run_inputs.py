"""The inputs of a run: model, initial weights, tokenizer, corpus.

Called once by the rank's `main`, on every rank, before the loop is built.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.remote.model_cache import fetch_model
from stoker.checkpoint.remote.model_uri import is_model_uri
from stoker.model.config import ModelConfig
from stoker.model.context_attend import check_shared_heads
from stoker.model.kernels.ops import Ops
from stoker.model.lora import LoraSettings
from stoker.model.rope_scaling import Llama3Scaling
from stoker.model.weights.source import WeightsSource, open_weights
from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import DataError, ModelUnusable
from stoker.trainer.protocol.config import ModelFromConfig, TrainerConfig, TrainingConfig
from stoker.trainer.rank.data.corpus import open_corpus
from stoker.trainer.rank.data.loader import Loader
from stoker.trainer.rank.data.tokens import open_encoder
from stoker.trainer.rank.fp8_weights import check_fp8
from stoker.trainer.rank.initial_weights import InitialWeights
from stoker.trainer.rank.kernel_choice import make_ops
from stoker.trainer.rank.loop import Batches
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.pipeline.slices import Model, empty_model
from stoker.trainer.rank.plan_check import choose_layers
from stoker.trainer.rank.save_group import SaveGroup

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Everything that a run reads before its first step. Apart from a rank's slices of `model` alike on every rank."""

    model: Model
    """fp32, empty (on the meta device) or with its starting weights (any weights, when the run resumes)."""
    batches: Batches
    files: Mapping[str, bytes]
    """`config.json` and the tokenizer's files, for every checkpoint."""
    total_steps: int
    fingerprint: str
    """Fingerprint of the corpus."""
    source_digest: str = ""
    """Digest of the model that was fetched from a URI."""
    initial_weights: InitialWeights | None = None
    """Fills an empty model; None when it has its weights."""


def collect_run_inputs(
    config: TrainerConfig, mesh: Mesh, device: torch.device, resumes: bool, report: Report
) -> RunInputs:
    """Open the corpus and make an empty model. A run that resumes does not load initial weights.

    Raises:
        ConfigError: `model` is not a model's configuration, or cannot be cut over the mesh.
        ModelUnusable: `model_from` cannot be used.
        DataError: the corpus cannot be used.
    """
    source, source_digest = open_source(config, report)
    model = source.config if source is not None else parse_model(config.model or {})
    check_length(config, model)
    check_heads(config, model)
    check_fp8(config, model, device)
    ops, _ = make_ops(config, device)
    check_layout(config, model, mesh, ops)  # all of this before the corpus is tokenised, which may take hours
    encoder = open_encoder(config, source.tokenizer_files if source is not None else {}, report)
    if source is None and not model.eos_token_ids and encoder.end_id is not None:
        model = replace(model, eos_token_ids=(encoder.end_id,))  # an engine that serves the result stops there
    loader = Loader(open_corpus(config, encoder, model_vocab_size=model.vocab_size, report=report), config)
    total_steps = plan_total_steps(config.training, loader)
    check_warm_up(config, total_steps)
    report("BuildingModel")
    held = empty_model_of_rank(config, model, mesh, ops)
    origin, seed = (None, None) if resumes else (source, config.training.seed)
    return RunInputs(
        model=held,
        batches=loader,
        files=travelling_files(held, config.memory.precision, encoder.files),
        total_steps=total_steps,
        fingerprint=loader.fingerprint,
        source_digest=source_digest,
        initial_weights=make_initial_weights(held, origin, seed, report),
    )


def check_layout(config: TrainerConfig, model: ModelConfig, mesh: Mesh, ops: Ops) -> None:
    """Check that the ranks can share the model, and keep its activations within the budget, if there is one.

    Raises:
        ConfigError: they cannot; the message shows the arithmetic.
    """
    choose_layers(config, model)
    empty_model_of_rank(config, model, mesh, ops)


def empty_model_of_rank(config: TrainerConfig, model: ModelConfig, mesh: Mesh, ops: Ops) -> Model:
    """Return the part of the model that a rank holds, without values.

    Raises:
        ConfigError: it cannot be cut over the mesh.
    """
    length, cut = config.training.sequence_length, config.parallelism.sequence_parallel
    lora = lora_settings(config)
    return empty_model(model, ops, mesh.dims, mesh.stage, length, mesh.tensor, cut, mesh.expert, lora)


def lora_settings(config: TrainerConfig) -> LoraSettings | None:
    """The adapters of a run; None where the whole model is trained."""
    lora = config.lora
    return None if lora is None else LoraSettings(rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def check_agreement(inputs: RunInputs, group: SaveGroup) -> None:
    """Check that all ranks train the same run, because each pod reads its own mounts (collective).

    Raises:
        DataError: on every rank, when a rank has another corpus or another number of steps than rank 0.
    """
    facts = [f"corpus {inputs.fingerprint}", f"{inputs.total_steps} steps"]
    facts += [f"model {inputs.source_digest}"] if inputs.source_digest else []
    by_rank = group.gather(facts)
    odd = [rank for rank, found in enumerate(by_rank) if found != by_rank[0]]
    differences = group.broadcast(
        [f"rank {rank} has {', '.join(by_rank[rank])}" for rank in [0, *odd[:3]]] if odd else []
    )
    if differences:
        raise DataError(f"the ranks do not train the same run, every pod needs the same data: {'; '.join(differences)}")


def open_source(config: TrainerConfig, report: Report) -> tuple[WeightsSource | None, str]:
    """Open the weights of `model_from` without loading them; return them and the digest of what was fetched, if so."""
    if config.model_from is None:
        return None, ""
    wanted = config.model_from
    try:
        path, digest = local_model(wanted, report)
        source = open_weights(path, wanted.digest)
    except (ValueError, OSError) as error:
        raise ModelUnusable(f"modelFrom.{wanted.kind} {wanted.path}: {error}") from error
    if source.kind != wanted.kind:
        raise ModelUnusable(f"modelFrom.{wanted.kind} {wanted.path} is of kind {source.kind!r}")
    return source, digest


def local_model(wanted: ModelFromConfig, report: Report) -> tuple[Path, str]:
    """Fetch a model that has a cache; of the ranks of a machine one fetches it, and the others wait for that one."""
    if wanted.cache is None or not is_model_uri(wanted.path):
        return Path(wanted.path), ""
    report("FetchingModel")
    found = fetch_model(wanted.path, Path(wanted.cache), progress=percents(report, "FetchingModel"))
    return found.path, found.digest


def make_initial_weights(
    model: Model, source: WeightsSource | None, seed: int | None, report: Report
) -> InitialWeights:
    """Initial weights from the source, or random ones from the seed; with neither, a checkpoint will overwrite them."""
    if source is None:
        return InitialWeights(model, seed, percents(report, "InitialisingWeights"))
    progress = percents(report, "LoadingWeights")
    return InitialWeights(model, source.store, progress, str(source.path), adapter_seed=seed or 0)


def parse_model(fields: Mapping[str, Any]) -> ModelConfig:
    """Parse the `model` section.

    Raises:
        ConfigError: a field is unknown, missing or invalid; the message names it.
    """
    try:
        scaling = fields.get("rope_scaling")
        eos = tuple(fields.get("eos_token_ids", ()))
        return ModelConfig(
            **{**fields, "rope_scaling": Llama3Scaling(**scaling) if scaling else None, "eos_token_ids": eos}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model: {error}".replace("ModelConfig.__init__() ", "")) from error


def check_length(config: TrainerConfig, model: ModelConfig) -> None:
    """Check that the model has a position for every token of a sequence.

    Raises:
        ConfigError: it has fewer.
    """
    length, most = config.training.sequence_length, model.max_position_embeddings
    if length > most:
        raise ConfigError(f"training.sequenceLength {length} is above the model's maxPositionEmbeddings {most}")


def check_heads(config: TrainerConfig, model: ModelConfig) -> None:
    """Check that the ranks of `context` can share the heads, where they exchange them.

    Raises:
        ConfigError: they cannot; the message shows the arithmetic.
    """
    parallelism = config.parallelism
    if parallelism.context == 1 or parallelism.context_method != "Ulysses":
        return
    try:
        tensor = parallelism.tensor
        check_shared_heads(model.num_heads // tensor, model.num_kv_heads // tensor, parallelism.context)
    except ValueError as error:
        raise ConfigError(f"parallelism.{error}") from error


def plan_total_steps(training: TrainingConfig, loader: Loader) -> int:
    """The number of optimizer steps of the whole run."""
    if training.total_steps is not None:
        return training.total_steps
    if training.total_tokens is not None:
        return -(-training.total_tokens // (training.global_batch_size * training.sequence_length))
    assert training.epochs is not None
    return loader.steps_in(training.epochs)


def check_warm_up(config: TrainerConfig, total_steps: int) -> None:
    """Check that the run is long enough for its rate to rise.

    Raises:
        ConfigError: it is not.
    """
    steps = config.optimization.warmup_steps
    if steps > total_steps:
        raise ConfigError(f"optimization.warmupSteps {steps} is above the {total_steps} steps of the run")


def travelling_files(model: Model, precision: str, tokenizer_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files that every checkpoint carries for the engine: `config.json` and the tokenizer's files."""
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}[precision]
    return {**tokenizer_files, "config.json": json.dumps(model.config.to_hugging_face(dtype), indent=2).encode()}


def percents(report: Report, what: str) -> Callable[[int, int], None]:
    """A progress callback that reports each percent, in tens: every report is progress to the agent, and its log has
    equal ones once.
    """
    reported = -1

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if (percent := 100 * done // max(1, total)) > reported:
            reported = percent
            report(f"{what} {percent // 10 * 10} %")

    return progress
