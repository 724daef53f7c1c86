"""TrainingJob: one run of training. What is trained (model, data, batches, optimizer) is fixed; where and how it runs may change.

Sections carry the names of the trainer's configuration in camelCase, so that rendering is mechanical. Knows nothing about pods.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.metadata import KeyRef, Resource
from stoker.operator.api.model_spec import ModelFrom, ModelSpec
from stoker.operator.api.pod_fields import POD_RULES, PodFields, Runtime
from stoker.operator.api.storage import Storage
from stoker.operator.api.training_rules import SPEC_RULES
from stoker.operator.api.trainingjob_status import TrainingJobStatus
from stoker.operator.api.value import (
    BelowOne,
    Count,
    Decimal,
    Int64,
    Path,
    Seconds,
    Text,
    Value,
    Weight,
    Word,
    exactly_one,
    forbidden,
    immutable,
    list_map,
    rule,
    rules,
)

_FIXED = "is fixed, it says what is trained: make a new TrainingJob"
Degree = Annotated[int, Field(ge=1, le=4096)]


class Parallelism(Value):
    """Sizes of the mesh's axes; data parallel is what remains of the ranks."""

    tensor: Degree = 1
    pipeline: Degree = 1
    expert: Degree = 1
    """Spread over data-parallel and tensor ranks; does not multiply the world."""
    context: Degree = 1
    sequence_parallel: bool = False
    replicate: Degree = 1
    """Copies of the sharded state among the data-parallel ranks."""


class Workers(PodFields):
    """The pods of one attempt: all or none of them run."""

    model_config = ConfigDict(json_schema_extra=rules(*POD_RULES))

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1


class Training(Value):
    """How much to train, in which batches."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("totalSteps", "totalTokens", "epochs")))

    total_steps: Count | None = None
    total_tokens: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    epochs: Count | None = None
    global_batch_size: Count = 8
    """Sequences in one optimizer step over all ranks."""
    micro_batch_size: Count = 1
    """Sequences in one forward and backward pass of one rank."""
    sequence_length: Annotated[int, Field(ge=2, le=2**31 - 1)] = 2048
    """Tokens in one packed sequence."""
    seed: Int64 = 0
    deterministic: Literal["Off", "SameLayout", "AnyDataParallel"] = "Off"


class Optimization(Value):
    """Optimizer and learning-rate schedule. Rates are decimal strings."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("double(self.learningRate) > 0.0", "learningRate must be above 0", field=".learningRate"),
            rule("double(self.epsilon) >= 1e-30", "epsilon must be at least 1e-30", field=".epsilon"),
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
    """Where cosine and linear end."""
    beta1: BelowOne = "0.9"
    beta2: BelowOne = "0.95"
    epsilon: Decimal = "1e-8"
    weight_decay: Decimal = "0.1"
    gradient_clipping: Decimal = "1"
    """Largest global norm of the gradient; "0" turns clipping off."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0


class NvmeOffload(Value):
    path: Path
    """Folder on a fast local disk, mounted through `workers.volumes`."""


class Memory(Value):
    """What keeps a run within the memory it has."""

    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "fp8"],
        Field(json_schema_extra=immutable(f"precision {_FIXED}")),
    ] = "bf16"
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    cpu_offload: bool = False
    nvme_offload: NvmeOffload | None = None


class DataSource(Value):
    """One corpus."""

    name: Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$")]
    path: Path
    """A file, a folder or a glob pattern, as the pod sees it."""
    weight: Weight = 1
    """Share of the samples, relative to the other sources."""
    format: Literal["auto", "text", "jsonl"] = "auto"
    """`jsonl` lines hold `text`, or `messages` (the loss then counts only the assistant's tokens)."""


class Tokenizer(Value):
    """`auto`: the starting weights' own; without one, a byte-level BPE is trained on the corpus."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.kind == 'path' ? has(self.path) : !has(self.path)",
                "path and kind: path belong together",
                field=".path",
            ),
        )
    )

    kind: Literal["auto", "path", "train"] = "auto"
    path: Path | None = None
    vocab_size: Annotated[int, Field(ge=259, le=2**24)] = 8192
    """Only for a tokenizer that is trained."""


class Validation(Value):
    """Held-out data and how often its loss is measured."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("source", "fraction")))

    source: DataSource | None = None
    fraction: BelowOne | None = None
    """Part of the sources' documents that is held out."""
    every_steps: Count = 100
    max_sequences: Count = 64


class Data(Value):
    """What is learned from."""

    sources: Annotated[tuple[DataSource, ...], Field(min_length=1, max_length=64, json_schema_extra=list_map("name"))]
    tokenizer: Tokenizer = Tokenizer()
    packing: bool = True
    """Fill sequences with several documents, without attention across them."""
    validation: Validation | None = None
    cache_dir: Path | None = None
    """Folder for tokenised shards; default: the pod's scratch folder."""


class CheckpointPolicy(Value):
    """Where and when to save, and how many saves to keep. The last step is always saved."""

    storage: Annotated[Storage, Field(json_schema_extra=immutable("storage is fixed: make a new TrainingJob"))]
    interval_steps: Count | None = None
    interval_minutes: Count | None = None
    max_to_keep: Count | None = None
    """Verified saves whose data is kept; never counts or deletes pinned, imported or used ones."""
    async_save: bool = True
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    """Of the Checkpoint objects that this job makes."""


class Elastic(Value):
    """Run with fewer pods rather than not at all."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.minWorkers <= self.maxWorkers",
                "minWorkers is above maxWorkers",
                shown="minWorkers {self.minWorkers} is above maxWorkers {self.maxWorkers}",
            )
        )
    )

    min_workers: Annotated[int, Field(ge=1, le=4096)]
    max_workers: Annotated[int, Field(ge=1, le=4096)]


class Run(Value):
    """Start, stop and give up."""

    suspend: bool = False
    """Save, then release the pods; can be undone."""
    cancel: Annotated[
        bool,
        Field(
            json_schema_extra=rules(forbidden("self || !oldSelf", "cancel cannot be undone: make a new TrainingJob"))
        ),
    ] = False
    """End for good after a last save (phase Cancelled); cannot be undone."""
    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 6
    """Failed attempts without progress before the job fails; progress refills it."""
    active_deadline_seconds: Seconds | None = None
    """Longest time from the first start, waiting and suspended time included."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """The object is deleted this long after its end. Checkpoints stay."""
    elastic: Elastic | None = None


class Wandb(Value):
    project: Word
    entity: Word | None = None
    group: Word | None = None
    name: Word | None = None
    tags: Annotated[tuple[Word, ...], Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"})] = ()
    api_key_secret_ref: KeyRef | None = None


class Mlflow(Value):
    tracking_uri: Text
    experiment: Word
    run_name: Word | None = None
    token_secret_ref: KeyRef | None = None


class Logging(Value):
    """Where metrics go besides `/metrics` and the status."""

    jsonl: Path | None = None
    """File on a mounted volume that receives one line per logged step."""
    every_steps: Count = 1
    tensorboard: Path | None = None
    """Folder for event files."""
    wandb: Wandb | None = None
    mlflow: Mlflow | None = None


class Topology(Value):
    """How close the pods of a gang must be."""

    key: Word
    """Node label that names a level: `nvidia.com/gpu.clique`, `topology.kubernetes.io/zone`."""
    mode: Literal["Preferred", "Required"] = "Preferred"


class Scheduling(Value):
    """Who finds nodes for the pods of an attempt."""

    backend: Literal["auto", "stoker", "kueue", "volcano"] = "stoker"
    """`stoker`: all pods are made at once, and Kubernetes places each by itself; `auto`: an installed queueing system."""
    queue_name: Word | None = None
    topology: Topology | None = None
    gang_timeout_seconds: Seconds = 60
    """A gang that is not fully scheduled by then is gated anew."""


class Deadlines(Value):
    """Longest time without progress, per phase; beyond it the attempt hangs."""

    load_seconds: Seconds = 1800
    first_step_seconds: Seconds = 1800
    step_seconds: Seconds = 600
    save_seconds: Seconds = 1800
    validation_seconds: Seconds = 1800


class TrainingJobSpec(Value):
    """What the user wants."""

    model_config = ConfigDict(json_schema_extra=rules(*SPEC_RULES))

    model: Annotated[ModelSpec | None, Field(json_schema_extra=immutable(f"model {_FIXED}"))] = None
    """A model with random weights."""
    model_from: Annotated[ModelFrom | None, Field(json_schema_extra=immutable(f"modelFrom {_FIXED}"))] = None
    """Weights to start from."""
    parallelism: Parallelism = Parallelism()
    workers: Workers = Workers()
    training: Annotated[Training, Field(json_schema_extra=immutable(f"training {_FIXED}"))]
    optimization: Annotated[Optimization, Field(json_schema_extra=immutable(f"optimization {_FIXED}"))] = Optimization()
    memory: Memory = Memory()
    data: Annotated[Data, Field(json_schema_extra=immutable(f"data {_FIXED}"))]
    checkpoint: CheckpointPolicy
    run: Run = Run()
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
