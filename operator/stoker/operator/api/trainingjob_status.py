"""Status of a TrainingJob: the operator's report, and its memory for decisions after its own restart."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.operator.api.metadata import EditableStatus
from stoker.operator.api.pod_fields import PodCounts
from stoker.operator.api.value import (
    Digest,
    Folder,
    ForeignName,
    Int32,
    Int64,
    Measured,
    Name,
    Opaque,
    StringMap,
    Text,
    Time,
    Uid,
    Value,
    described_elsewhere,
    list_map,
)

TrainingPhase = Literal[
    "Pending",
    "Starting",
    "Running",
    "Checkpointing",
    "Restarting",
    "Suspending",
    "Suspended",
    "Cancelling",
    "Completed",
    "Failed",
    "Cancelled",
]
TERMINAL_PHASES: frozenset[str] = frozenset({"Completed", "Failed", "Cancelled"})

CauseName = Annotated[str, Field(max_length=64)]
ActionName = Annotated[str, Field(max_length=64)]
Writer = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$", max_length=8)]


class SourceProgress(Value):
    """What is trained of one data source."""

    name: Text
    samples: Int64
    """Sequences, over all epochs."""
    epochs: Measured


class Progress(Value):
    """Newest metrics of the run."""

    step: Int64 = 0
    total_steps: Int64 | None = None
    tokens: Int64 | None = None
    loss: Measured | None = None
    validation_loss: Measured | None = None
    learning_rate: Measured | None = None
    gradient_norm: Measured | None = None
    tokens_per_second: Measured | None = None
    eta_seconds: Int64 | None = None
    progressed_at: Time | None = None
    """Time at which the last step ended."""
    sources: Annotated[tuple[SourceProgress, ...], Field(max_length=64, json_schema_extra=list_map("name"))] = ()


class SavedStep(Value):
    """A save and its Checkpoint object."""

    name: Name | None = None
    folder: Folder
    step: Int64
    digest: Digest
    verified: bool = False


class Failure(Value):
    """Reason for the end of an attempt."""

    cause: CauseName
    """Cause in the table of exit codes."""
    exit_code: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    node: ForeignName | None = None
    pod: ForeignName | None = None
    rank: Int32 | None = None
    step: Int64 | None = None
    detail: Text | None = None
    at: Time | None = None
    action: ActionName | None = None
    """Reaction: Retry, RetryFree (not counted), ResumeOlder, Fail."""


class Startup(Value):
    """Parts of a start in seconds, from the opening of the attempt to the end of its first step; they add up to it.

    A part whose end is not known is in the next one.
    """

    queue: Int32 = 0
    """Until the operator had a node for each pod."""
    schedule: Int32 = 0
    """Until the scheduler had bound the last pod."""
    pull: Int32 = 0
    """Until the last container ran: images, volumes, sandboxes."""
    start: Int32 = 0
    """Until the ranks ran: interpreter and imports."""
    rendezvous: Int32 = 0
    load: Int32 = 0
    """Weights or checkpoint, tokenizer, data."""
    compile: Int32 = 0
    """Kernels compiled until the end of the first step."""
    first_step: Int32 = 0
    """Without that."""


class Straggler(Value):
    """A rank that the others wait for."""

    rank: Int32
    pod: ForeignName | None = None
    node: ForeignName | None = None
    ratio: Measured
    """Time that it computes in a step over the median of its peers."""


class Attempt(Value):
    """One life of the pods from start to end."""

    number: Int32
    writer: Writer | None = None
    """Part of the name of every folder that it writes."""
    phase: Annotated[str, Field(max_length=32)] | None = None
    scheduler: Annotated[str, Field(max_length=16)] | None = None
    """Of the gang, if not Stoker."""
    revision: Annotated[str, Field(max_length=64)] | None = None
    started_at: Time | None = None
    placed_at: Time | None = None
    """Time at which every pod of the gang got its node."""
    ended_at: Time | None = None
    end: Text | None = None
    """Why it ended, if not by a failure."""
    first_step: Int64 | None = None
    last_step: Int64 | None = None
    announced_step: Int64 | None = None
    """Highest step whose Checkpoint object was made."""
    resumed_from: Annotated[SavedStep | None, Field(json_schema_extra=described_elsewhere())] = None
    """Save that it continues, as `newestVerifiedCheckpoint`."""
    failure: Failure | None = None
    startup: Annotated[Startup | None, Field(json_schema_extra=described_elsewhere())] = None
    """Seconds of each part of the start, docs/operator.md."""


class Pinned(Value):
    """What every restart reuses until the user changes the intent: an operator upgrade restarts nothing."""

    intent: Annotated[str, Field(max_length=64)]
    """Hash of the spec's parts that shape a pod."""
    revision: Annotated[str, Field(max_length=64)]
    generation: Int64 | None = None
    images: StringMap = Field(default_factory=dict)
    """`trainer`: by digest once pod 0's node reports one, as written until then (always on the embedded cluster)."""
    rendered: Opaque | None = None
    """Pod and configuration as first rendered for this intent."""
    spec: Opaque | None = None
    """The spec that was rendered; what differs from it waits for the next attempt."""


class PendingRequest(Value):
    """A last save before the pods go, as it was asked of the running attempt."""

    id: Uid
    kind: Literal["suspend", "cancel", "restart"]
    requested_at: Time | None = None


class Resumption(Value):
    """The search for what to resume, while an attempt's last saves are being listed and verified."""

    listed_writer: Writer | None = None
    """The attempt whose folders a task pod has listed."""
    rejected: Annotated[
        tuple[Folder, ...], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = ()
    """Saves found corrupt: never tried again."""


class Goodput(Value):
    """Where the run's time went, in seconds up to `since`; since then it is in `state`. They add up to its age."""

    since: Time
    state: Annotated[str, Field(max_length=16)] | None = None
    """Absent after the end."""
    productive: Int64 = 0
    checkpointing: Int64 = 0
    starting: Int64 = 0
    restarting: Int64 = 0
    queued: Int64 = 0
    suspended: Int64 = 0
    lost: Int64 = 0
    """Training that restarts had to repeat."""
    attempt: Int32 = 0
    attempt_productive: Int64 = 0
    """Productive seconds of that attempt."""


class ElasticSize(Value):
    """The size that an elastic run has instead of `workers.replicas`."""

    workers: Int32
    form: Opaque
    base: Annotated[str, Field(max_length=64)]
    """Hash of the spec that it was chosen for; another spec ends it."""
    changed_at: Time


class TrainingJobStatus(EditableStatus):
    phase: TrainingPhase = "Pending"
    started_at: Time | None = None
    finished_at: Time | None = None
    attempt: Attempt | None = None
    """The current or last attempt."""
    attempts: Annotated[
        tuple[Attempt, ...], Field(max_length=10, json_schema_extra={**list_map("number"), **described_elsewhere()})
    ] = ()
    """Earlier ones, newest first, as `attempt`."""
    restarts: Int32 = 0
    failures_without_progress: Int32 = 0
    """Count against `run.backoffLimit`; a verified save past the best step resets it."""
    best_step: Int64 = 0
    """Highest step of a verified save."""
    lost_steps: Int64 = 0
    """Steps that restarts had to repeat."""
    goodput: Annotated[Goodput | None, Field(json_schema_extra=described_elsewhere())] = None
    """Seconds by state, up to `since`; they add up to the age of the run, docs/operator.md."""
    stragglers: Annotated[
        tuple[Straggler, ...],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic", **described_elsewhere()}),
    ] = ()
    """Ranks that the others wait for."""
    avoided_nodes: Annotated[
        tuple[ForeignName, ...], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = ()
    """Nodes that attempts failed on twice or more often; gangs are placed without them while others have room."""
    elastic: Annotated[ElasticSize | None, Field(json_schema_extra=described_elsewhere())] = None
    """Number of workers by `run.elastic`."""
    progress: Progress | None = None
    data_parallel: Int32 | None = None
    world_size: Int32 | None = None
    pods: PodCounts | None = None
    latest_checkpoint: Annotated[SavedStep | None, Field(json_schema_extra=described_elsewhere())] = None
    """Newest save, verified or not, as `newestVerifiedCheckpoint`."""
    newest_verified_checkpoint: SavedStep | None = None
    best_verified_checkpoint: Annotated[SavedStep | None, Field(json_schema_extra=described_elsewhere())] = None
    """Lowest validation loss, as `newestVerifiedCheckpoint`."""
    checkpoints: Int32 = 0
    """Number of Checkpoint objects."""
    last_failure: Annotated[Failure | None, Field(json_schema_extra=described_elsewhere())] = None
    """The newest failure, as `attempt.failure`."""
    resumption: Annotated[Resumption | None, Field(json_schema_extra=described_elsewhere())] = None
    """Internal: search for the save to resume."""
    requests: Annotated[
        tuple[PendingRequest, ...], Field(max_length=16, json_schema_extra={**list_map("id"), **described_elsewhere()})
    ] = ()
    """Internal: saves and drains that are not confirmed."""
    pinned: Annotated[Pinned | None, Field(json_schema_extra=described_elsewhere())] = None
    """Internal: pods and configuration that every restart reuses."""

    @property
    def terminal(self) -> bool:
        return self.phase in TERMINAL_PHASES
