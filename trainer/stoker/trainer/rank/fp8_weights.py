"""The weights of a run in fp8: which ones are multiplied in eight bits, and when their copies are out of date.

The projections of attention and of dense feed-forward layers are; embedding, head, norms, adapters, routers and experts
stay in bf16, and masters and optimizer state in fp32. Called by `build` at the start, and by `zero` and `bucket` when
weights change.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.fp8 import Cut, Fp8Weight, fp8_of, set_fp8
from stoker.model.parallel import ColumnParallelLinear, RowParallelLinear
from stoker.pod.config_file import ConfigError
from stoker.pod.plan.layout_rules import problems_of_eight_bits
from stoker.trainer.protocol.config import TrainerConfig

FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs whose tensor cores take eight bits."""


def check_fp8(config: TrainerConfig, model: ModelConfig, device: torch.device) -> None:
    """Check that model and device can compute in eight bits.

    Raises:
        ConfigError: they cannot; the message names the field and shows the arithmetic.
    """
    if config.memory.precision != "fp8":
        return
    problems = problems_of_eight_bits(
        hidden=model.hidden_size,
        queries=model.num_heads * model.head_dim,
        keys=model.num_kv_heads * model.head_dim,
        feed_forward=model.intermediate_size if len(model.expert_layers) < model.num_layers else None,
        tensor=config.parallelism.tensor,
    )
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < FIRST_CAPABILITY:
        shown = ".".join(map(str, found))
        needed = ".".join(map(str, FIRST_CAPABILITY))
        problems.append(
            f"precision fp8 needs a GPU of compute capability {needed} or more, this one has {shown}; "
            "allowed: bf16, fp16, fp32"
        )
    if problems:
        raise ConfigError("\n".join(f"memory.{problem}" for problem in problems))


def use_fp8(config: TrainerConfig, decoder: Decoder) -> None:
    """Let the decoder's projections be computed in eight bits, if the run is in fp8."""
    if config.memory.precision != "fp8":
        return
    for module in decoder.blocks.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            cut: Cut = "rows" if module.shard_dim == 0 else "columns"
            group = module.group
            set_fp8(module.weight, Fp8Weight(config.memory.fp8_recipe, group, None if group is None else cut))


def renew_fp8(parameters: Iterable[Tensor]) -> None:
    """Note that the values of these parameters have changed."""
    for parameter in parameters:
        if (fp8 := fp8_of(parameter)) is not None:
            fp8.renew()


def release_fp8(parameters: Iterable[Tensor]) -> None:
    """Give the memory of these parameters' copies back."""
    for parameter in parameters:
        if (fp8 := fp8_of(parameter)) is not None:
            fp8.release()
