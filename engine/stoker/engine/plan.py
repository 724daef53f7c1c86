"""Plan an engine: every choice that its ranks need, checked against the model and this machine. Loads nothing.

Called once by `core.build`; the frozen `EnginePlan` is then sent to every rank.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import torch

from stoker.engine.config import EngineConfig, Preemption
from stoker.engine.hosted_memory import experts_on_device, host_bytes, slot_bytes
from stoker.engine.stage_cut import stage_layers, stage_parameters
from stoker.model.config import ModelConfig
from stoker.model.kernels.kernel_set import resolve_serving_kernels
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache
from stoker.model.paged_prompts import prompt_keys, scratch_bytes
from stoker.model.tensor_group import kv_head_shard
from stoker.model.weights.source import WeightsSource
from stoker.pod.capabilities import refusals
from stoker.pod.config_file import ConfigError

CPU_CACHE_LIMIT_BYTES = 4 * 2**30
"""Largest default cache on a CPU, whose memory other programs share; `cache.memory_bytes` may be larger."""

BLOCK_SIZES = {"cuda": 64, "cpu": 16}
"""Default tokens per block. Attention over larger blocks is faster on a GPU (figures in docs/serving.md); smaller
blocks share more of a prefix."""

MIXED_WORK = 4.2e12
"""Parameters times tokens that an H200 computes in about 11 ms in bfloat16."""
LEAST_MIXED_TOKENS = 64

BFLOAT16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""With one of these a CPU multiplies bfloat16 faster than float32."""


@dataclass(frozen=True)
class EnginePlan:
    """All choices of one engine, made once and sent to every rank. Can be pickled."""

    model_path: str
    digest: str | None
    device: str
    dtype: torch.dtype
    kernels: str
    attention: str
    deterministic: bool
    threads: int
    """Intra-op threads of one rank."""
    block_size: int
    num_blocks: int
    max_model_len: int
    max_batch_tokens: int
    num_seats: int
    tensor: int
    """Ranks that share each layer."""
    pipeline: int = 1
    """Stages of neighbouring layers."""
    expert: int = 1
    """Runs of whole experts over the tensor ranks; 1: each of them has a slice of every expert."""
    experts_on_device: int | None = None
    """Experts of each layer that a rank keeps on its device, of those it holds; None: all."""
    mixed_tokens: int | None = None
    """Prompt tokens of a step beside decodes, while few prompts wait; None: as many as fit."""
    overlap: bool = False
    """Prepare the next step while the device computes one."""
    graphs: bool = True
    """Capture steps as CUDA graphs."""
    capture_s: float = 0.0
    """Seconds in which graphs are captured before the first request, beyond the first few."""
    num_host_blocks: int = 0
    """Slots of the host tier; 0: none."""
    preemption: Preemption = "auto"
    timed: bool = False
    """Keep the device times of steps for a time line."""
    pods: int = 1
    """Pods that the ranks are spread over."""
    source_digest: str | None = None
    """Digest under which the model was fetched from its URI."""

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


def plan_engine(config: EngineConfig, source: WeightsSource, others_free_bytes: int | None = None) -> EnginePlan:
    """Check the configuration against the model and this machine. Loads nothing.

    `others_free_bytes`: least free memory of the further ranks' devices, where there are some.
    """
    refuse_unbuilt(config)
    refuse_uneven(config, source.config)
    device = choose_device(config.device)
    refuse_missing_gpus(config, device)
    refuse_transfer(config, device)
    refuse_cache_events(config)
    dtype = choose_dtype(config.model.dtype, device)
    kernels = resolve_serving_kernels(config.kernels, device, dtype, deterministic=config.deterministic)
    ops = Ops(kernels, config.deterministic)
    block_size = config.cache.block_size or BLOCK_SIZES[device]
    attention = ops.attention(config.attention, dtype, "paged")
    kept_bytes = prompt_bytes(config, source.config, dtype) if attention == "flash" else 0
    on_device = experts_on_device(config, source.config)
    refuse_oversize_experts(config, source.config, dtype)
    num_blocks = count_blocks(config, source.config, block_size, dtype, device, others_free_bytes, kept_bytes)
    scheduler = config.scheduler
    return EnginePlan(
        model_path=config.model.path,
        digest=config.model.digest,
        device=device,
        dtype=dtype,
        kernels=ops.kernels,
        attention=attention,
        deterministic=config.deterministic,
        threads=choose_threads(config),
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=choose_length(config, source.config, num_blocks * block_size),
        max_batch_tokens=scheduler.max_batch_tokens,
        num_seats=min(scheduler.max_requests, scheduler.max_batch_tokens),
        tensor=config.parallelism.tensor,
        pipeline=config.parallelism.pipeline,
        expert=config.parallelism.expert,
        pods=config.replica.pods,
        experts_on_device=on_device,
        mixed_tokens=choose_mixed_tokens(config, source.config, device),
        overlap=device == "cuda" and on_device is None if scheduler.overlap is None else scheduler.overlap,
        graphs=config.graphs and on_device is None,
        capture_s=config.capture_s,
        num_host_blocks=count_host_blocks(config, source.config, block_size, dtype),
        preemption=config.cache.preemption,
        timed=config.timeline is not None,
    )


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
    tensor = config.parallelism.tensor
    if port + 2 * tensor > 65535:
        most = f"with parallelism.tensor {tensor} its port must be at most {65535 - 2 * tensor}, got {port}"
        raise ConfigError(f"transfer.listen {config.transfer.listen!r}: {most}")
    if device == "cpu" and "cuda-ipc" in (config.transfer.transports or ()):
        raise ConfigError("transfer.transports: cuda-ipc needs device cuda, got cpu")
    if not config.cache.prefix_cache:
        raise ConfigError("transfer.listen needs cache.prefix_cache, got false")
    parallelism = config.parallelism
    for name in ("pipeline", "data"):
        if (ranks := getattr(parallelism, name)) > 1:
            raise ConfigError(f"transfer.listen needs parallelism.{name} 1, got {ranks}")
    if config.replica.pods > 1:
        raise ConfigError(f"transfer.listen needs replica.pods 1, got {config.replica.pods}")


def parse_listen(listen: str, *, keyed: bool) -> tuple[str, int]:
    """Host and port of `transfer.listen`. `keyed`: a secret protects it, so that it may be reached from outside."""
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65533:
        raise ConfigError(f"transfer.listen must be host:port with a port from 0 to 65533, got {listen!r}")
    if not keyed and not is_loopback(host):
        message = "without one only loopback addresses are allowed, such as 127.0.0.1"
        raise ConfigError(f"transfer.listen {listen!r} needs transfer.key_file; {message}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach the address."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def refuse_uneven(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse ranks that cannot share the model."""
    tensor, pipeline = config.parallelism.tensor, config.parallelism.pipeline
    if pipeline > model.num_layers:
        raise ConfigError(
            f"parallelism.pipeline must be at most {model.num_layers}, the model's layers, got {pipeline}"
        )
    if pipeline > 1 and config.replica.pods > 1:
        raise ConfigError(f"parallelism.pipeline must be 1 with replica.pods {config.replica.pods}, got {pipeline}")
    if kv_head_shard(model.num_kv_heads, tensor) is None:
        raise ConfigError(
            f"parallelism.tensor {tensor} is neither a divisor nor a multiple of the model's {model.num_kv_heads} key "
            "and value heads"
        )
    refuse_uneven_experts(config, model)
    for name, total in (
        ("attention heads", model.num_heads),
        ("tokens of the vocabulary", model.vocab_size),
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
    if tensor % expert:
        raise ConfigError(f"parallelism.expert {expert} does not divide parallelism.tensor {tensor}: 1 or a divisor")
    if not model.expert_layers:
        if expert > 1:
            raise ConfigError(f"parallelism.expert must be 1 for a model without experts, got {expert}")
        return
    assert model.num_experts is not None, "there are layers with experts"
    if model.num_experts % expert:
        raise ConfigError(f"parallelism.expert {expert} does not divide the model's {model.num_experts} experts")
    if model.expert_size % (tensor // expert):
        cut = f"parallelism.tensor {tensor}" + (f" / parallelism.expert {expert}" if expert > 1 else "")
        raise ConfigError(f"{cut} does not divide the model's {model.expert_size} columns of an expert")


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


def choose_device(name: str) -> str:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device: cuda is asked for, but this machine has no CUDA device; allowed: auto, cpu")
    return "cuda" if has_cuda and name != "cpu" else "cpu"


def choose_dtype(name: str, device: str) -> torch.dtype:
    """The named dtype. `auto` is bfloat16 on a GPU and on a CPU with instructions for it, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return torch.bfloat16 if device == "cuda" or cpu_features() & BFLOAT16_FEATURES else torch.float32


def cpu_features() -> set[str]:
    """The CPU's instruction sets by their Linux names; empty where the system does not list them."""
    listed = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {name for line in listed.splitlines() if line.startswith(("flags", "Features")) for name in line.split()}


def choose_threads(config: EngineConfig) -> int:
    if config.deterministic:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.threads or max(1, cores // (ranks_here(config) * config.parallelism.data))


def choose_mixed_tokens(config: EngineConfig, model: ModelConfig, device: str) -> int | None:
    """Prompt tokens of a step beside decodes: as configured, else what a GPU computes in about 11 ms."""
    scheduler = config.scheduler
    if scheduler.mixed_tokens is not None or device == "cpu":
        return scheduler.mixed_tokens
    return mixed_tokens(model.num_parameters // config.parallelism.tensor, scheduler.max_batch_tokens)


def mixed_tokens(num_parameters: int, most: int) -> int:
    """Prompt tokens beside decodes for a rank of this size, of at most `most` tokens in a step."""
    return max(min(int(MIXED_WORK / num_parameters) // 64 * 64, most), min(LEAST_MIXED_TOKENS, most))


def choose_length(config: EngineConfig, model: ModelConfig, capacity: int) -> int:
    """Longest prompt plus output: as configured, else the least of the model's limit and the cache's `capacity` in
    tokens."""
    wanted = config.scheduler.max_model_len
    if wanted is None:
        return min(model.max_position_embeddings, capacity)
    for name, limit in (
        ("max_position_embeddings of the model", model.max_position_embeddings),
        ("tokens of the cache", capacity),
    ):
        if wanted > limit:
            raise ConfigError(f"scheduler.max_model_len must be at most {limit}, the {name}, got {wanted}")
    return wanted


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
    for name in ("tensor", "pipeline"):
        if (ranks := getattr(config.parallelism, name)) > 1:
            raise ConfigError(
                f"cache.host_memory_bytes is not supported yet with parallelism.{name} {ranks}; allowed: 1"
            )
    refuse_oversize(f"cache.host_memory_bytes {cache.host_memory_bytes}", cache.host_memory_bytes, "cpu")
    block_bytes = KVCache.block_bytes(model, block_size=block_size, dtype=dtype)
    if cache.host_memory_bytes < block_bytes:
        raise ConfigError(
            f"cache.host_memory_bytes must hold a block of {block_bytes} bytes ({block_size} tokens),"
            f" got {cache.host_memory_bytes}"
        )
    return cache.host_memory_bytes // block_bytes


def refuse_oversize(field: str, needed: int, device: str) -> None:
    """Refuse more than the machine has in all. What other programs hold now may be free later."""
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else main_memory("MemTotal")
    if total is not None and needed > total:
        raise ConfigError(f"{field} needs {needed} bytes, this {'GPU' if device == 'cuda' else 'machine'} has {total}")


def smallest_free_bytes(device: str, others_free_bytes: int | None) -> int:
    """Free memory of the rank that has least."""
    found = free_bytes(device)
    if found is None:
        raise ConfigError("cache.memory_bytes is needed: this system does not say how much memory is free")
    return found if others_free_bytes is None else min(found, others_free_bytes)


def free_bytes(device: str) -> int | None:
    """Bytes of memory that a new allocation can have; None where the system does not tell."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else main_memory("MemAvailable")


def main_memory(name: str) -> int | None:
    """Bytes in a line of Linux' /proc/meminfo; None on other systems."""
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
