"""Bodies of requests and answers, from which the OpenAPI document is made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stoker.gateway.domain.names import MAX_JOB_NAME
from stoker.gateway.domain.states import CheckpointState, JobState
from stoker.gateway.observations import GpuFigures, PoolState, RevisionState, RolloutState

Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=MAX_JOB_NAME)]
LabelKey = Annotated[
    str,
    Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"),
]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
Positive = Annotated[int, Field(ge=1, le=2**63 - 1)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=32)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Body(BaseModel):
    """Base of requests: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ModelSection(Body):
    """Dimensions of a model with random weights."""

    architecture: Word | None = None
    num_layers: Positive | None = None
    hidden_size: Positive | None = None
    num_attention_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    intermediate_size: Positive | None = None
    vocab_size: Positive | None = None
    max_position_embeddings: Positive | None = None
    num_experts: Positive | None = None
    num_experts_per_token: Positive | None = None


class ParallelismSection(Body):
    """Sizes of the mesh's axes. `data_parallel_size` is calculated: it is in answers only."""

    tensor_parallel_size: Positive | None = None
    pipeline_parallel_size: Positive | None = None
    data_parallel_size: Positive | None = None
    expert_parallel_size: Positive | None = None
    sequence_parallel: bool | None = None
    context_parallel_size: Positive | None = None


class OptimizationSection(Body):
    """Optimizer and schedule."""

    optimizer: Word | None = Field(None, description="ADAM, ADAMW, LAMB, ...: `optimization.optimizer` in capitals")
    learning_rate: Rate | None = None
    weight_decay: Rate | None = None
    beta1: Rate | None = None
    beta2: Rate | None = None
    epsilon: Rate | None = None
    gradient_clipping: Rate | None = None
    warmup_steps: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    total_steps: Positive | None = None
    lr_scheduler: Word | None = Field(None, description="COSINE, LINEAR, CONSTANT, ...")


class MemorySection(Body):
    """Savings of memory."""

    precision: Word | None = Field(None, description="FP32, FP16, BF16, FP8")
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    gradient_checkpointing: bool | None = None
    cpu_offload: bool | None = None
    nvme_offload: bool | None = None
    activation_checkpointing_granularity: Word | None = Field(None, description="FULL, SELECTIVE")


class DataSection(Body):
    """Corpus and batches."""

    dataset_path: str | None = Field(None, max_length=1024)
    tokenizer_path: str | None = Field(None, max_length=1024)
    sequence_length: Positive | None = None
    global_batch_size: Positive | None = None
    micro_batch_size: Positive | None = None


class CheckpointSection(Body):
    """Place and times of saves."""

    checkpoint_dir: str | None = Field(None, max_length=1024, description="`pvc://CLAIM/FOLDER`")
    checkpoint_interval_steps: Positive | None = None
    checkpoint_interval_minutes: Positive | None = None
    max_checkpoints_to_keep: Positive | None = None
    async_save: bool | None = None


class Sections(Body):
    """The parts of a job's configuration."""

    model_section: ModelSection | None = Field(None, alias="model_config")
    parallelism_config: ParallelismSection | None = None
    optimization_config: OptimizationSection | None = None
    memory_config: MemorySection | None = None
    data_config: DataSection | None = None
    checkpoint_config: CheckpointSection | None = None


class NewJob(Sections):
    """A training job to submit: sections, or the `spec` of a TrainingJob (docs/api-reference.md), or both."""

    job_name: Name
    spec: dict[str, Any] = Field({}, description="Spec of the TrainingJob; sections are merged into it.")
    labels: dict[LabelKey, LabelValue] = {}


class ResumeRequest(Body):
    """The save to go on from."""

    checkpoint_id: str | None = Field(
        None, min_length=1, max_length=253, description="UUID or name; default: the newest verified one"
    )
    total_steps: Positive | None = Field(
        None, description="Length of the new job; needed where the checkpoint is at the last step"
    )


class CheckpointRequest(Body):
    """A save to make now."""

    pinned: bool = Field(False, description="Keep it whatever the job's retention allows.")


class JobAnswer(BaseModel):
    """A job after an action."""

    job_id: str
    job_name: str
    namespace: str
    status: JobState


class Progress(BaseModel):
    """Newest metrics of a run; null where none was measured yet."""

    step: int | None = None
    total_steps: int | None = None
    consumed_tokens: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: int | None = None
    restarts: int = 0
    lost_steps: int = 0


class CheckpointRef(BaseModel):
    """A save of the job."""

    checkpoint_name: str | None
    step: int
    verified: bool


class Job(Sections):
    """A training job with its current metrics."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), serialize_by_alias=True, validate_by_name=True)

    job_id: str = Field(description="UUID of the TrainingJob")
    job_name: str
    namespace: str
    status: JobState
    phase: str = Field(description="Phase of the TrainingJob")
    message: str = Field(description="Why it is not running, in one line; empty while it is")
    created_at: str
    updated_at: str
    started_at: str | None
    finished_at: str | None
    metrics: Progress
    attempt: int | None
    world_size: int | None
    newest_verified_checkpoint: CheckpointRef | None
    resource_version: str
    spec: dict[str, Any]


class JobList(BaseModel):
    """A page of jobs."""

    items: list[Job]
    next: str = Field(alias="continue", description="Token of the next page; empty at the end")
    resource_version: str

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)


class CheckpointMetadata(BaseModel):
    loss: float | None
    validation_loss: float | None
    learning_rate: float | None
    global_step: int | None
    consumed_tokens: int | None
    elapsed_time_seconds: int | None


class Checkpoint(BaseModel):
    """A save. Its shards, with their checksums, are in the manifest with this digest."""

    checkpoint_id: str
    checkpoint_name: str
    namespace: str
    job_id: str | None
    job_name: str | None
    step: int | None
    timestamp: str
    status: CheckpointState
    phase: str
    message: str
    verified: bool
    in_use: bool
    in_use_by: list[str] = Field([], description="`Kind/name` of each user")
    attempt: int | None = Field(None, description="Attempt of the job that wrote it")
    pinned: bool
    folder: str | None
    digest: str | None
    size_bytes: int | None
    files: int | None
    shards: int | None
    metadata: CheckpointMetadata
    resource_version: str


class CheckpointList(BaseModel):
    """A page of checkpoints."""

    items: list[Checkpoint]
    next: str = Field(alias="continue")
    resource_version: str

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)


class CheckpointAnswer(BaseModel):
    """A save that was asked for."""

    checkpoint_id: str
    checkpoint_name: str
    status: CheckpointState


class Deployment(BaseModel):
    """A deployment that serves a model."""

    deployment_id: str
    deployment_name: str
    namespace: str
    phase: str
    message: str
    ready: str | None
    endpoint: str | None
    checkpoint: CheckpointRef | None
    models: list[str] = []
    current_revision: str | None = None
    pools: list[PoolState] = []
    revisions: list[RevisionState] = []
    rollout: RolloutState | None = None
    created_at: str
    resource_version: str
    spec: dict[str, Any]


class PromoteRequest(Body):
    """The checkpoint to serve."""

    checkpoint_id: str = Field(min_length=1, max_length=253, description="UUID or name, in the same namespace")


class RollBackRequest(Body):
    """The revision to go back to."""

    revision: str | None = Field(
        None, min_length=1, max_length=63, description="Default: the newest one with another checkpoint"
    )


class DeploymentList(BaseModel):
    """A page of deployments."""

    items: list[Deployment]
    next: str = Field(alias="continue")
    resource_version: str

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)


class Cancelled(BaseModel):
    """A job that was cancelled or deleted."""

    status: Literal["CANCELLED", "DELETED"]


GpuSource = Annotated[
    Literal["dcgm", "agents"],
    Field(description="Measured by: DCGM's exporter, or the agents of the pods that hold the GPUs"),
]


class ClusterStatus(BaseModel):
    """GPUs of the whole cluster. A utilisation is null where it is not measured; `unavailable` says why."""

    total_gpus: int
    available_gpus: int
    gpu_utilization: float | None = Field(description="Mean over all GPUs, 0 to 1")
    memory_utilization: float | None = Field(description="Used part of all GPU memory, 0 to 1")
    gpus_measured: int = Field(default=0, description="GPUs that the two figures are of")
    gpu_source: GpuSource | None = None
    active_jobs: int
    nodes: int
    ready_nodes: int
    unavailable: dict[str, str]


class GpuResourceAnswer(BaseModel):
    """GPUs of a node under one name."""

    name: str = Field(description="Resource (`nvidia.com/gpu`, `nvidia.com/mig-1g.10gb`) or driver (`gpu.nvidia.com`)")
    total: int
    available: int


class NodeAnswer(BaseModel):
    """A node of the cluster."""

    node_id: str
    gpus: int = Field(description="GPUs of all names; a MIG device counts as one")
    available_gpus: int
    gpu_resources: list[GpuResourceAnswer] = []
    status: str
    gpu_memory_used: list[float] | None = Field(description="Bytes by GPU; null where they are not measured")
    gpu_devices: list[GpuFigures] = Field(default=[], description="The GPUs that are measured, in their order")
    gpu_source: GpuSource | None = None
    cpu: str | None
    memory: str | None
    unavailable: dict[str, str]


class MetricPoint(BaseModel):
    """Metrics of one step."""

    step: int
    loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None


class MetricHistory(BaseModel):
    """Metrics of the steps of a run, in their order."""

    job_id: str
    points: list[MetricPoint]
    complete: bool = Field(description="Whether every step of the span is covered")
    source: Literal["agent", "task", "logs"] = Field(
        default="logs", description="Reader: the pod that writes the log, a task beside its volume; or the pods' logs"
    )
    missing: str = Field(description="What is not covered, and why; empty when complete")


class Health(BaseModel):
    """State of the gateway."""

    status: Literal["healthy", "unhealthy"]
    detail: str
