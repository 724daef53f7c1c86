"""The layers of each pipeline stage, and the slices of the model that one rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed import ProcessGroup

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.lora import LoraSettings, adapt, adapter_parts
from stoker.model.parameter import Part
from stoker.pod.config_file import ConfigError
from stoker.pod.pipeline.stage_cut import cut_layers
from stoker.pod.plan.model_size import ModelSize
from stoker.pod.plan.stage import layer_costs
from stoker.trainer.protocol.parallel_dims import ParallelDims


class Slices:
    """The part of a model that one rank holds: its stages by number, in the order of the forward pass."""

    def __init__(self, decoders: Mapping[int, Decoder]) -> None:
        self.decoders = dict(decoders)

    @property
    def config(self) -> ModelConfig:
        """The configuration of the whole model."""
        return next(iter(self.decoders.values())).config

    @property
    def ops(self) -> Ops:
        """The kernels of all slices."""
        return next(iter(self.decoders.values())).ops

    def named_parts(self) -> Iterator[Part]:
        """Yield the parts of all slices."""
        for decoder in self.decoders.values():
            yield from decoder.named_parts()

    def init_part(self, part: Part, seed: int) -> None:
        """Initialise one part (see `Decoder.init_part`)."""
        next(iter(self.decoders.values())).init_part(part, seed)


Model = Decoder | Slices
"""What one rank holds: the whole model, or the slices of its pipeline stages."""


def all_parts(model: Model) -> list[Part]:
    """Return the parts of a model and of its adapters."""
    return [*model.named_parts(), *(part for decoder in slices_of(model).values() for part in adapter_parts(decoder))]


def slices_of(model: Model) -> Mapping[int, Decoder]:
    """Return the decoders of a rank by stage number; a whole model is stage 0."""
    return model.decoders if isinstance(model, Slices) else {0: model}


def empty_model(
    config: ModelConfig,
    ops: Ops,
    dims: ParallelDims,
    stage: int,
    sequence_length: int,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    expert_group: ProcessGroup | None = None,
    lora: LoraSettings | None = None,
) -> Model:
    """Return the model of a rank on the meta device, fp32: the whole one, or its slices of a pipeline.

    Args:
        stage: the rank's index on the pipeline axis.
        sequence_length: tokens of a sequence, for the cost of attention.
        group: the tensor-parallel ranks.
        sequence_parallel: hidden states between the products are cut by tokens over that group.
        expert_group: the ranks that share one set of experts.
        lora: add adapters, and freeze everything else.

    Raises:
        ConfigError: the model has fewer layers than the pipeline has stages, its experts do not fit the grid (see
            `check_experts`), or it cannot be cut over a group; the message shows the arithmetic.
    """

    def decoder(layers: range | None) -> Decoder:
        made: Any = {"group": group, "sequence_parallel": sequence_parallel, "layers": layers}
        try:
            held = Decoder(config, ops, dtype=torch.float32, device="meta", expert_group=expert_group, **made)
        except ValueError as error:
            raise ConfigError(f"parallelism: {error}") from error
        if lora is not None:
            adapt(held, lora)
        return held

    check_experts(config, dims)
    if dims.pipeline == 1:
        return decoder(None)
    layers = stage_layers(config, dims.pipeline * dims.stages_per_rank, sequence_length)
    return Slices({number: decoder(layers[number]) for number in range(stage, len(layers), dims.pipeline)})


def check_experts(config: ModelConfig, dims: ParallelDims) -> None:
    """Check that the model and its experts, if it has any, fit the grid.

    Raises:
        ConfigError: expert parallelism without experts.
    """
    if dims.expert > 1 and not config.num_experts:
        raise ConfigError(
            f"parallelism.expert {dims.expert} needs a model with experts, got architecture {config.architecture}"
        )


def stage_layers(model: ModelConfig, num_stages: int, sequence_length: int) -> Sequence[range]:
    """Return the layers of every stage: as even in estimated cost as they can be, embedding and output layer counted.

    Raises:
        ConfigError: the model has fewer layers than stages.
    """
    costs = layer_costs(ModelSize.from_fields(asdict(model)), sequence_length)
    try:
        return cut_layers(costs, num_stages)
    except ValueError as error:
        raise ConfigError(f"parallelism.pipeline x stagesPerRank: {error}") from error
