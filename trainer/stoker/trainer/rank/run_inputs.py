"""Collects what a run is made of: model, starting weights, tokenizer, corpus."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from stoker.model.config import ModelConfig, RopeScaling
from stoker.model.decoder import Decoder
from stoker.model.weights.source import WeightsSource, open_weights
from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import DataError, ModelUnusable
from stoker.trainer.protocol.config import TrainerConfig, TrainingConfig
from stoker.trainer.rank.data.corpus import open_corpus
from stoker.trainer.rank.data.loader import Loader
from stoker.trainer.rank.data.tokens import open_encoder
from stoker.trainer.rank.initial_weights import InitialWeights
from stoker.trainer.rank.kernel_choice import make_ops
from stoker.trainer.rank.loop import Batches
from stoker.trainer.rank.save_group import SaveGroup

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run is made of."""

    decoder: Decoder
    """fp32, empty (on the meta device) or with its starting weights (any weights, when the run resumes)."""
    batches: Batches
    files: Mapping[str, bytes]
    """`config.json`, tokenizer files and so on, for every checkpoint."""
    total_steps: int
    fingerprint: str
    """Of the corpus."""
    initial_weights: InitialWeights | None = None
    """Fills an empty decoder."""


def collect_run_inputs(config: TrainerConfig, device: torch.device, resumes: bool, report: Report) -> RunInputs:
    """Everything that does not depend on the number of ranks. A run that resumes does not load starting weights.

    Raises:
        ConfigError: `model` is not a model's configuration.
        ModelUnusable: `model_from` cannot be used.
        DataError: the corpus cannot be used.
    """
    source = open_source(config)
    model = source.config if source is not None else parse_model(config.model or {})
    check_length(config, model)
    ops, _ = make_ops(config, device)
    encoder = open_encoder(config, source.tokenizer_files if source is not None else {}, report)
    if source is None and not model.eos_token_ids and encoder.end_id is not None:
        model = replace(
            model, eos_token_ids=(encoder.end_id,)
        )  # so that an engine that serves the result knows where to stop
    corpus = open_corpus(config, encoder, model_vocab_size=model.vocab_size, report=report)
    loader = Loader(corpus, config)
    report("BuildingModel")
    decoder = Decoder(model, ops, dtype=torch.float32, device="meta")
    return RunInputs(
        decoder=decoder,
        batches=loader,
        files=travelling_files(decoder, config.memory.precision, encoder.files),
        total_steps=plan_total_steps(config.training, loader),
        fingerprint=loader.fingerprint,
        initial_weights=make_initial_weights(
            decoder, None if resumes else source, None if resumes else config.training.seed, report
        ),
    )


def check_agreement(inputs: RunInputs, group: SaveGroup) -> None:
    """Make sure that all ranks train the same run: each pod reads its own mounts (collective).

    Raises:
        DataError: on every rank, when some rank reads another corpus than rank 0 or would make another number of steps.
    """
    facts = [f"corpus {inputs.fingerprint}", f"{inputs.total_steps} steps"]
    by_rank = group.gather(facts)
    odd = [rank for rank, found in enumerate(by_rank) if found != by_rank[0]]
    told = group.broadcast([f"rank {rank} has {', '.join(by_rank[rank])}" for rank in [0, *odd[:3]]] if odd else [])
    if told:
        raise DataError(f"the ranks do not train the same run, every pod needs the same data: {'; '.join(told)}")


def open_source(config: TrainerConfig) -> WeightsSource | None:
    """The weights of `model_from`, looked at but not loaded."""
    if config.model_from is None:
        return None
    wanted = config.model_from
    try:
        source = open_weights(wanted.path, wanted.digest)
    except (ValueError, OSError) as error:
        raise ModelUnusable(f"model_from.path {wanted.path}: {error}") from error
    if source.kind != wanted.kind:
        raise ModelUnusable(f"model_from.kind is {wanted.kind!r}, but {wanted.path} is of kind {source.kind!r}")
    return source


def make_initial_weights(
    decoder: Decoder, source: WeightsSource | None, seed: int | None, report: Report
) -> InitialWeights:
    """Starting weights from the source, or random ones; neither: a checkpoint gives them."""
    if source is None:
        return InitialWeights(decoder, seed, percents(report, "InitialisingWeights"))
    return InitialWeights(decoder, source.store, percents(report, "LoadingWeights"), str(source.path))


def parse_model(fields: Mapping[str, Any]) -> ModelConfig:
    """The configuration's `model` section. Raises ConfigError that names the field."""
    try:
        scaling = fields.get("rope_scaling")
        eos = tuple(fields.get("eos_token_ids", ()))
        return ModelConfig(
            **{**fields, "rope_scaling": RopeScaling(**scaling) if scaling else None, "eos_token_ids": eos}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model: {error}".replace("ModelConfig.__init__() ", "")) from error


def check_length(config: TrainerConfig, model: ModelConfig) -> None:
    """Raises ConfigError where the model has no positions for the tokens of a sequence."""
    length, most = config.training.sequence_length, model.max_position_embeddings
    if length > most:
        raise ConfigError(f"training.sequence_length {length} is more than the model's max_position_embeddings {most}")


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


def percents(report: Report, what: str) -> Callable[[int, int], None]:
    """A progress callback that reports every tenth of the way once."""
    said = -1

    def progress(done: int, total: int) -> None:
        nonlocal said
        if (tenth := 10 * done // max(1, total)) > said:
            said = tenth
            report(f"{what} {10 * tenth} %")

    return progress
