"""Plan an engine: every choice that its ranks need, checked against the model and this machine. Loads nothing.

Called once by `core.build`; the frozen `EnginePlan` is then sent to every rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from stoker.engine.cache_size import count_blocks, count_host_blocks, prompt_bytes
from stoker.engine.config import EngineConfig, Preemption
from stoker.engine.hosted_memory import experts_on_device
from stoker.engine.plan_checks import (
    ranks_here,
    refuse_cache_events,
    refuse_missing_gpus,
    refuse_oversize_experts,
    refuse_transfer,
    refuse_unbuilt,
    refuse_uneven,
)
from stoker.engine.shared_experts import data_ranks, shares_experts
from stoker.model.config import ModelConfig
from stoker.model.kernels.kernel_set import resolve_serving_kernels
from stoker.model.kernels.ops import Ops
from stoker.model.weights.source import WeightsSource
from stoker.pod.config_file import ConfigError

BLOCK_SIZES = {"cuda": 64, "cpu": 16}
"""Default tokens per block. Attention over larger blocks is faster on a GPU (figures in docs/serving.md); smaller
blocks share more of a prefix."""

MIXED_WORK = 4.2e12
"""Parameters that a token meets, times tokens, that an H200 computes in about 11 ms in bfloat16."""
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
    data: int = 1
    """Data-parallel ranks that share the experts; 1: each has all of them."""
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
    scheduler, shared = config.scheduler, shares_experts(config)
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
        expert=1 if shared else config.parallelism.expert,
        data=data_ranks(config) if shared else 1,
        pods=config.replica.pods,
        experts_on_device=on_device,
        mixed_tokens=choose_mixed_tokens(config, source.config, device),
        overlap=choose_overlap(config, device, on_device),
        graphs=config.graphs and on_device is None and not shared,
        capture_s=config.capture_s,
        num_host_blocks=count_host_blocks(config, source.config, block_size, dtype),
        preemption=config.cache.preemption,
    )


def choose_device(name: str) -> str:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device: cuda is asked for, but this machine has no CUDA device; allowed: auto, cpu")
    return "cuda" if has_cuda and name != "cpu" else "cpu"


def choose_overlap(config: EngineConfig, device: str, on_device: int | None) -> bool:
    """Whether a step is prepared while one is computed: as configured, else on a GPU unless the host has a part in each
    step."""
    if shares_experts(config):
        return False
    wanted = config.scheduler.overlap
    return device == "cuda" and on_device is None if wanted is None else wanted


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
    # A step with experts reads nearly all of them whatever its size: small pieces of prompts only read them more often.
    return mixed_tokens(model.num_active_parameters // config.parallelism.tensor, scheduler.max_batch_tokens)


def mixed_tokens(active_parameters: int, most: int) -> int:
    """Prompt tokens beside decodes where a token meets so many parameters of a rank, of at most `most` in a step."""
    return max(min(int(MIXED_WORK / active_parameters) // 64 * 64, most), min(LEAST_MIXED_TOKENS, most))


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
