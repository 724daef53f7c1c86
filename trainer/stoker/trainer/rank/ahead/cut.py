"""A run made smaller, with the launches of the whole one: few layers, few micro-batches, no files. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.model.config import ModelConfig
from stoker.pod.config_file import parse
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.parallel_dims import ParallelDims

LAYERS = 3
"""Layers of a stage: a first one, one between, a last one."""
MICRO_BATCHES = 2
"""Of a step without a pipeline: gradients are written by one and added to by the other."""


def cut_model(model: ModelConfig, dims: ParallelDims) -> ModelConfig:
    """Few layers, where all are alike; a model whose layers differ keeps them."""
    layers = LAYERS * dims.pipeline * dims.stages_per_rank
    differ = model.mlp_only_layers or model.decoder_sparse_step > 1 or model.max_window_layers
    return model if differ or layers >= model.num_layers else replace(model, num_layers=layers)


def cut_config(config: TrainerConfig, dims: ParallelDims) -> TrainerConfig:
    """Fewer micro-batches a step, no budget (its layers are `none` or `selective`), state in memory, not in files."""
    fields = config.model_dump()
    training, memory = fields["training"], fields["memory"]
    own = dims.micro_batches_per_rank(config.training)
    few = 2 * dims.pipeline if dims.pipeline > 1 else MICRO_BATCHES
    training["global_batch_size"] = min(own, few) * config.training.micro_batch_size * dims.data_parallel
    memory["activation_budget_gib"] = None
    if memory["nvme_offload"] is not None:
        memory |= {"nvme_offload": None, "cpu_offload": True}
    return parse(TrainerConfig, _json(fields))


def _json(value: Any) -> Any:
    """Lists for tuples, as a file has them."""
    if isinstance(value, dict):
        return {name: _json(inner) for name, inner in value.items()}
    return [_json(inner) for inner in value] if isinstance(value, tuple | list) else value
