"""InferenceDeployment: a model served over HTTP by pools of engines behind a router."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.engine_settings import EngineSettings
from stoker.operator.api.metadata import EditableStatus, JobRef, LocalRef, Resource
from stoker.operator.api.pod_fields import SmallPod
from stoker.operator.api.pool import Pool, Role
from stoker.operator.api.rollout import RolloutSettings
from stoker.operator.api.value import (
    Count,
    Digest,
    Folder,
    Int32,
    Int64,
    Opaque,
    Port,
    Seconds,
    StringMap,
    Text,
    Time,
    Uid,
    Value,
    exactly_one,
    list_map,
    rule,
    rules,
)

DeploymentPhase = Literal[
    "Pending", "WaitingForCheckpoint", "Starting", "Serving", "Updating", "Degraded", "ScaledToZero", "Failed"
]
RolloutPhase = Literal["Progressing", "Paused", "Completed"]
ServedName = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$")]


class CheckpointSelector(Value):
    """A verified checkpoint of a job: the deployment follows it as new ones appear."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.policy == 'best' || !has(self.metric)", "metric belongs to policy best", field=".metric")
        ),
    )

    job_ref: JobRef
    policy: Literal["newest", "best"] = "newest"
    metric: Literal["loss", "validationLoss"] | None = None
    """What `best` means: the lowest; default: validationLoss."""


class ServedModel(Value):
    """Which weights, under which names."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("checkpointRef", "checkpointSelector", "uri")))

    checkpoint_ref: LocalRef | None = None
    checkpoint_selector: CheckpointSelector | None = None
    uri: Annotated[str, Field(max_length=1024, pattern=r"^(file:///|pvc://|hf://|s3://|oci://)[^\s]+$")] | None = None
    """`file:///PATH` in a mounted volume, `pvc://CLAIM/PATH` (mounted for you); hf, s3 and oci are not supported yet."""
    names: Annotated[
        tuple[ServedName, ...], Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = ()
    """Names in `/v1/models`; default: the deployment's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


class ServiceSettings(Value):
    """The Service in front of the router."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: Port = 80
    annotations: StringMap = Field(default_factory=dict)


class RouterSettings(SmallPod):
    """The HTTP front of the deployment: sections of the router's configuration in camelCase, and its pods."""

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    policy: Literal["leastPending", "roundRobin", "cacheAware"] = "leastPending"
    connect_timeout_seconds: Seconds = 2
    request_timeout_seconds: Seconds = 600
    """Longest silence of a backend within one answer."""
    probe_interval_seconds: Seconds = 1
    max_attempts: Annotated[int, Field(ge=1, le=16)] = 3
    """Backends tried for a request that has not started to answer."""
    hold_seconds: Annotated[int, Field(ge=0, le=86400)] = 0
    """How long a request waits while no backend is ready, before it is refused with 503."""
    max_held_requests: Int32 = 256
    max_body_bytes: Count = 16777216
    grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    service: ServiceSettings = ServiceSettings()


class InferenceDeploymentSpec(Value):
    """What the user wants."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "(self.pools.size() == 1 && self.pools[0].role == 'colocated')"
                " || (self.pools.size() == 2 && self.pools.exists_one(pool, pool.role == 'prefill') && self.pools.exists_one(pool, pool.role == 'decode'))",
                "pools must be one colocated pool, or one prefill and one decode pool",
                shown="pools must be one colocated pool, or one prefill and one decode pool, got {self.pools.filter(pool, pool.role == 'colocated').size()} colocated,"
                " {self.pools.filter(pool, pool.role == 'prefill').size()} prefill, {self.pools.filter(pool, pool.role == 'decode').size()} decode",
                field=".pools",
            )
        )
    )

    model: ServedModel
    engine: EngineSettings = EngineSettings()
    pools: Annotated[tuple[Pool, ...], Field(min_length=1, max_length=8, json_schema_extra=list_map("name"))]
    router: RouterSettings = RouterSettings()
    rollout: RolloutSettings = RolloutSettings()

    def pool(self, name: str) -> Pool | None:
        return next((pool for pool in self.pools if pool.name == name), None)


class CurrentCheckpoint(Value):
    """The checkpoint that a revision serves."""

    name: Annotated[str, Field(max_length=253)]
    uid: Uid | None = None
    folder: Folder
    step: Int64 | None = None
    digest: Digest


class RevisionStatus(Value):
    """One rendered revision: hash over the user's intent and the checkpoint, frozen when first made."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    intent: Annotated[str, Field(max_length=64)] | None = None
    generation: Int64 | None = None
    """Of the spec that it was made from; absent where that spec was in force only because a later edit is refused."""
    created_at: Time | None = None
    share: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of the traffic."""
    checkpoint: CurrentCheckpoint | None = None


class RolloutStatus(Value):
    """Where the move from one revision to the next stands."""

    phase: RolloutPhase = "Progressing"
    from_revision: Annotated[str, Field(max_length=63)] | None = None
    to_revision: Annotated[str, Field(max_length=63)] | None = None
    step: Int32 | None = None
    started_at: Time | None = None
    progressed_at: Time | None = None


class PoolSummary(Value):
    """One pool, from its EnginePool's status."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    role: Role = "colocated"
    engine_pool: Annotated[str, Field(max_length=253)] | None = None
    replicas: Int32 = 0
    ready: Int32 = 0
    updated: Int32 = 0
    message: Text | None = None


class RouterStatus(Value):
    """The routers and the newest snapshot of backends they were given."""

    replicas: Int32 = 0
    ready: Int32 = 0
    revision: Annotated[str, Field(max_length=64)] | None = None
    snapshot_version: Int64 = 0
    snapshot_hash: Annotated[str, Field(max_length=64)] | None = None
    image: Annotated[str, Field(max_length=512)] | None = None
    rendered: Opaque | None = None
    """The routers' pod as first rendered for this intent."""


class InferenceDeploymentStatus(EditableStatus):
    """Conditions: Ready, Reconciling, Stalled, EditRefused, ModelResolved, RouterReady, AutoscalingLimited."""

    phase: DeploymentPhase = "Pending"
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """Base URL of the OpenAI API inside the cluster."""
    models: Annotated[
        tuple[ServedName, ...], Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = ()
    current_checkpoint: CurrentCheckpoint | None = None
    """What the requests of most users get."""
    current_revision: Annotated[str, Field(max_length=63)] | None = None
    revisions: Annotated[tuple[RevisionStatus, ...], Field(max_length=24, json_schema_extra=list_map("name"))] = ()
    rollout: RolloutStatus | None = None
    pools: Annotated[tuple[PoolSummary, ...], Field(max_length=8, json_schema_extra=list_map("name"))] = ()
    router: RouterStatus | None = None
    ready: Annotated[str, Field(max_length=32)] | None = None
    """`2/3`: ready and wanted replicas over all pools."""


class InferenceDeployment(Resource):
    """Serves a model over the OpenAI API."""

    kind: Literal["InferenceDeployment"] = "InferenceDeployment"
    spec: InferenceDeploymentSpec
    status: InferenceDeploymentStatus = InferenceDeploymentStatus()
