"""The memory of experts whose weights wait in main memory: what a rank's device and its host hold.

Main memory holds all experts of a rank, also those that have a slot on the device: a slot is only ever written. Pure.

Called by `plan`.
"""

from __future__ import annotations

import torch

from stoker.engine.config import EngineConfig
from stoker.model.config import ModelConfig
from stoker.pod.config_file import ConfigError


def experts_on_device(config: EngineConfig, model: ModelConfig) -> int | None:
    """Return the slots of each layer on a rank; None where the device holds all experts. Raises ConfigError."""
    wanted = config.experts.on_device
    if wanted is None:
        return None
    if not model.expert_layers:
        raise ConfigError(f"experts.on_device must be left out for a model without experts, got {wanted}")
    held = experts_of_rank(config, model)
    if wanted > held:
        raise ConfigError(f"experts.on_device must be at most {held}, the experts of a layer on one rank, got {wanted}")
    return wanted if wanted < held else None


def experts_of_rank(config: EngineConfig, model: ModelConfig) -> int:
    """Count the experts of a layer of which a rank holds a part or all."""
    return (model.num_experts or 0) // config.parallelism.expert


def expert_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Count the bytes of a rank's part of one expert."""
    cuts = max(config.parallelism.tensor // config.parallelism.expert, 1)
    return 3 * model.hidden_size * (model.expert_size // cuts) * dtype.itemsize


def host_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, layers: range) -> int:
    """Count the bytes of a rank's experts in main memory; 0 where its device holds all."""
    if experts_on_device(config, model) is None:
        return 0
    return count_layers(model, layers) * experts_of_rank(config, model) * expert_bytes(config, model, dtype)


def slot_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, layers: range) -> int:
    """Count the bytes of a rank's slots; 0 where its device holds all."""
    slots = experts_on_device(config, model) or 0
    return count_layers(model, layers) * slots * expert_bytes(config, model, dtype)


def count_layers(model: ModelConfig, layers: range) -> int:
    """Count the layers with experts."""
    return sum(model.has_experts(layer) for layer in layers)
