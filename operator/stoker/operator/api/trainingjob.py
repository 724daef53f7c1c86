"""TrainingJob: one run of training. Model, data, batches and optimizer are fixed; the ways to run it may change.

Sections have the names of the trainer's configuration in camelCase, so that rendering is mechanical.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.gang_scheduling import GangScheduling
from stoker.operator.api.metadata import KeyRef, Resource
from stoker.operator.api.model_spec import ModelFrom, ModelSpec
from stoker.operator.api.pod_fields import POD_RULES, PodFields, Runtime
from stoker.operator.api.storage import StorageSpec
from stoker.operator.api.topology import Levels
from stoker.operator.api.training_rules import (
    BUDGET_IS_SELECTIVE,
    SPEC_RULES,
    STAGES_FIT_SCHEDULE,
)
from stoker.operator.api.trainingjob_status import TrainingJobStatus
from stoker.operator.api.value import (
    BelowOne,
    Count,
    Decimal,
    ForeignName,
    Int64,
    Path,
    Seconds,
    Text,
    Value,
    Weight,
    exactly_one,
    forbidden,
    immutable,
    list_map,
    rule,
    rules,
)

_FIXED = "is fixed: make a new TrainingJob"
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A projection that an adapter belongs to."""


AxisSize = Annotated[int, Field(ge=1, le=2**16)]
"""Limited, with the batch sizes, so that no product of a CEL rule overflows."""
BatchSize = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Parallelism(Value):
    """Sizes of the mesh's axes; the remaining ranks are data parallel."""

    model_config = ConfigDict(json_schema_extra=rules(STAGES_FIT_SCHEDULE))

    tensor: AxisSize = 1
    """Ranks that share every layer."""
    pipeline: AxisSize = 1
    """Ranks in a line, each with stages of consecutive layers."""
    pipeline_schedule: Literal["GPipe", "OneFOneB", "Interleaved", "ZeroBubble"] = "OneFOneB"
    """Order of the passes of a pipeline."""
    stages_per_rank: AxisSize = 1
    """Stages of a rank; above one: Interleaved."""
    expert: AxisSize = 1
    """Ranks that share the experts, out of the data-parallel and tensor ranks."""
    context: AxisSize = 1
    """Ranks that share one sequence."""
    context_method: Literal["AllGather", "Ring", "Ulysses"] = "AllGather"
    """How those ranks exchange keys and values."""
    sequence_parallel: bool = False
    """Share norms over the tensor ranks."""
    replicate: AxisSize = 1
    """Copies of the ZeRO shards among the data-parallel ranks."""


class Workers(PodFields):
    """Pods of one attempt."""

    model_config = ConfigDict(json_schema_extra=rules(*POD_RULES))

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1


class Training(Value):
    """Length of the run and size of its batches."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("totalSteps", "totalTokens", "epochs")))

    total_steps: Count | None = None
    total_tokens: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    epochs: Count | None = None
    global_batch_size: BatchSize = 8
    """Sequences of one optimizer step over all ranks."""
    micro_batch_size: BatchSize = 1
    """Sequences of one forward and backward pass of one rank."""
    sequence_length: Annotated[int, Field(ge=2, le=2**31 - 1)] = 2048
    """Tokens of one packed sequence."""
    seed: Int64 = 0
    deterministic: Literal["Off", "SameLayout", "AnyDataParallel"] = "Off"
    """Bitwise repeatable on the same ranks, or on any power of two of data-parallel ranks."""


class Optimization(Value):
    """Optimizer and schedule; rates are decimal strings (`"3e-4"`)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("double(self.learningRate) > 0.0", "learningRate must be above 0", field=".learningRate"),
            rule(
                "double(self.epsilon) >= 1e-30",
                "epsilon must be at least 1e-30",
                shown="epsilon {self.epsilon} must be at least 1e-30",
                field=".epsilon",
            ),
            rule(
                "double(self.minLearningRate) <= double(self.learningRate)",
                "minLearningRate is above learningRate",
                shown="minLearningRate {self.minLearningRate} is above learningRate {self.learningRate}",
                field=".minLearningRate",
            ),
        )
    )

    optimizer: Literal["adam", "adamw", "lamb"] = "adamw"
    learning_rate: Decimal = "3e-4"
    min_learning_rate: Decimal = "0"
    """Rate at the end of cosine and linear."""
    beta1: BelowOne = "0.9"
    beta2: BelowOne = "0.95"
    epsilon: Decimal = "1e-8"
    weight_decay: Decimal = "0.1"
    no_decay: Annotated[
        tuple[Annotated[str, Field(max_length=99)], ...],
        Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ("*norm.weight", "*.bias")
    """Tensors without decay, by Hugging Face name; `*`: any text."""
    gradient_clipping: Decimal = "1"
    """Largest global norm; "0": no clipping."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Int64 = 0
    """Steps of a rising rate."""


class Lora(Value):
    """Train adapters beside the frozen weights of modelFrom."""

    rank: Count = 16
    alpha: Count = 32
    targets: (
        Annotated[
            tuple[Target, ...], Field(min_length=1, max_length=7, json_schema_extra={"x-kubernetes-list-type": "set"})
        ]
        | None
    ) = None
    """Default: all."""


class NvmeOffload(Value):
    path: Path
    """Folder on a fast local volume."""


class Memory(Value):
    """Savings of memory."""

    model_config = ConfigDict(json_schema_extra=rules(BUDGET_IS_SELECTIVE))

    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "fp8"],
        Field(json_schema_extra=immutable(f"precision {_FIXED}")),
    ] = "bf16"
    fp8_recipe: Annotated[
        Literal["Tensorwise", "Rowwise"],
        Field(json_schema_extra=immutable(f"fp8Recipe {_FIXED}")),
    ] = "Tensorwise"
    """What shares a scale with precision fp8: a tensor, or a row of it."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """Shards: 1 optimizer state, 2 also gradients, 3 also weights."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward computes again."""
    activation_budget_gib: Decimal | None = None
    """GiB of activations on a rank; `selective` keeps as many as fit."""
    cpu_offload: bool = False
    nvme_offload: NvmeOffload | None = None


class DataSource(Value):
    """Corpus."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("path", "url")))

    name: Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$")]
    path: Path | None = None
    """File, folder or glob pattern in the pod."""
    url: Annotated[str, Field(max_length=1024, pattern=r"^[a-z][a-z0-9+.-]*://.+$")] | None = None
    """File, folder or glob pattern of another file system: `s3://bucket/corpus`."""
    weight: Weight = 1
    """Share of the samples relative to other sources."""
    format: Literal["auto", "text", "jsonl", "parquet", "tokens"] = "auto"
    """`jsonl` lines and `parquet` rows hold `text` or `messages` (only the assistant's tokens count)."""


class Tokenizer(Value):
    """Tokenizer; `auto`: that of the starting weights, else a byte-level BPE is trained on the corpus."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.kind == 'path' ? has(self.path) : !has(self.path)",
                "path is needed with kind path, and only there",
                field=".path",
            ),
        )
    )

    kind: Literal["auto", "path", "train"] = "auto"
    path: Path | None = None
    vocab_size: Annotated[int, Field(ge=259, le=2**24)] = 8192
    """Size of a trained tokenizer."""


class Validation(Value):
    """Data whose loss is measured and not trained on."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("source", "fraction")))

    source: DataSource | None = None
    fraction: BelowOne | None = None
    """Part of the sources' documents that is held out."""
    every_steps: Count = 100
    max_sequences: Count = 64


class Data(Value):
    sources: Annotated[tuple[DataSource, ...], Field(min_length=1, max_length=64, json_schema_extra=list_map("name"))]
    tokenizer: Tokenizer = Tokenizer()
    packing: bool = True
    """Fill sequences with several documents; none attends to another."""
    validation: Validation | None = None
    cache_dir: Path | None = None
    """Folder of tokenised shards; default: the pod's scratch folder."""


class CheckpointPolicy(Value):
    """Place, times and number of saves; the last step is always saved."""

    storage: Annotated[StorageSpec, Field(json_schema_extra=immutable("storage is fixed: make a new TrainingJob"))]
    interval_steps: Count | None = None
    interval_minutes: Count | None = None
    max_to_keep: Count | None = None
    """Verified saves to keep; pinned, imported and used ones do not count and stay."""
    async_save: bool = True
    """Write beside the next steps."""
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    """`deletionPolicy` of the job's Checkpoint objects."""


class Elastic(Value):
    """Limits of `workers.replicas` while not all pods find a node."""

    min_workers: Annotated[int, Field(ge=1, le=4096)]
    max_workers: Annotated[int, Field(ge=1, le=4096)]


class Run(Value):
    """Start, stop and retries."""

    suspend: bool = False
    """Save, then remove the pods until it is false again."""
    cancel: Annotated[
        bool,
        Field(
            json_schema_extra=rules(forbidden("self || !oldSelf", "cancel cannot be undone: make a new TrainingJob"))
        ),
    ] = False
    """Save, then end in phase Cancelled; cannot be undone."""
    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 6
    """Failed attempts without progress before the job fails; progress resets the count."""
    active_deadline_seconds: Seconds | None = None
    """Longest time from the first start, with waiting and suspended time."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Delete the job this long after its end; its Checkpoints stay."""
    elastic: Elastic | None = None
    apply_changes: Literal["NextAttempt", "Restart"] = "NextAttempt"
    """When an edit of a running job acts; Restart: save and restart at once."""


class Wandb(Value):
    project: ForeignName
    entity: ForeignName | None = None
    group: ForeignName | None = None
    name: ForeignName | None = None
    tags: Annotated[
        tuple[ForeignName, ...], Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = ()
    api_key_secret_ref: KeyRef | None = None


class Mlflow(Value):
    tracking_uri: Text
    experiment: ForeignName
    run_name: ForeignName | None = None
    token_secret_ref: KeyRef | None = None


class Guards(Value):
    """Checks against silent damage."""

    checksum_every_steps: Count | None = None
    """Steps from one comparison of replicated state over the ranks to the next."""
    loss_spike: Literal["Off", "Record", "Skip", "Rewind"] = "Off"
    """`Record` the samples of a step whose loss jumps, `Skip` them, or `Rewind` to the last save without them."""


class Logging(Value):
    """Targets of metrics besides `/metrics` and the status."""

    jsonl: Path | None = None
    """Metrics log; default: in `logs/` beside the checkpoints."""
    every_steps: Count = 1
    """Steps from one line to the next."""
    tensorboard: Path | None = None
    """Folder of event files."""
    wandb: Wandb | None = None
    mlflow: Mlflow | None = None


class Scheduling(GangScheduling):
    """Placement of an attempt's pods."""

    topology: Levels = ()
    """For tensor groups, model replicas with their pipelines, and the gang; narrowest first."""
    gang_timeout_seconds: Seconds = 60
    """Time until a placed gang that is not fully scheduled is placed anew."""


class Deadlines(Value):
    """Longest time without progress in each phase; after it the attempt fails with Hang."""

    load_seconds: Seconds = 1800
    first_step_seconds: Seconds = 1800
    step_seconds: Seconds = 600
    save_seconds: Seconds = 1800
    validation_seconds: Seconds = 1800


class TrainingJobSpec(Value):
    model_config = ConfigDict(json_schema_extra=rules(*SPEC_RULES))

    model: Annotated[ModelSpec | None, Field(json_schema_extra=immutable(f"model {_FIXED}"))] = None
    """Model with random weights."""
    model_from: Annotated[ModelFrom | None, Field(json_schema_extra=immutable(f"modelFrom {_FIXED}"))] = None
    """Weights to start from."""
    parallelism: Parallelism = Parallelism()
    workers: Workers = Workers()
    training: Annotated[Training, Field(json_schema_extra=immutable(f"training {_FIXED}"))]
    optimization: Annotated[Optimization, Field(json_schema_extra=immutable(f"optimization {_FIXED}"))] = Optimization()
    lora: Annotated[Lora | None, Field(json_schema_extra=immutable(f"lora {_FIXED}"))] = None
    memory: Memory = Memory()
    data: Annotated[Data, Field(json_schema_extra=immutable(f"data {_FIXED}"))]
    checkpoint: CheckpointPolicy
    run: Run = Run()
    guards: Guards = Guards()
    logging: Logging = Logging()
    scheduling: Scheduling = Scheduling()
    runtime: Runtime = Runtime()
    deadlines: Deadlines = Deadlines()

    @property
    def world_size(self) -> int:
        return self.workers.replicas * self.workers.ranks

    @property
    def data_parallel(self) -> int:
        """Data-parallel size; admission has checked that it is whole."""
        return self.world_size // (self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.context)


class TrainingJob(Resource):
    """Trains a language model and keeps verified checkpoints of it."""

    kind: Literal["TrainingJob"] = "TrainingJob"
    spec: TrainingJobSpec
    status: TrainingJobStatus = TrainingJobStatus()
