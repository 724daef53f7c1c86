"""Contradictions of a configuration with itself, the model or this machine, refused before anything is loaded.

Every function raises ConfigError with the field, its value and what is allowed.
"""

from __future__ import annotations

import torch

from stoker.engine.config import EngineConfig, ports_of_copy
from stoker.engine.hosted_memory import host_bytes
from stoker.engine.listen_address import parse_listen
from stoker.engine.machine_memory import refuse_oversize
from stoker.engine.shared_experts import data_ranks, shares_experts
from stoker.model.config import ModelConfig
from stoker.model.tensor_group import kv_head_shard
from stoker.pod.capabilities import refusals
from stoker.pod.config_file import ConfigError


def refuse_unbuilt(config: EngineConfig) -> None:
    if refused := refusals("engine", config):
        raise ConfigError("\n".join(refused))
    if config.parallelism.data > 1 and config.device == "auto" and torch.cuda.is_available():
        raise ConfigError("device must be cpu or cuda where parallelism.data is above 1, got auto")  # each has its GPUs
    if config.deterministic and config.threads not in (None, 1):
        raise ConfigError(f"threads must be 1 where deterministic is true, got {config.threads}")


def refuse_cache_events(config: EngineConfig) -> None:
    """Refuse events of a cache that there is not."""
    if config.cache_events is not None and not config.cache.prefix_cache:
        raise ConfigError("cache_events needs cache.prefix_cache true, got false")


def refuse_transfer(config: EngineConfig, device: str) -> None:
    """Refuse a hand-over that this engine cannot do."""
    if config.transfer.listen is None:
        return
    _, port = parse_listen(config.transfer.listen, keyed=config.transfer.key_file is not None)
    parallelism = config.parallelism
    copies = parallelism.data - config.transfer.copy_number  # this one and those behind it
    most = 65536 - copies * ports_of_copy(parallelism.tensor * parallelism.pipeline)
    if port > most:
        shape = f"parallelism.tensor {parallelism.tensor} and pipeline {parallelism.pipeline}"
        shape += f" in {copies} copies" if copies > 1 else ""
        text = f"with {shape} its port must be at most {most}, got {port}"
        raise ConfigError(f"transfer.listen {config.transfer.listen!r}: {text}")
    if device == "cpu" and "cuda-ipc" in (config.transfer.transports or ()):
        raise ConfigError("transfer.transports: cuda-ipc needs device cuda, got cpu")
    if {"cuda-ipc", "nixl", "tcp"} <= set(config.transfer.transports or ()):
        raise ConfigError("transfer.transports: cuda-ipc, nixl and tcp need three ports, a rank has two: leave one out")
    if not config.cache.prefix_cache:
        raise ConfigError("transfer.listen needs cache.prefix_cache, got false")
    if config.replica.pods > 1 and config.transfer.key_file is None:
        raise ConfigError(f"transfer.key_file is needed with replica.pods {config.replica.pods}")


def refuse_uneven(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse ranks that cannot share the model."""
    tensor, pipeline = config.parallelism.tensor, config.parallelism.pipeline
    if pipeline > model.num_layers:
        raise ConfigError(
            f"parallelism.pipeline must be at most {model.num_layers}, the model's layers, got {pipeline}"
        )
    if kv_head_shard(model.num_kv_heads, tensor) is None:
        raise ConfigError(
            f"parallelism.tensor {tensor} is neither a divisor nor a multiple of the model's {model.num_kv_heads} key "
            "and value heads"
        )
    refuse_uneven_experts(config, model)
    for name, total in (
        ("attention heads", model.num_heads),
        (
            "columns of the feed-forward part",
            model.intermediate_size if len(model.expert_layers) < model.num_layers else 0,
        ),
    ):
        if total % tensor:
            raise ConfigError(f"parallelism.tensor {tensor} does not divide the model's {total} {name}")


def refuse_uneven_experts(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse a tensor group that cannot share the experts evenly: in runs, and each run cut over its ranks."""
    tensor, expert = config.parallelism.tensor, config.parallelism.expert
    if shares_experts(config):
        refuse_uneven_sharing(config)
    elif tensor % expert:
        raise ConfigError(f"parallelism.expert {expert} does not divide parallelism.tensor {tensor}: 1 or a divisor")
    if not model.expert_layers:
        if expert > 1:
            raise ConfigError(f"parallelism.expert must be 1 for a model without experts, got {expert}")
        return
    assert model.num_experts is not None, "there are layers with experts"
    if model.num_experts % expert:
        raise ConfigError(f"parallelism.expert {expert} does not divide the model's {model.num_experts} experts")
    if model.expert_size % max(tensor // expert, 1):
        cut = f"parallelism.tensor {tensor}" + (f" / parallelism.expert {expert}" if expert > 1 else "")
        raise ConfigError(f"{cut} does not divide the model's {model.expert_size} columns of an expert")


def refuse_uneven_sharing(config: EngineConfig) -> None:
    """Refuse experts over data-parallel ranks that is not built."""
    parallelism, scheduler = config.parallelism, config.scheduler
    data = data_ranks(config)
    shared = f"with parallelism.data {data} and parallelism.expert {parallelism.expert}"
    if parallelism.expert != data:
        raise ConfigError(
            f"parallelism.expert must be 1, a divisor of parallelism.tensor {parallelism.tensor}, or "
            f"parallelism.data {data}, got {parallelism.expert}"
        )
    for name in ("tensor", "pipeline"):
        if getattr(parallelism, name) > 1:
            raise ConfigError(f"parallelism.{name} must be 1 {shared}, got {getattr(parallelism, name)}")
    if scheduler.overlap:
        raise ConfigError(f"scheduler.overlap must be false or left out {shared}, got true")


def refuse_oversize_experts(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> None:
    """Refuse experts in main memory that this machine has not in all."""
    in_host = config.parallelism.tensor * host_bytes(config, model, dtype, range(model.num_layers))
    copies, pods = config.parallelism.data, config.replica.pods
    refuse_oversize(f"experts.on_device {config.experts.on_device}", in_host * copies // pods, "cpu")


def refuse_missing_gpus(config: EngineConfig, device: str) -> None:
    found = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and ranks_here(config) > found:
        each = f" in each of {config.replica.pods} pods" if config.replica.pods > 1 else ""
        parallelism = config.parallelism
        stages = f" x parallelism.pipeline {parallelism.pipeline}" if parallelism.pipeline > 1 else ""
        needed = f"needs {ranks_here(config)} GPUs{each}" if each or stages else "needs as many GPUs"
        raise ConfigError(f"parallelism.tensor {parallelism.tensor}{stages} {needed}, {found} are visible here")


def ranks_here(config: EngineConfig) -> int:
    """Ranks of one core in one pod."""
    return config.parallelism.tensor * config.parallelism.pipeline // config.replica.pods
