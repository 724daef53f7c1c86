"""Settings of an InferenceDeployment's engines: the sections of the engine's configuration in camelCase."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.metadata import KeyRef
from stoker.operator.api.pod_fields import Runtime
from stoker.operator.api.value import Count, Fraction, Name, Port, Value, rule, rules


class DiskSettings(Value):
    """Disk tier: files of blocks, below the host tier."""

    bytes: Annotated[int, Field(ge=1, le=2**63 - 1)]
    """Most bytes of a pod's files."""
    claim_name: Name | None = None
    """Claim for the files; default: an emptyDir of limited size."""


class StoreSettings(Value):
    """Blocks that engines share, on claims that can be mounted by all of them (ReadWriteMany)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.replicas <= self.claimNames.size()",
                "replicas is above the number of claimNames",
                shown="replicas {self.replicas} is above the number of claimNames, {self.claimNames.size()}",
                field=".replicas",
            ),
        )
    )

    claim_names: Annotated[
        tuple[Name, ...], Field(min_length=1, max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"})
    ]
    replicas: Annotated[int, Field(ge=1, le=8)] = 1
    """Claims on which each block is kept."""
    bytes: Annotated[int, Field(ge=1, le=2**63 - 1)]
    """Most bytes of the files on each claim, of all engines."""
    ttl_seconds: Annotated[int, Field(ge=60, le=2**31 - 1)] = 86400
    """Time after its last use for which a block is kept."""


class CacheSettings(Value):
    """Paged KV cache."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "has(self.hostMemoryBytes) || !(has(self.disk) || has(self.store))",
                "disk and store need hostMemoryBytes",
                shown="{has(self.disk) ? 'disk' : 'store'} needs hostMemoryBytes, which must be at least 1",
                field=".hostMemoryBytes",
            ),
        )
    )

    block_size: Annotated[int, Field(ge=1, le=256)] | None = None
    """Tokens of one block, what prefixes share; default: 64 on a GPU, 16 on a CPU."""
    memory_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    """Size of the cache; default: `memoryFraction` of what is free after loading."""
    memory_fraction: Fraction = "0.9"
    num_blocks: Count | None = None
    """Size of the cache in blocks; overrides both."""
    prefix_cache: bool = True
    host_memory_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    """Main memory for cold and preempted blocks (host tier); default: none."""
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    """With a host tier, how a preempted request comes back: from saved blocks, computed again, or as is faster."""
    disk: DiskSettings | None = None
    """Needs `hostMemoryBytes`; default: none."""
    store: StoreSettings | None = None
    """Needs `hostMemoryBytes`; default: none."""
    salt: Annotated[str, Field(max_length=256)] | None = None
    """Tenant's part of the keys of blocks in files."""


class ExpertSettings(Value):
    """Weights of a model's experts."""

    on_device: Count | None = None
    """Experts of each layer on a rank's device; the others wait in main memory. Default: all."""


class SchedulerSettings(Value):
    """Limits of one step."""

    max_batch_tokens: Annotated[int, Field(ge=1, le=2**20)] = 2048
    """Tokens of one step, of decodes and prompts."""
    max_requests: Annotated[int, Field(ge=1, le=2**16)] = 256
    """Sequences of one step."""
    max_queued_requests: Count = 1024
    """Waiting requests; further ones get 429."""
    aging_seconds: Count = 60
    """A request that waits so long goes before all classes, one at a time."""
    chunk_tokens: Count | None = None
    """Longest prefill chunk; default: `maxBatchTokens`."""
    max_model_len: Count | None = None
    """Longest prompt plus output; default: what model and cache allow."""
    overlap: bool | None = None
    """Prepare the next step while one runs; default: on a GPU."""


class EngineApi(Value):
    """OpenAI server of an engine."""

    api_key_secret_ref: KeyRef | None = None
    """API keys, one per line; without it requests need no key."""
    max_body_bytes: Count = 16777216
    fronts: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes for HTTP and tokenization."""


class TransferSettings(Value):
    """Exchange of cache blocks between the engines of prefill and decode pools."""

    zone_blocks: Annotated[int, Field(ge=1, le=65536)] = 256
    """Blocks of the landing zone, to which other engines write."""
    require: Literal["any", "nvlink", "rdma"] = "any"
    """Link to other engines without which this one is not ready."""


class CacheEventSettings(Value):
    """Events of the prefix cache, in the form of vLLM's."""

    port: Port
    """Where subscribers connect; each copy (`data`) has the next one."""
    replay_port: Port | None = None
    """Where they ask for what they missed."""
    topic: Annotated[str, Field(max_length=256)] = ""
    buffer_steps: Count = 10000
    """Batches kept for those who ask."""
    hwm: Annotated[int, Field(ge=0, le=2**31 - 1)] = 100000
    """Batches that wait for a slow subscriber; 0: no limit."""


def _port_is_free(first: int, last: str) -> str:
    """CEL: none of the ports `x` to `x + d - 1` lies between the two."""
    return f"(x > {last} || x + d <= {first})"


_TRANSFER_END = "8100 + d * (1 + 2 * p.parallelism.tensor * p.parallelism.pipeline)"
_OWN_PORTS = (
    _port_is_free(8000, "8000"),
    f"(p.role == 'colocated' || {_port_is_free(8101, _TRANSFER_END)})",
    f"(p.podsPerReplica == 1 || {_port_is_free(29500, '29500')})",
)
"""As `domain.settings` has them; a test compares the two."""

CACHE_EVENT_RULES = (
    rule(
        "!has(self.engine.cacheEvents) || self.engine.cache.prefixCache",
        "cacheEvents needs cache.prefixCache true",
        field=".engine.cacheEvents",
    ),
    rule(
        "!has(self.engine.cacheEvents) || [self.engine.cacheEvents].all(e, self.pools.all(p,"
        " [p.parallelism.data].all(d, (!has(e.replayPort) || e.replayPort >= e.port + d || e.port >= e.replayPort + d)"
        " && [e.port, has(e.replayPort) ? e.replayPort : e.port].all(x,"
        f" x + d <= 65536 && {' && '.join(_OWN_PORTS)}))))",
        "port and replayPort, each with data - 1 ports behind it, must be apart, at most 65535 and none of the"
        " engine's: 8000; with roles 8101 to 8100 + data x (1 + 2 x tensor x pipeline); with several pods 29500",
        field=".engine.cacheEvents",
    ),
)
"""Of the deployment's spec: what cacheEvents needs beside the other settings and the pools."""


class EngineSettings(Runtime):
    """Settings of every engine of the deployment."""

    deterministic: bool = False
    """Bitwise the trainer's logprobs, independent of batch, chunks and cache."""
    graphs: bool = True
    """Run decode steps as CUDA graphs, with the same tokens."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Intra-op threads on the CPU; default: the cores that the pod may use."""
    cache: CacheSettings = CacheSettings()
    experts: ExpertSettings | None = None
    scheduler: SchedulerSettings = SchedulerSettings()
    api: EngineApi = EngineApi()
    transfer: TransferSettings | None = None
    """Of prefill and decode pools."""
    cache_events: CacheEventSettings | None = None
    """Default: none."""
