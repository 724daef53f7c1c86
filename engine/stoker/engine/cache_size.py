"""Sizes of the pools of blocks: on the device by number, bytes or what the weights leave free; and in main memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from stoker.engine.config import EngineConfig
from stoker.engine.hosted_memory import host_bytes, slot_bytes
from stoker.engine.machine_memory import refuse_oversize, smallest_free_bytes
from stoker.engine.plan_checks import ranks_here
from stoker.engine.stage_cut import stage_layers, stage_of, stage_parameters
from stoker.model.config import ModelConfig
from stoker.model.paged_attend import KVCache
from stoker.model.paged_prompts import prompt_keys, scratch_bytes
from stoker.pod.config_file import ConfigError

CPU_CACHE_LIMIT_BYTES = 4 * 2**30
"""Largest default cache on a CPU, whose memory other programs share; `cache.memory_bytes` may be larger."""


def count_blocks(
    config: EngineConfig,
    model: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    others_free_bytes: int | None = None,
    kept_bytes: int = 0,
) -> int:
    """Blocks of the pool: by number, by size, or from the memory that the weights and `kept_bytes` leave free on the
    fullest rank."""
    cache, tensor = config.cache, config.parallelism.tensor
    stages = stage_layers(model, config.parallelism.pipeline)
    layer_bytes = KVCache.block_bytes(model, block_size=block_size, dtype=dtype, tp_size=tensor) // model.num_layers
    block_bytes = max(map(len, stages)) * layer_bytes
    if cache.num_blocks is not None:
        refuse_oversize(f"cache.num_blocks {cache.num_blocks}", cache.num_blocks * block_bytes, device)
        return cache.num_blocks
    pool_bytes = cache.memory_bytes
    if pool_bytes is not None:
        refuse_oversize(f"cache.memory_bytes {pool_bytes}", pool_bytes, device)
    if pool_bytes is None:
        free = smallest_free_bytes(device, others_free_bytes)
        free -= kept_bytes
        if device == "cuda":
            if config.transfer.listen is not None:
                free -= config.transfer.zone_blocks * block_bytes
            return blocks_beside_weights(config, model, dtype, free, layer_bytes, block_size)
        weight_bytes, copies = model.num_parameters * dtype.itemsize, config.parallelism.data
        weight_bytes += tensor * slot_bytes(config, model, dtype, range(model.num_layers))
        free -= copies * weight_bytes // config.replica.pods
        pool_bytes = int(cache.memory_fraction * free)
        pool_bytes = min(pool_bytes, CPU_CACHE_LIMIT_BYTES) // (ranks_here(config) * copies)
    return blocks_in(pool_bytes, block_bytes, block_size)


def blocks_beside_weights(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, free_bytes: int, layer_bytes: int, block_size: int
) -> int:
    """Blocks that fit the GPU of every stage beside its weights, where each has so much free memory."""
    found = []
    for layers in stage_layers(model, config.parallelism.pipeline):
        weight_bytes = stage_parameters(model, layers) * dtype.itemsize // config.parallelism.tensor
        weight_bytes += slot_bytes(config, model, dtype, layers) - host_bytes(config, model, dtype, layers)
        pool_bytes = int(config.cache.memory_fraction * (free_bytes - weight_bytes))
        found.append(blocks_in(pool_bytes, len(layers) * layer_bytes, block_size))
    return min(found)


def blocks_in(pool_bytes: int, block_bytes: int, block_size: int) -> int:
    if pool_bytes < block_bytes:
        raise ConfigError(f"cache: {pool_bytes} bytes hold no block of {block_bytes} bytes ({block_size} tokens)")
    return pool_bytes // block_bytes


def prompt_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Memory in which a rank lays out the keys of long prompts for flash-attn-4; at least what it needs."""
    scheduler = config.scheduler
    longest = model.max_position_embeddings if scheduler.max_model_len is None else scheduler.max_model_len
    num_keys = prompt_keys(longest, scheduler.max_batch_tokens)
    heads = max(model.num_kv_heads // config.parallelism.tensor, 1)
    return scratch_bytes(heads, model.head_dim, num_keys, dtype)


def pod_block_bytes(config: EngineConfig, model: ModelConfig, block_size: int, dtype: torch.dtype) -> Iterator[int]:
    """Memory of one block on the ranks of each pod."""
    tensor, pipeline = config.parallelism.tensor, config.parallelism.pipeline
    stages, here = stage_layers(model, pipeline), ranks_here(config)
    layer_bytes = KVCache.block_bytes(model, block_size=block_size, dtype=dtype, tp_size=tensor) // model.num_layers
    for first in range(0, tensor * pipeline, here):
        layers = (len(stages[stage_of(rank, tensor, pipeline)]) for rank in range(first, first + here))
        yield sum(layers) * layer_bytes


def count_host_blocks(config: EngineConfig, model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Slots of the host tier."""
    cache = config.cache
    if cache.host_memory_bytes is None:
        for name, tier in (("disk", cache.disk), ("store", cache.store)):
            if tier is not None:
                raise ConfigError(f"cache.{name} needs cache.host_memory_bytes: blocks come and go through that memory")
        return 0
    if not cache.prefix_cache:
        raise ConfigError("cache.host_memory_bytes needs cache.prefix_cache true: saved blocks return through it")
    refuse_oversize(f"cache.host_memory_bytes {cache.host_memory_bytes}", cache.host_memory_bytes, "cpu")
    block_bytes = max(pod_block_bytes(config, model, block_size, dtype))
    if cache.host_memory_bytes < block_bytes:
        raise ConfigError(
            f"cache.host_memory_bytes must hold a block of {block_bytes} bytes ({block_size} tokens),"
            f" got {cache.host_memory_bytes}"
        )
    return cache.host_memory_bytes // block_bytes
