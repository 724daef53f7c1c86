"""What an InferenceDeployment says about its engines: the sections of the engine's configuration in camelCase."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.operator.api.metadata import KeyRef
from stoker.operator.api.pod_fields import Runtime
from stoker.operator.api.value import Count, Fraction, Value


class CacheSettings(Value):
    """The paged KV cache."""

    block_size: Annotated[int, Field(ge=1, le=256)] | None = None
    """Tokens in one block, and the grain in which prompts share their beginnings; default: 64 on a GPU, 16 on a CPU."""
    memory_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    """Size of the pool; default: `memoryFraction` of what is free after loading."""
    memory_fraction: Fraction = "0.9"
    num_blocks: Count | None = None
    """Overrides both."""
    prefix_cache: bool = True


class SchedulerSettings(Value):
    """What one step may hold."""

    max_batch_tokens: Count = 2048
    """Token budget of one step, for decode and prefill chunks together."""
    max_requests: Count = 256
    """Sequences in one step."""
    max_queued_requests: Count = 1024
    """Beyond it, requests are refused with 429."""
    chunk_tokens: Count | None = None
    """Longest prefill chunk; default: the step's budget."""
    max_model_len: Count | None = None
    """Longest prompt plus output; default: what the model allows and the cache can hold."""
    overlap: bool | None = None
    """Prepare the next step while one is under way; default: on a GPU. The tokens are the same."""


class EngineApi(Value):
    """The OpenAI server."""

    api_key_secret_ref: KeyRef | None = None
    """One key per line; without it, no key is asked for."""
    max_body_bytes: Count = 16777216
    fronts: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that speak HTTP and tokenise."""


class EngineSettings(Runtime):
    """Settings of every engine of the deployment."""

    deterministic: bool = False
    """Bitwise the same logprobs as the trainer, whatever the batch, the chunks and the cache."""
    graphs: bool = True
    """With fused kernels, steps run as CUDA graphs, except those with many tokens of prompts. The tokens are the same."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Intra-op threads on the CPU; default: the cores that the pod may use."""
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    api: EngineApi = EngineApi()
