"""The engine's configuration, rendered by the operator from an EnginePool revision or by `stoker serve` from its
flags.

Frozen. Read by `__main__` and by the core's process; `plan` turns it into decisions.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from stoker.pod.config_file import Config
from stoker.pod.listen import ListenConfig

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")
"""The header `Origin` of browsers (RFC 6454, 7), or any."""


class EngineIdentity(Config):
    """The deployment, pool and revision of this replica; empty for `stoker serve`."""

    namespace: str = "default"
    deployment: str = ""
    pool: str = ""
    revision: str = ""


class ServedModelConfig(Config):
    """The weights to serve, and their names."""

    path: str
    """A Hugging Face folder, a Stoker checkpoint folder or a GGUF file; recognised by its content. Or the URI of one:
    `hf://ORG/NAME[@REVISION]`, `s3://BUCKET/PREFIX`, `oci://REGISTRY/REPOSITORY[:TAG]`."""
    cache: str | None = None
    """Folder that keeps models fetched from a URI, shared by the processes of a machine; default: the user's cache."""
    digest: str | None = None
    """The manifest digest that a checkpoint must have."""
    names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), max_length=8)
    """Names in `/v1/models`; default: the folder's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: bfloat16 where the device is fast in it, else float32."""

    @field_validator("names")
    @classmethod
    def _names_are_clear(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise ValueError(f"names must differ from each other, {twice!r} is there twice")
        if unclear := next((name for name in names if not name.isprintable()), None):
            raise ValueError(f"names must have no line breaks and no control characters, got {unclear!r}")
        return names


Preemption = Literal["auto", "swap", "recompute"]


class DiskConfig(Config):
    """The disk tier: a folder for blocks that the host tier has no room for."""

    path: str
    """Folder; each engine takes one of its own in it. Blocks in it are found again after a restart, but not those of a
    copy of the model over several pods."""
    bytes: int = Field(ge=1)
    """Most bytes of this pod's files."""


class StoreConfig(Config):
    """The store: volumes whose blocks engines share."""

    paths: tuple[str, ...] = Field(min_length=1, max_length=8)
    """Folders that all these engines mount at the same paths; none is made here, so that an absent mount is seen."""
    replicas: int = Field(default=1, ge=1, le=8)
    """Volumes on which each block is kept."""
    bytes: int = Field(ge=1)
    """Most bytes of the files on each volume, of all engines together."""
    ttl_s: int = Field(default=86400, ge=60)
    """Time after its last use for which a block is kept."""

    @model_validator(mode="after")
    def _replicas_have_volumes(self) -> Self:
        if len(set(self.paths)) < len(self.paths):
            raise ValueError("paths must differ from each other")
        if self.replicas > len(self.paths):
            raise ValueError(f"replicas must be at most {len(self.paths)}, the number of paths, got {self.replicas}")
        return self


class CacheConfig(Config):
    """The paged KV cache."""

    block_size: int | None = Field(default=None, ge=1, le=256)
    """Tokens in one block, which is also the granularity of prefix sharing; default: 64 on a GPU, 16 on a CPU."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Size of the pool; default: `memory_fraction` of what is free after loading."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    num_blocks: int | None = Field(default=None, ge=1)
    """Overrides both, for tests."""
    prefix_cache: bool = True
    host_memory_bytes: int | None = Field(default=None, ge=1)
    """Main memory for cold blocks and those of preempted sequences (the host tier), beside the cache; default: none."""
    preemption: Preemption = "auto"
    """How a preempted sequence comes back, where there is a host tier: from its saved blocks (`swap`), computed again
    (`recompute`), or what is measured to be faster."""
    disk: DiskConfig | None = None
    """Folder for blocks below the host tier, which it needs; default: none."""
    store: StoreConfig | None = None
    """Volumes that engines share, below host and disk tier; needs the host tier. Default: none."""
    salt: str | None = Field(default=None, max_length=256)
    """The tenant's part of the keys of blocks in files: engines with other salts never read each other's."""


class ExpertsConfig(Config):
    """The weights of a model's experts."""

    on_device: int | None = Field(default=None, ge=1)
    """Experts of each layer whose weights a rank keeps on its device, of those that it holds; the others wait in main
    memory, page-locked on a GPU, and are loaded when a token needs them. Default: all. Below all of them steps run
    without graphs."""


class SchedulerConfig(Config):
    max_batch_tokens: int = Field(default=2048, ge=1, le=2**20)
    """Token budget of one step, for decode and prefill chunks together."""
    mixed_tokens: int | None = Field(default=None, ge=1)
    """Prompt tokens of a step beside sequences that decode, while few prompts wait: fewer shorten the gaps between
    tokens, more the time to the first. Default: what a GPU computes in about 11 ms; on a CPU the step's budget."""
    max_requests: int = Field(default=256, ge=1, le=2**16)
    """Sequences in one step."""
    max_queued_requests: int = Field(default=1024, ge=1)
    """Longest queue; further requests are refused with 429."""
    aging_s: int = Field(default=60, ge=1)
    """Time in the queue after which a request goes before all classes and priorities, one request at a time."""
    chunk_tokens: int | None = Field(default=None, ge=1)
    """Longest prefill chunk; default: the step's budget."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus output; default: what the model allows and the cache can hold."""
    overlap: bool | None = None
    """Prepare the next step while the device computes one; default: on a GPU. The tokens do not change."""


class EngineApiConfig(Config):
    """The OpenAI server."""

    api_key_file: str | None = None
    """File with one key per line; without a file, requests need no key."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1)
    fronts: int = Field(default=1, ge=1, le=64)
    """Processes that serve HTTP and tokenise. A single one is the engine's first process, several have their own."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the API (CORS), as browsers send them; `*` is any. Default: none."""
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = "auto"
    """The form in which the model writes tool calls; `auto` finds it in the chat template."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """`think`: text between <think> and </think> goes to `reasoning`; `auto`: if the chat template has <think>."""

    @field_validator("allowed_origins")
    @classmethod
    def _as_browsers_send_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"*, null or SCHEME://HOST[:PORT] without a path is needed, got {origin!r}")
        return origins


class EngineParallelismConfig(Config):
    tensor: int = Field(default=1, ge=1, le=1024)
    pipeline: int = Field(default=1, ge=1, le=1024)
    data: int = Field(default=1, ge=1, le=1024)
    expert: int = Field(default=1, ge=1, le=1024)


Role = Literal["colocated", "prefill", "decode"]


Transport = Literal["cuda-ipc", "shared-memory", "nixl", "tcp"]


class TransferConfig(Config):
    """Prefill and decode at two engines: prompts computed for others, and by others."""

    listen: str | None = None
    """`host:port` for the messages of other engines; blocks over TCP use the port behind it, links between GPUs the
    next one, and each further tensor rank the two behind these; further copies of the model in this pod have the same
    ports again behind those (any ports, for 0). Default: no hand-over. A host that others reach needs `key_file`."""
    zone_blocks: int = Field(default=256, ge=1, le=65536)
    """Slots of the landing zone, the only memory that other engines write to; each has the size of a block."""
    require: Literal["any", "nvlink", "rdma"] = "any"
    """What the way to other engines must be. An engine that cannot offer it is not ready."""
    transports: tuple[Transport, ...] | None = Field(default=None, min_length=1)
    """Ways that may be used, the preferred one first; default: `cuda-ipc` (GPUs of one host) on a GPU, then
    `shared-memory` (processes of one host and user), then `tcp`; with `require: rdma` only `nixl` (an extra)."""
    key_file: str | None = None
    """File with the secret of the deployment: 32 bytes, or 64 hexadecimal digits."""
    copy_number: int = Field(default=0, ge=0)
    """Number of this copy of the model, where a pod has several: each has a zone and ports of its own. Set by the pod's
    program for each core."""

    @model_validator(mode="after")
    def _has_a_use(self) -> Self:
        """Refuse what has a use between engines only, where no other engine can reach this one."""
        given = {
            "key_file": self.key_file is not None,
            "transports": self.transports is not None,
            "require": self.require != "any",
        }
        name = next((name for name, is_given in given.items() if is_given), None)
        if self.listen is None and name is not None:
            raise ValueError(f"{name} needs listen, the HOST:PORT at which other engines reach this one")
        return self

    def of_copy(self, number: int, ranks: int) -> TransferConfig:
        """That of a copy with so many ranks: its ports are behind those of the copies before it."""
        listen = port_plus(self.listen, number * ports_of_copy(ranks)) if self.listen is not None else None
        return self.model_copy(update={"copy_number": number, "listen": listen})


def ports_of_copy(ranks: int) -> int:
    """Ports at which other engines reach a copy of the model: one for messages, two for the blocks of each rank."""
    return 1 + 2 * ranks


def port_plus(endpoint: str, number: int) -> str:
    """An endpoint `tcp://HOST:PORT` with the port that is `number` behind it; one without a port is returned as it is.

    Port 0 stays: the system chooses it.
    """
    begin, colon, port = endpoint.rpartition(":")
    return f"{begin}{colon}{int(port) + number}" if port.isdecimal() and int(port) else endpoint


class CacheEventsConfig(Config):
    """Events of the prefix cache for subscribers, in the form of vLLM's KV events."""

    endpoint: str = Field(min_length=1)
    """Where subscribers connect: `tcp://*:5557`."""
    replay_endpoint: str | None = None
    """Where they ask for what they missed; default: nowhere."""
    topic: str = ""
    buffer_steps: int = Field(default=10_000, ge=1)
    """Batches that are kept for those who ask."""
    hwm: int = Field(default=100_000, ge=0)
    """Batches that wait for one slow subscriber; more are dropped for it."""
    rank: int = Field(default=0, ge=0)
    """`data_parallel_rank` of the batches."""

    def of_rank(self, rank: int) -> CacheEventsConfig:
        """Those of a copy of the model: each has ports of its own, the first ones plus its rank."""
        replay = self.replay_endpoint
        changes = {"rank": rank, "endpoint": port_plus(self.endpoint, rank)}
        more = {"replay_endpoint": port_plus(replay, rank)} if replay is not None else {}
        return self.model_copy(update={**changes, **more})


class ReplicaConfig(Config):
    """The pods that compute as one replica. Each has as many tensor ranks as the others."""

    pods: int = Field(default=1, ge=1, le=1024)
    """Above 1 the environment has this pod's number (`STOKER_NODE_RANK`) and the address of pod 0 (`MASTER_ADDR`,
    `MASTER_PORT`), which serves; the others compute."""
    key_file: str | None = None
    """File with the key by which the pods know each other: 32 bytes, or 64 hexadecimal digits. Needed above 1."""
    data_ranks: int | None = Field(default=None, ge=1)
    """Data-parallel ranks of all pods, where several share them: set by each pod's program, which then keeps as `pods`
    and `parallelism.data` its own share."""


class EngineConfig(Config):
    """The whole configuration of one engine replica."""

    identity: EngineIdentity = EngineIdentity()
    listen: ListenConfig = ListenConfig()
    termination_log: str | None = None
    timeline: str | None = None
    """File for a time line of steps and requests (`core.timeline`), to find out what slow tokens waited for."""
    work_dir: str | None = None
    """Scratch folder (sockets between processes, converted weights); default: a temporary one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "reference", "fused"] = "auto"
    attention: Literal["auto", "stoker", "flash", "cudnn", "sdpa"] = "auto"
    deterministic: bool = False
    """Compute logprobs that equal the trainer's bit for bit, independent of batch, chunks and cache."""
    graphs: bool = True
    """Run steps as CUDA graphs where kernels are fused, except long prefills. The tokens do not change."""
    capture_s: float = Field(default=0.3, ge=0, le=600)
    """Longest time that graphs are captured before the engine is ready, beyond the first few; the others follow when no
    request runs, or rarely between two steps. Until then larger graphs stand in."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Intra-op threads on the CPU; default: the cores this process may use. `deterministic` needs 1."""
    model: ServedModelConfig
    cache: CacheConfig = CacheConfig()
    experts: ExpertsConfig = ExpertsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    api: EngineApiConfig = EngineApiConfig()
    role: Role = "colocated"
    """What routers should prefer this engine for. Each engine can do everything."""
    transfer: TransferConfig = TransferConfig()
    cache_events: CacheEventsConfig | None = None
    """Default: no events."""
    parallelism: EngineParallelismConfig = EngineParallelismConfig()
    replica: ReplicaConfig = ReplicaConfig()
    grace_period_s: float = Field(default=30, gt=0)
    """Time from SIGTERM to SIGKILL, in which running requests may finish."""
