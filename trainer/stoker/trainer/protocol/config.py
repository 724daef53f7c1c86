"""The trainer's configuration: what the operator renders from a TrainingJob, or `stoker train` without one.

Section names and field names are those of the custom resource in snake_case; durations are seconds.
"""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from stoker.pod.config_file import Config
from stoker.pod.listen import ListenConfig


class JobIdentity(Config):
    """The job and the attempt that this run belongs to."""

    namespace: str = "default"
    name: str
    uid: str
    attempt: int = Field(default=0, ge=0)
    writer: str = Field(pattern=r"^[0-9a-f]{8}$")
    """8 hex digits of job uid and attempt; part of the name of every checkpoint folder that this attempt writes."""


class GangConfig(Config):
    """The pods of one attempt.

    A pod reads its own numbers from the environment: `STOKER_NODE_RANK`, `MASTER_ADDR`, `MASTER_PORT`,
    `STOKER_POD_UID`.
    """

    nodes: int = Field(default=1, ge=1)
    ranks_per_node: int = Field(default=1, ge=1)
    agents: tuple[str, ...] = ()
    """Base URL of each pod's agent by node rank; empty for a run of one pod without an operator."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


class ModelFromConfig(Config):
    """Weights to start from."""

    kind: Literal["huggingFace", "gguf", "checkpoint"]
    path: str
    """Folder (Hugging Face, checkpoint) or file (GGUF). With `cache` also the URI of one, which is fetched:
    `hf://ORG/NAME[@REVISION]`, `s3://BUCKET/PREFIX`, `oci://REGISTRY/REPOSITORY[:TAG]`."""
    digest: str | None = None
    """The digest that a checkpoint's manifest must have."""
    cache: str | None = None
    """Folder that keeps fetched models, shared by the ranks of a machine."""


class ParallelismConfig(Config):
    """Sizes of the mesh's axes; the data-parallel size is what remains of the world."""

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    pipeline_schedule: Literal["GPipe", "OneFOneB", "Interleaved", "ZeroBubble"] = "OneFOneB"
    stages_per_rank: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    context_method: Literal["AllGather", "Ring", "Ulysses"] = "AllGather"
    sequence_parallel: bool = False
    replicate: int = Field(default=1, ge=1)


class TrainingConfig(Config):
    """Length and batches of the run. Exactly one of `total_steps`, `total_tokens`, `epochs`."""

    total_steps: int | None = Field(default=None, ge=1)
    total_tokens: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    global_batch_size: int = Field(default=8, ge=1)
    """Sequences in one optimizer step over all ranks."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences in one forward and backward pass of one rank."""
    sequence_length: int = Field(default=2048, ge=2)
    """Tokens in one packed sequence."""
    seed: int = Field(default=0, ge=0)
    deterministic: Literal["Off", "SameLayout", "AnyDataParallel"] = "Off"

    @property
    def any_data_parallel(self) -> bool:
        """Whether the bits must not depend on the number of data-parallel ranks."""
        return self.deterministic == "AnyDataParallel"

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in ("total_steps", "total_tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of total_steps, total_tokens and epochs is needed, got {given or 'none'}")
        return self


NO_DECAY = ("*norm.weight", "*.bias")


class OptimizationConfig(Config):
    """Optimizer and learning-rate schedule. Rates are decimal strings in the custom resource and floats here."""

    optimizer: Literal["adam", "adamw", "lamb"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0)
    min_learning_rate: float = Field(default=0.0, ge=0)
    """The rate at the end of cosine and linear."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, ge=1e-30)
    """Above 0 in fp32: else an element whose gradient is 0 would become 0 / 0."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Does not apply to the tensors of `no_decay`."""
    no_decay: tuple[str, ...] = NO_DECAY
    """Hugging Face names of tensors without weight decay; `*` stands for any text."""
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Largest global norm of the gradient; 0 turns clipping off."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _floor_has_an_effect(self) -> Self:
        floor, peak = self.min_learning_rate, self.learning_rate
        if floor and self.schedule == "constant":
            raise ValueError(
                f"min_learning_rate {floor:g} has no effect with schedule constant; "
                "allowed: 0, or schedule cosine or linear"
            )
        if floor > peak:
            raise ValueError(f"min_learning_rate {floor:g} is above learning_rate; allowed: 0 to {peak:g}")
        return self


class NvmeOffloadConfig(Config):
    path: str
    """Folder on a fast local disk."""


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Config):
    """Train low-rank adapters beside frozen weights."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    """The adapters' product is multiplied by alpha / rank."""
    targets: tuple[Target, ...] = Field(default=get_args(Target), min_length=1)
    """The projections that get an adapter."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"targets {', '.join(self.targets)}: each one once")
        return self


class MemoryConfig(Config):
    precision: Literal["fp32", "fp16", "bf16", "fp8"] = "bf16"
    fp8_recipe: Literal["Tensorwise", "Rowwise"] = "Tensorwise"
    zero_stage: int = Field(default=1, ge=0, le=3)
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    activation_budget_gib: float | None = Field(default=None, gt=0)
    """GiB of activations on a rank that `selective` keeps at most."""
    cpu_offload: bool = False
    nvme_offload: NvmeOffloadConfig | None = None

    @model_validator(mode="after")
    def _each_has_an_effect(self) -> Self:
        budget, mode = self.activation_budget_gib, self.activation_checkpointing
        if budget is not None and mode != "selective":
            raise ValueError(f"activation_budget_gib {budget} needs activation_checkpointing selective, got {mode}")
        if self.fp8_recipe != "Tensorwise" and self.precision != "fp8":
            raise ValueError(f"fp8_recipe {self.fp8_recipe} needs precision fp8, got {self.precision}")
        return self


class DataSourceConfig(Config):
    """One corpus: a file, a folder or a glob pattern, of the pod (`path`) or of another file system (`url`)."""

    name: str
    path: str | None = None
    url: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9+.-]*://.+$")
    weight: float = Field(default=1.0, gt=0)
    """Share of the samples, relative to the other sources."""
    format: Literal["auto", "text", "jsonl", "parquet", "tokens"] = "auto"
    """`jsonl` lines and `parquet` rows hold `text`, or `messages` (the loss then counts only the assistant's tokens).

    `tokens` is ready tokenised. `auto` uses the file's suffix.
    """

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.url is None):
            raise ValueError("exactly one of path and url is needed")
        return self

    @property
    def place(self) -> str:
        """The path or URL, for messages."""
        return self.path or self.url or ""


class TokenizerConfig(Config):
    """The tokenizer. `auto`: that of the starting weights; without one, a byte-level BPE is trained on the corpus."""

    kind: Literal["auto", "path", "train"] = "auto"
    path: str | None = None
    vocab_size: int = Field(default=8192, ge=259)
    """Only for a tokenizer that is trained: at least all 256 bytes and 3 special tokens."""


class ValidationConfig(Config):
    """Validation data: `source` (a path), or `fraction` of the documents held out of the sources."""

    source: DataSourceConfig | None = None
    fraction: float | None = Field(default=None, gt=0, lt=1)
    every_steps: int = Field(default=100, ge=1)
    max_sequences: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.source is None) == (self.fraction is None):
            raise ValueError("exactly one of source and fraction is needed")
        return self


class DataConfig(Config):
    sources: tuple[DataSourceConfig, ...] = Field(min_length=1)
    tokenizer: TokenizerConfig = TokenizerConfig()
    packing: bool = True
    """Fill sequences with several documents (without attention across them); off: one document per sequence, padded."""
    validation: ValidationConfig | None = None
    cache_dir: str | None = None
    """Folder for tokenised shards; default: below `work_dir`."""


class CheckpointConfig(Config):
    """Place and interval of saves."""

    root: str
    """Folder that receives `step-...` folders."""
    interval_steps: int | None = Field(default=None, ge=1)
    interval_minutes: float | None = Field(default=None, gt=0)
    max_to_keep: int | None = Field(default=None, ge=1)
    """Only used with `retention: own`."""
    async_save: bool = True


class GuardsConfig(Config):
    """Checks of a run against silent damage."""

    checksum_every_steps: int | None = Field(default=None, ge=1)
    loss_spike: Literal["Off", "Record", "Skip", "Rewind"] = "Off"


class LoggingConfig(Config):
    """Destinations of metrics besides `/metrics`."""

    jsonl: str | None = None
    every_steps: int = Field(default=1, ge=1)
    tensorboard: str | None = None
    wandb: dict[str, Any] | None = None
    mlflow: dict[str, Any] | None = None


class ResumeConfig(Config):
    """The checkpoint that the operator chose. The trainer uses this one or fails."""

    folder: str
    step: int = Field(ge=0)
    digest: str


class DeadlineConfig(Config):
    """Longest time without progress in each phase, in seconds; a longer one is a hang."""

    load_s: float = Field(default=1800, gt=0)
    first_step_s: float = Field(default=1800, gt=0)
    step_s: float = Field(default=600, gt=0)
    save_s: float = Field(default=1800, gt=0)
    validation_s: float = Field(default=1800, gt=0)


class TrainerConfig(Config):
    """The configuration of one attempt of a run."""

    job: JobIdentity
    listen: ListenConfig = ListenConfig()
    gang: GangConfig = GangConfig()
    termination_log: str
    work_dir: str
    """Private scratch folder of the pod (tokenised shards, sockets, stacks)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "reference", "fused"] = "auto"
    attention: Literal["auto", "stoker", "flash", "cudnn", "sdpa"] = "auto"
    model: dict[str, Any] | None = None
    """Fields of `stoker.model.config.ModelConfig`, for a model with random weights."""
    model_from: ModelFromConfig | None = None
    parallelism: ParallelismConfig = ParallelismConfig()
    training: TrainingConfig
    optimization: OptimizationConfig = OptimizationConfig()
    lora: LoraConfig | None = None
    """Only with `model_from`."""
    memory: MemoryConfig = MemoryConfig()
    data: DataConfig
    checkpoint: CheckpointConfig
    guards: GuardsConfig = GuardsConfig()
    logging: LoggingConfig = LoggingConfig()
    retention: Literal["own", "external"] = "own"
    """`external`: the operator deletes checkpoints and chooses the one to resume.

    `own`: the trainer keeps `max_to_keep` verified ones, and resumes an older one when the newest is damaged.
    """
    resume: ResumeConfig | None = None
    deadlines: DeadlineConfig = DeadlineConfig()
    grace_period_s: float = Field(default=30, gt=0)
    """Seconds between SIGTERM and SIGKILL."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.model is None) == (self.model_from is None):
            raise ValueError("exactly one of model and model_from is needed")
        return self

    @model_validator(mode="after")
    def _adapters_need_weights(self) -> Self:
        if self.lora is not None and self.model_from is None:
            raise ValueError("lora needs model_from: adapters are trained beside weights that exist")
        return self
