"""EnginePool: the replicas of one pool, made and owned by the operator.

It has `/scale`, so that an autoscaler never writes what Git owns.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.gang_scheduling import PoolScheduling
from stoker.operator.api.metadata import EditableStatus, Resource
from stoker.operator.api.pool import MIN_UP_TO_MAX, Degree, Replicas, Role
from stoker.operator.api.value import (
    ForeignName,
    Int32,
    IntOrPercent,
    Opaque,
    Percent,
    Text,
    Time,
    Uid,
    Value,
    immutable,
    list_map,
    rule,
    rules,
)

RevisionName = Annotated[str, Field(max_length=16, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class EngineTemplate(Value):
    """Frozen rendering of a replica: a newer operator makes the same pod from it."""

    role: Role = "colocated"
    pods_per_replica: Degree = 1
    grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    scheduling: PoolScheduling | None = None
    config: Opaque
    """Configuration file of the engine, without what differs between pods."""
    pod: Opaque
    """Pod `{metadata, spec}`; name, hostname, labels and the configuration's volume are added."""


class Revision(Value):
    """Template and its share of the replicas."""

    name: RevisionName
    template: Annotated[
        EngineTemplate,
        Field(json_schema_extra=immutable("a revision's template cannot be changed: add another revision")),
    ]
    share: Percent
    """Percent of the replicas, at least one where it is not 0; all shares add up to 100."""


_SHARES = "self.revisions[0].share" + "".join(
    f" + (self.revisions.size() > {index} ? self.revisions[{index}].share : 0)" for index in (1, 2, 3)
)


class ReplicaBounds(Value):
    """Least and most replicas, whatever `/scale` has."""

    model_config = ConfigDict(json_schema_extra=rules(MIN_UP_TO_MAX))

    min: Replicas
    max: Replicas


class EnginePoolSpec(Value):
    """Desired state; `replicas` changes only through `/scale`."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "shares == 100",
                "the shares of all revisions must add up to 100",
                shown="the shares of all revisions must add up to 100, got {shares}",
                names={"shares": _SHARES},
                field=".revisions",
            )
        )
    )

    replicas: Replicas = 1
    bounds: ReplicaBounds | None = None
    """Bounds of `replicas`, where an external scaler writes it."""
    revisions: Annotated[tuple[Revision, ...], Field(min_length=1, max_length=4, json_schema_extra=list_map("name"))]
    max_surge: IntOrPercent = 1
    max_unavailable: IntOrPercent = 0
    paused: bool = False
    """Keep the replicas of every revision; new ones are of the revision with the largest share."""

    @property
    def bounded_replicas(self) -> int:
        """The replicas to run: `replicas` within `bounds`."""
        return self.replicas if self.bounds is None else min(self.bounds.max, max(self.bounds.min, self.replicas))


class EngineStatus(Value):
    """Pod, as its agent reports it."""

    name: ForeignName
    uid: Uid | None = None
    revision: Annotated[str, Field(max_length=63)] | None = None
    url: Annotated[str, Field(max_length=512)] | None = None
    phase: Annotated[str, Field(max_length=32)] | None = None
    """Phase of the engine: Pending, Loading, Warming, Serving, Draining, Drained, Failing; Failed after its end."""
    ready: bool = False
    draining: bool = False
    message: Text | None = None
    model_digest: Annotated[str, Field(max_length=128)] | None = None
    """Digest of the model that it has loaded."""
    drain_requested_at: Time | None = None


class RevisionReplicas(Value):
    """Replicas of one revision."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    desired: Int32 = 0
    replicas: Int32 = 0
    ready: Int32 = 0


class StartParts(Value):
    """Parts of a start in seconds, from the creation of the pods until all were ready; they add up to it.

    A part whose end is not known is in the next one.
    """

    schedule: Int32 | None = None
    """Until the last pod had its node."""
    pull: Int32 | None = None
    """Until the last container ran: images, volumes, sandboxes."""
    start: Int32 | None = None
    """Interpreter and imports."""
    plan: Int32 | None = None
    """Configuration, memory, blocks."""
    fetch: Int32 | None = None
    """Model from its URI."""
    ranks: Int32 | None = None
    """Further ranks of the replica."""
    load: Int32 | None = None
    """Weights."""
    cache: Int32 | None = None
    kernels: Int32 | None = None
    """Kernels compiled or read from their cache."""
    graphs: Int32 | None = None
    """CUDA graphs captured."""
    warm: Int32 | None = None
    """First step."""
    ready: Int32 | None = None
    """Until the probes of every pod had passed."""


class ReplicaStart(Value):
    """Start of a replica."""

    engine: ForeignName
    uid: Uid | None = None
    created_at: Time
    seconds: Int32 = 0
    parts: StartParts = StartParts()


PoolPhase = Literal["Pending", "Starting", "Serving", "Updating", "Scaling", "Degraded", "ScaledToZero", "Failed"]


class EnginePoolStatus(EditableStatus):
    """Conditions: Ready, Reconciling, Stalled, EditRefused."""

    phase: PoolPhase = "Pending"
    replicas: Int32 = 0
    """Number of existing replicas."""
    ready_replicas: Int32 = 0
    updated_replicas: Int32 = 0
    """Ready replicas of revisions that have a share."""
    queued_replicas: Int32 = 0
    """Replicas that wait in the queue of their scheduler."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector as text, for autoscalers."""
    revisions: Annotated[tuple[RevisionReplicas, ...], Field(max_length=8, json_schema_extra=list_map("name"))] = ()
    engines: Annotated[tuple[EngineStatus, ...], Field(max_length=256, json_schema_extra=list_map("name"))] = ()
    """At most 256 of the pods."""
    failures: Int32 = 0
    """Engines that ended by themselves since all replicas were last ready."""
    last_failure: Text | None = None
    retry_at: Time | None = None
    last_start: ReplicaStart | None = None
    """Start of the newest replica that has become ready."""


class EnginePool(Resource):
    """Engine replicas of one pool, made for an InferenceDeployment; only `/scale` is yours."""

    kind: Literal["EnginePool"] = "EnginePool"
    spec: EnginePoolSpec
    status: EnginePoolStatus = EnginePoolStatus()
