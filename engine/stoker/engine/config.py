"""The engine's configuration: what the operator renders from an EnginePool revision, or `stoker serve` from its flags."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stoker.pod.config_file import Config
from stoker.pod.listen import ListenConfig


class EngineIdentity(Config):
    """Whose replica this is; all empty for `stoker serve`."""

    namespace: str = "default"
    deployment: str = ""
    pool: str = ""
    revision: str = ""


class ServedModelConfig(Config):
    """Which weights to serve, and under which names."""

    path: str
    """A Hugging Face folder, a Stoker checkpoint folder or a GGUF file; told apart by what is there."""
    digest: str | None = None
    """For a checkpoint: the manifest digest that must match."""
    names: tuple[str, ...] = Field(default=(), max_length=8)
    """Names in `/v1/models`; default: the folder's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: bfloat16 where the device is fast in it, else float32."""


class CacheConfig(Config):
    """The paged KV cache."""

    block_size: int | None = Field(default=None, ge=1, le=256)
    """Tokens in one block, and the grain in which prompts share their beginnings; default: 64 on a GPU, 16 on a CPU."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Size of the pool; default: `memory_fraction` of what is free after loading."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    num_blocks: int | None = Field(default=None, ge=1)
    """Overrides both, for tests."""
    prefix_cache: bool = True


class SchedulerConfig(Config):
    max_batch_tokens: int = Field(default=2048, ge=1)
    """Token budget of one step, for decode and prefill chunks together."""
    max_requests: int = Field(default=256, ge=1)
    """Sequences in one step."""
    max_queued_requests: int = Field(default=1024, ge=1)
    """Beyond it, requests are refused with 429."""
    chunk_tokens: int | None = Field(default=None, ge=1)
    """Longest prefill chunk; default: the step's budget."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus output; default: what the model allows and the cache can hold."""
    overlap: bool | None = None
    """Prepare the next step while one is under way; default: on a GPU. The tokens are the same."""


class EngineApiConfig(Config):
    """The OpenAI server."""

    api_key_file: str | None = None
    """File with one key per line; without it, no key is asked for."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1)
    fronts: int = Field(default=1, ge=1)
    """Processes that speak HTTP and tokenise."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the API (CORS); `*` is any. Default: none."""


class EngineParallelismConfig(Config):
    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    data: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)


class EngineConfig(Config):
    """Everything that one engine replica needs."""

    identity: EngineIdentity = EngineIdentity()
    listen: ListenConfig = ListenConfig()
    termination_log: str | None = None
    work_dir: str | None = None
    """Scratch folder (sockets between processes, converted weights); default: a temporary one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "reference", "fused"] = "auto"
    attention: Literal["auto", "stoker", "flash", "cudnn", "sdpa"] = "auto"
    deterministic: bool = False
    """Bitwise the same logprobs as the trainer, whatever the batch, the chunks and the cache."""
    graphs: bool = True
    """With fused kernels, steps run as CUDA graphs, except those with many tokens of prompts. The tokens are the same."""
    threads: int | None = Field(default=None, ge=1)
    """Intra-op threads on the CPU; default: the cores this process may use. `deterministic` needs 1."""
    model: ServedModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    api: EngineApiConfig = EngineApiConfig()
    parallelism: EngineParallelismConfig = EngineParallelismConfig()
    grace_period_s: float = Field(default=30, gt=0)
    """From SIGTERM to SIGKILL; running requests may finish within it."""
