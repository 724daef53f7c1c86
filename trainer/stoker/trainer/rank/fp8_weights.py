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
from stoker.model.kernels.fp8 import MULTIPLE, Cut, Fp8Weight, fp8_of, set_fp8
from stoker.model.parallel import ColumnParallelLinear, RowParallelLinear
from stoker.pod.config_file import ConfigError
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
    problems = _size_problems(model, config.parallelism.tensor)
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < FIRST_CAPABILITY:
        shown = ".".join(map(str, found))
        problems.append(f"needs a GPU of compute capability 8.9 or more, this one has {shown}")
    if problems:
        raise ConfigError("\n".join(f"memory.precision fp8 {problem}; allowed: bf16" for problem in problems))


def _size_problems(model: ModelConfig, tensor: int) -> list[str]:
    sizes = {
        "hiddenSize": (model.hidden_size, 1),
        "numHeads x headDim": (model.num_heads * model.head_dim, tensor),
        "numKvHeads x headDim": (model.num_kv_heads * model.head_dim, tensor),
    }
    if len(model.expert_layers) < model.num_layers:
        sizes["intermediateSize"] = (model.intermediate_size, tensor)
    return [
        f"needs {name} {size}{f' / parallelism.tensor {cut}' if cut > 1 else ''} to be a multiple of {MULTIPLE}"
        for name, (size, cut) in sizes.items()
        if size % cut or size // cut % MULTIPLE
    ]


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
