"""Checkpoint: one save of a model, as an object that outlives the job that wrote it. Self-contained: it says where the data is and how it is
verified, without the job."""

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
    """A save that a job made. Written by the operator, whole and once, so that a crash between create and status loses nothing."""

    job_ref: JobRef
    attempt: Int32 = 0
    writer: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$", max_length=8)]
    storage: StorageSpec
    folder: Folder
    step: Int64
    digest: Digest
    reason: Annotated[str, Field(max_length=32)] = "interval"
    """interval, minutes, request, interrupt, final; found: a task pod found it after a lost pod."""


class Import(Value):
    """An existing folder that is adopted."""

    storage: StorageSpec
    folder: Folder
    """The `step-...` folder below the storage's path."""
    digest: Digest | None = None
    """The manifest digest that it must have."""


class CheckpointSource(Value):
    """Where the data comes from."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("jobRef", "import", "save")))

    job_ref: JobRef | None = None
    """Ask this running job to save now."""
    import_: Annotated[Import | None, Field(alias="import")] = None
    save: RecordedSave | None = None


class CheckpointSpec(Value):
    """Source is fixed; the rest may change at any time."""

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
    """`Delete`: deleting the object deletes the data, once nobody uses it."""
    pinned: bool = False
    """`checkpoint.maxToKeep` of the job leaves it alone."""
    verification: Literal["Manifest", "Full"] = "Full"
    """`Full` reads every piece and proves that they cover the state exactly; `Manifest` trusts the pieces."""
    task: SmallPod = SmallPod()
    """Pods that verify, inspect, import and delete. The operator copies the job's image pull secrets, service account and node choice here."""


class Layout(Value):
    """The ranks that wrote it. Any layout can load it."""

    world_size: Int32 | None = None
    data_parallel: Int32 | None = None
    tensor: Int32 | None = None
    pipeline: Int32 | None = None
    context: Int32 | None = None
    expert: Int32 | None = None
    zero_stage: Int32 | None = None


class User(Value):
    """Who uses this checkpoint."""

    kind: Annotated[str, Field(min_length=1, max_length=64)]
    name: ForeignName


class Origin(Value):
    """The run that wrote it."""

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
    """Of the step that was saved."""
    elapsed_seconds: Int64 | None = None
    """Time of all steps until then, over the run's attempts."""
    layout: Layout | None = None
    bytes: Int64 | None = None
    files: Int32 | None = None
    """All in the folder but the manifest itself."""
    pieces: Int64 | None = None
    """Shards in the manifest, each with file, place, size and checksum."""
    digest: Digest | None = None
    """Of the manifest, which holds the checksum of every piece: model, optimizer and random state."""
    writer: Annotated[str, Field(max_length=64)] | None = None
    reason: Annotated[str, Field(max_length=32)] | None = None
    saved_at: Time | None = None
    verified_at: Time | None = None
    verified_by: Annotated[str, Field(max_length=64)] | None = None
    """Agent (read back by the job) or Task."""
    in_use_by: Annotated[tuple[User, ...], Field(max_length=64, json_schema_extra=list_map("kind", "name"))] = ()
    problems: Annotated[
        tuple[Text, ...], Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = ()
    """What verification found wrong."""
    deleted_at: Time | None = None

    @property
    def ready(self) -> bool:
        return any(condition.type == "Ready" and condition.status == "True" for condition in self.conditions)

    @property
    def verified(self) -> bool:
        return any(condition.type == "Verified" and condition.status == "True" for condition in self.conditions)


class Checkpoint(Resource):
    """A verified save of a model."""

    kind: Literal["Checkpoint"] = "Checkpoint"
    spec: CheckpointSpec
    status: CheckpointStatus = CheckpointStatus()
