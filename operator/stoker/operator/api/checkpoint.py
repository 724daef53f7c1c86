"""Checkpoint: one save of a model, as an object that outlives the job that wrote it.

It is self-contained: place of the data and kind of verification are in it, without the job.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.metadata import EditableStatus, JobRef, Resource
from stoker.operator.api.pod_fields import SmallPod
from stoker.operator.api.storage import StorageSpec
from stoker.operator.api.value import (
    Digest,
    Folder,
    ForeignName,
    Int32,
    Int64,
    Label,
    Measured,
    Text,
    Time,
    Uid,
    Value,
    exactly_one,
    forbidden,
    immutable,
    list_map,
    rules,
)

CheckpointPhase = Literal["Pending", "Saving", "Complete", "Corrupt", "Deleting", "Deleted", "Failed"]


class RecordedSave(Value):
    """A save of a job; the operator writes it whole and once."""

    job_ref: JobRef
    attempt: Int32 = 0
    writer: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$", max_length=8)]
    storage: StorageSpec
    folder: Folder
    step: Int64
    digest: Digest
    reason: Annotated[str, Field(max_length=32)] = "interval"
    """Occasion: interval, minutes, request, interrupt, final; found: by a task pod, after a lost pod."""


class Import(Value):
    """Existing folder to adopt."""

    storage: StorageSpec
    folder: Folder
    """Folder `step-...` below the storage's path."""
    digest: Digest | None = None
    """Digest that its manifest must have."""


class CheckpointSource(Value):
    """Origin of the data."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("jobRef", "import", "save")))

    job_ref: JobRef | None = None
    """Running job that saves now."""
    import_: Annotated[Import | None, Field(alias="import")] = None
    save: RecordedSave | None = None


class CheckpointSpec(Value):
    """Desired state; all but `source` may change at any time."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            forbidden(
                "!has(self.source.__import__) || self.deletionPolicy == 'Retain'",
                "imported data is never deleted: deletionPolicy must be Retain",
                ".deletionPolicy",
            ),
        )
    )

    source: Annotated[
        CheckpointSource,
        Field(json_schema_extra=immutable("source cannot be changed: make a new Checkpoint")),
    ]
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    """`Retain`, or `Delete`: the data is deleted with the object, once it is not in use."""
    pinned: bool = False
    """Keep the data whatever `checkpoint.maxToKeep` of the job allows."""
    verification: Literal["Manifest", "Full"] = "Full"
    """Work of a task pod. `Full` reads every piece and proves exact cover of the state; `Manifest` reads no data: it
    checks the manifest, the cover, and that every file has its size. An agent's read-back is always full."""
    task: SmallPod = SmallPod()
    """Pods that verify, import and delete; pull secrets, service account and node choice are those of the job."""


class Layout(Value):
    """Layout of the ranks that wrote it; any layout can load it."""

    world_size: Int32 | None = None
    data_parallel: Int32 | None = None
    tensor: Int32 | None = None
    pipeline: Int32 | None = None
    context: Int32 | None = None
    expert: Int32 | None = None
    zero_stage: Int32 | None = None


class User(Value):
    """User of this checkpoint."""

    kind: Annotated[str, Field(min_length=1, max_length=64)]
    name: ForeignName


class Origin(Value):
    """Run that wrote it."""

    name: Label
    uid: Uid | None = None
    attempt: Int32 | None = None


class CheckpointStatus(EditableStatus):
    """Conditions: Ready (committed and usable), Verified, InUse, Deleting, Stalled."""

    phase: CheckpointPhase = "Pending"
    job: Origin | None = None
    request_id: Uid | None = None
    requested_at: Time | None = None
    storage: StorageSpec | None = None
    folder: Folder | None = None
    step: Int64 | None = None
    tokens: Int64 | None = None
    loss: Measured | None = None
    validation_loss: Measured | None = None
    learning_rate: Measured | None = None
    """Rate of the saved step."""
    elapsed_seconds: Int64 | None = None
    """Time of all steps until this save, over all attempts."""
    layout: Layout | None = None
    bytes: Int64 | None = None
    files: Int32 | None = None
    """Number of files without the manifest."""
    pieces: Int64 | None = None
    """Number of shards in the manifest, each with a checksum."""
    digest: Digest | None = None
    """Digest of the manifest, which holds the checksum of every piece."""
    writer: Annotated[str, Field(max_length=64)] | None = None
    reason: Annotated[str, Field(max_length=32)] | None = None
    saved_at: Time | None = None
    verified_at: Time | None = None
    verified_by: Annotated[str, Field(max_length=64)] | None = None
    """Agent (the job read it back), Task, or Manifest (a task that read no data)."""
    in_use_by: Annotated[tuple[User, ...], Field(max_length=64, json_schema_extra=list_map("kind", "name"))] = ()
    problems: Annotated[
        tuple[Text, ...], Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = ()
    """Findings of a failed verification."""
    deleted_at: Time | None = None

    @property
    def ready(self) -> bool:
        return any(condition.type == "Ready" and condition.status == "True" for condition in self.conditions)

    @property
    def verified(self) -> bool:
        return any(condition.type == "Verified" and condition.status == "True" for condition in self.conditions)


class Checkpoint(Resource):
    """Verified save of a model."""

    kind: Literal["Checkpoint"] = "Checkpoint"
    spec: CheckpointSpec
    status: CheckpointStatus = CheckpointStatus()
