"""From a configuration to an engine that can step: what is refused, how big the cache is, who computes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from stoker.engine.blocks import BlockManager
from stoker.engine.config import EngineConfig
from stoker.engine.engine import Limits, LLMEngine
from stoker.engine.executor import Executor, InProcess, OnDevice
from stoker.engine.rehearsal import rehearsal
from stoker.engine.runner import Runner
from stoker.engine.sampling import SamplingParams
from stoker.engine.scheduler import Scheduler
from stoker.engine.step_input import Opening, StepInput, TableEntry
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops, resolve_kernels
from stoker.model.memory import keep_freed_memory
from stoker.model.paged_attend import KVCache
from stoker.model.weights.source import WeightsSource, open_weights
from stoker.pod.config_file import ConfigError

CPU_CACHE_LIMIT_BYTES = 4 * 2**30
"""Without `cache.memory_bytes` the cache on a CPU takes no more: other programs share that memory."""

BFLOAT16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""With one of these a CPU multiplies bfloat16 faster than float32."""

Progress = Callable[[str], None]
"""Told what is being done, in words for people."""


@dataclass(frozen=True)
class Plan:
    """Every choice that a rank needs, made once and the same on all ranks. Can be pickled."""

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
    overlap: bool = False
    """The next step is prepared while one is under way."""
    graphs: bool = True
    """Decode steps are captured."""


def build_engine(config: EngineConfig, progress: Progress = lambda _: None) -> tuple[LLMEngine, Plan]:
    """Load the model and make everything ready.

    Raises:
        ConfigError: a field cannot be used, with what is allowed.
        ValueError: the weights cannot be loaded (WeightsError, CheckpointError).
    """
    source = open_weights(config.model.path, config.model.digest)
    plan = plan_engine(config, source)
    executor = make_executor(plan, progress)
    scheduler = Scheduler(
        BlockManager(plan.num_blocks, plan.block_size, config.cache.prefix_cache),
        max_batch_tokens=plan.max_batch_tokens,
        max_requests=plan.num_seats,
        max_queued_requests=config.scheduler.max_queued_requests,
        chunk_tokens=config.scheduler.chunk_tokens,
    )
    limits = Limits(source.config.vocab_size, plan.max_model_len, end_tokens(source))
    return LLMEngine(executor, scheduler, limits, overlap=plan.overlap), plan


def plan_engine(config: EngineConfig, source: WeightsSource) -> Plan:
    """Check the configuration against the model and this machine. Loads nothing."""
    refuse_unbuilt(config)
    refuse_uneven(config, source.config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.model.dtype, device)
    ops = Ops(resolve_kernels(config.kernels, device), config.deterministic)
    num_blocks = count_blocks(config, source.config, dtype, device)
    scheduler = config.scheduler
    return Plan(
        model_path=config.model.path,
        digest=config.model.digest,
        device=device,
        dtype=dtype,
        kernels=ops.kernels,
        attention=ops.attention(config.attention, dtype, "paged"),
        deterministic=config.deterministic,
        threads=choose_threads(config),
        block_size=config.cache.block_size,
        num_blocks=num_blocks,
        max_model_len=choose_length(config, source.config, num_blocks),
        max_batch_tokens=scheduler.max_batch_tokens,
        num_seats=min(scheduler.max_requests, scheduler.max_batch_tokens),
        tensor=config.parallelism.tensor,
        overlap=device == "cuda" if scheduler.overlap is None else scheduler.overlap,
        graphs=config.graphs,
    )


def make_executor(plan: Plan, progress: Progress = lambda _: None) -> Executor:
    if plan.tensor > 1:
        from stoker.engine.ranks import Ranks  # starts processes: only where they are wanted

        return Ranks(plan, progress)
    runner = load_runner(plan, None, progress)
    return OnDevice(runner) if plan.device == "cuda" else InProcess(runner)


def load_runner(plan: Plan, group: ProcessGroup | None, progress: Progress = lambda _: None) -> Runner:
    """One rank's weights and cache, on this rank's device. Sets the process's intra-op threads."""
    torch.set_num_threads(plan.threads)
    keep_freed_memory()
    source = open_weights(plan.model_path, plan.digest)
    ops = Ops(resolve_kernels(plan.kernels, plan.device), plan.deterministic)
    device = torch.device(plan.device, torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
    with _rehearsed(plan, source.config, ops, device, group):
        decoder = Decoder(source.config, ops, dtype=plan.dtype, device=device, group=group)
        source.load_into(decoder, lambda done, total: progress(f"LoadingWeights {100 * done // max(total, 1)} %"))
        decoder.requires_grad_(False).eval().pack_weights()
        progress("CompilingKernels")
    progress("AllocatingCache")
    cache = KVCache(
        source.config,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        dtype=plan.dtype,
        device=device,
        group=group,
    )
    runner = Runner(
        decoder,
        cache,
        num_seats=plan.num_seats,
        max_model_len=plan.max_model_len,
        max_batch_tokens=plan.max_batch_tokens,
        attention=plan.attention,
        graphs=plan.graphs,
    )
    progress("CapturingGraphs")
    while runner.warm(first=True):
        pass
    return runner


def _rehearsed(
    plan: Plan, model: ModelConfig, ops: Ops, device: torch.device, group: ProcessGroup | None
) -> AbstractContextManager[None]:
    """Only kernels that are compiled here need it, and only one rank alone can do it."""
    if ops.kernels != "fused" or group is not None:
        return nullcontext()
    return rehearsal(model, ops, dtype=plan.dtype, device=device, block_size=plan.block_size, attention=plan.attention)


def warm_up(executor: Executor) -> None:
    """One token through everything, so that the first request finds libraries and buffers ready. Leaves no trace but in a free block."""
    greedy = SamplingParams(temperature=0, seed=0)
    step = StepInput(
        number=-1,
        openings=(Opening(seat=0, tokens=(0,), num_prompt=1, choice=0, stop_tokens=(), params=greedy),),
        table=(TableEntry(seat=0, column=0, block=0),),
        cleared=(),
        copies=(),
        seats=(0,),
        starts=(0,),
        lengths=(1,),
        scored=(0,),
        sample_chunks=(0,),
        sample_seats=(0,),
    )
    executor.submit(step).result()


def tokenizer_folder(plan: Plan, work_dir: Path) -> Path:
    """Where a front finds the tokenizer's files: the model's folder, or for a single file a folder made from it."""
    path = Path(plan.model_path)
    if path.is_dir():
        return path
    folder = work_dir / "tokenizer"
    folder.mkdir(exist_ok=True)
    for name, content in open_weights(path).tokenizer_files.items():
        (folder / name).write_bytes(content)
    return folder


def end_tokens(source: WeightsSource) -> tuple[int, ...]:
    """Tokens that end an answer: those of config.json and of generation_config.json."""
    listed = json.loads(source.tokenizer_files.get("generation_config.json", b"{}")).get("eos_token_id")
    more = listed if isinstance(listed, list) else [listed]
    ids = (*source.config.eos_token_ids, *(token for token in more if isinstance(token, int)))
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < source.config.vocab_size))


def refuse_unbuilt(config: EngineConfig) -> None:
    for axis in ("pipeline", "data", "expert"):
        if getattr(config.parallelism, axis) != 1:
            raise ConfigError(f"not supported yet: parallelism.{axis} {getattr(config.parallelism, axis)}; allowed: 1")
    if config.api.fronts != 1:
        raise ConfigError(f"not supported yet: api.fronts {config.api.fronts}; allowed: 1")
    if config.deterministic and config.threads not in (None, 1):
        raise ConfigError(f"threads must be 1 where deterministic is true, got {config.threads}")


def refuse_uneven(config: EngineConfig, model: ModelConfig) -> None:
    """Each rank of a tensor group gets as many heads as the others."""
    tensor = config.parallelism.tensor
    for name, heads in (("attention heads", model.num_heads), ("key and value heads", model.num_kv_heads)):
        if heads % tensor:
            raise ConfigError(f"parallelism.tensor {tensor} does not divide the model's {heads} {name}")


def choose_device(name: str) -> str:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device: cuda is asked for, but this machine has no CUDA device; allowed: auto, cpu")
    return "cuda" if has_cuda and name != "cpu" else "cpu"


def choose_dtype(name: str, device: str) -> torch.dtype:
    """`auto`: bfloat16 on a GPU, and on a CPU with instructions for it; else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return torch.bfloat16 if device == "cuda" or cpu_features() & BFLOAT16_FEATURES else torch.float32


def cpu_features() -> set[str]:
    """Instruction sets by their Linux names; none where the system does not list them."""
    listed = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {name for line in listed.splitlines() if line.startswith(("flags", "Features")) for name in line.split()}


def choose_threads(config: EngineConfig) -> int:
    if config.deterministic:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.threads or max(1, cores // config.parallelism.tensor)


def choose_length(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """Longest prompt plus output: what is asked for, what the model allows, what the cache holds."""
    capacity = num_blocks * config.cache.block_size
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


def count_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: str) -> int:
    """How many blocks the pool gets, by number, by size, or from what the weights leave free."""
    cache, tensor = config.cache, config.parallelism.tensor
    block_bytes = KVCache.block_bytes(model, block_size=cache.block_size, dtype=dtype, tp_size=tensor)
    if cache.num_blocks is not None:
        refuse_oversize(f"cache.num_blocks {cache.num_blocks}", cache.num_blocks * block_bytes, device)
        return cache.num_blocks
    pool_bytes = cache.memory_bytes
    if pool_bytes is not None:
        refuse_oversize(f"cache.memory_bytes {pool_bytes}", pool_bytes, device)
    if pool_bytes is None:
        weight_bytes = model.num_parameters * dtype.itemsize
        free = free_bytes(device)
        free -= weight_bytes // tensor if device == "cuda" else weight_bytes
        pool_bytes = int(cache.memory_fraction * free)
        if device == "cpu":
            pool_bytes = min(pool_bytes, CPU_CACHE_LIMIT_BYTES) // tensor
    if pool_bytes < block_bytes:
        raise ConfigError(f"cache: {pool_bytes} bytes hold no block of {block_bytes} bytes ({cache.block_size} tokens)")
    return pool_bytes // block_bytes


def refuse_oversize(field: str, needed: int, device: str) -> None:
    """What can never fit is refused; what does not fit now may fit when another program has ended."""
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else main_memory("MemTotal")
    if total is not None and needed > total:
        raise ConfigError(f"{field} needs {needed} bytes, this {'GPU' if device == 'cuda' else 'machine'} has {total}")


def free_bytes(device: str) -> int:
    """Memory that a new allocation can have."""
    found = torch.cuda.mem_get_info()[0] if device == "cuda" else main_memory("MemAvailable")
    if found is None:
        raise ConfigError("cache.memory_bytes is needed: this system does not say how much memory is free")
    return found


def main_memory(name: str) -> int | None:
    """Bytes in a line of Linux' /proc/meminfo; None on a system without."""
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
