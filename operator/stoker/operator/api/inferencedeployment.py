"""InferenceDeployment: a model served over HTTP by pools of engines behind a router."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.engine_settings import CACHE_EVENT_RULES, EngineSettings
from stoker.operator.api.enginepool import ReplicaStart
from stoker.operator.api.metadata import EditableStatus, JobRef, LocalRef, Resource
from stoker.operator.api.pod_fields import SmallPod
from stoker.operator.api.pool import Pool, Role
from stoker.operator.api.rollout import ATOMIC, RolloutSettings
from stoker.operator.api.value import (
    Count,
    Decimal,
    Digest,
    Folder,
    Int32,
    Int64,
    Label,
    Opaque,
    Port,
    Seconds,
    StringMap,
    Text,
    Time,
    Uid,
    Value,
    described_elsewhere,
    exactly_one,
    list_map,
    rule,
    rules,
)
from stoker.pod.class_place import MAX_CLASSES

DeploymentPhase = Literal[
    "Pending",
    "WaitingForCheckpoint",
    "Starting",
    "Serving",
    "Updating",
    "Scaling",
    "Degraded",
    "ScaledToZero",
    "Failed",
]
RolloutPhase = Literal["Progressing", "Paused", "Completed", "RolledBack"]
ServedName = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$")]


class CheckpointSelector(Value):
    """Verified checkpoint of a job; newer ones replace it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.policy == 'best' || !has(self.metric)", "metric belongs to policy best", field=".metric")
        ),
    )

    job_ref: JobRef
    policy: Literal["newest", "best"] = "newest"
    metric: Literal["loss", "validationLoss"] | None = None
    """Metric whose lowest value is `best`; default: validationLoss."""


MODEL_URI = (
    r"^(file:///\S+|pvc://[^/\s]+(/\S*)?|hf://[a-zA-Z0-9_.-]+/[a-zA-Z0-9_.-]+(@[a-zA-Z0-9_./-]+)?"
    r"|s3://[a-z0-9][a-z0-9.-]+(/[^/\s]+)*/?"
    r"|oci://[a-zA-Z0-9_.-]+(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+"
    r"(:[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?)$"
)
"""As `parse_model_uri` takes them, without white space; a test compares the two."""
MODEL_URI_FORMS = (
    "file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX,"
    " oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"
)


class ServedModel(Value):
    """Weights and their names."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            exactly_one("checkpointRef", "checkpointSelector", "uri"),
            rule(
                f"!has(self.uri) || self.uri.matches(r'{MODEL_URI}')",
                f"uri names no model; allowed: {MODEL_URI_FORMS}",
                shown=f"uri {{self.uri}} names no model; allowed: {MODEL_URI_FORMS}",
                field=".uri",
            ),
            rule(
                "!has(self.uriSecretRef) || (has(self.uri) && self.uri.matches('^(hf|s3|oci)://'))",
                "uriSecretRef belongs to a uri hf://, s3:// or oci://",
                field=".uriSecretRef",
            ),
        )
    )

    checkpoint_ref: LocalRef | None = None
    checkpoint_selector: CheckpointSelector | None = None
    uri: Annotated[str, Field(max_length=1024)] | None = None
    """`file:///PATH` in a mounted volume, `pvc://CLAIM[/PATH]`, or what engines fetch into a cache:
    `hf://ORG/NAME[@REVISION]`, `s3://BUCKET/PREFIX`, `oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]`."""
    uri_secret_ref: LocalRef | None = None
    """Secret with the access to `uri`: HF_TOKEN, HF_ENDPOINT; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_ENDPOINT_URL, AWS_REGION; REGISTRY_USERNAME, REGISTRY_PASSWORD, .dockerconfigjson."""
    names: Annotated[
        tuple[ServedName, ...], Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = ()
    """Names in `/v1/models`; default: that of the deployment."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


class ServiceSettings(Value):
    """Service in front of the router."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: Port = 80
    annotations: StringMap = Field(default_factory=dict)


class FallbackSettings(Value):
    """Smaller model that answers while no engine of this one can."""

    deployment_ref: LocalRef


class OtherModelSettings(Value):
    """Model of another deployment of the namespace that this endpoint serves too."""

    name: ServedName
    """Name in requests and in `/v1/models` of this endpoint."""
    deployment_ref: LocalRef


class RequestClassSettings(Value):
    """Requests with one goal. A request names its class by the header `X-Stoker-Class`, or by `service_tier`."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.agingSeconds) || self.agingSeconds <= self.maxQueueSeconds",
                "agingSeconds is above maxQueueSeconds",
                shown="agingSeconds {self.agingSeconds} is above maxQueueSeconds {self.maxQueueSeconds}",
                field=".agingSeconds",
            ),
        )
    )

    name: Label
    service_tiers: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=32)], ...],
        Field(max_length=5, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Values of `service_tier` for this class, beside its name: `flex`."""
    ttft_ms: Count | None = None
    """A request goes to an engine while its first token is predicted within this time."""
    max_queued: Int32 = 256
    """Requests that wait in one router; more get 429."""
    max_queue_seconds: Annotated[int, Field(ge=0, le=86400)] = 0
    """How long a request waits before it gets 429; 0: not at all."""
    late_class: Annotated[str, Field(max_length=63)] | None = None
    """Later class of late requests; default: they get 429."""
    aging_seconds: Seconds | None = None
    """A request that waited so long goes before all others, one at a time; default: half of maxQueueSeconds."""


class RouterSettings(SmallPod):
    """HTTP front of the deployment and its pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.classes) || self.classes.all(c, !has(c.serviceTiers) || c.serviceTiers.all(t,"
                " self.classes.filter(d, d.name == t || (has(d.serviceTiers) && t in d.serviceTiers)).size() == 1))",
                "a value of serviceTiers belongs to one class, and is no name of one",
                field=".classes",
            ),
        )
    )

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    policy: Literal["leastPending", "roundRobin", "powerOfTwo", "random", "cacheAware", "locality"] = "leastPending"
    connect_timeout_seconds: Seconds = 2
    request_timeout_seconds: Seconds = 600
    """Longest silence of an engine within one answer."""
    probe_interval_seconds: Seconds = 1
    max_attempts: Annotated[int, Field(ge=1, le=16)] = 3
    """Engines tried for a request whose answer has not begun."""
    hold_seconds: Annotated[int, Field(ge=0, le=86400)] = 0
    """Time that a request waits for a ready engine before it gets 503."""
    max_held_requests: Int32 = 256
    classes: Annotated[
        tuple[RequestClassSettings, ...], Field(max_length=MAX_CLASSES, json_schema_extra=list_map("name"))
    ] = ()
    """The most urgent first, which is that of requests that name none."""
    max_body_bytes: Count = 16777216
    fallback: FallbackSettings | None = None
    models: Annotated[tuple[OtherModelSettings, ...], Field(max_length=32, json_schema_extra=list_map("name"))] = ()
    grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    service: ServiceSettings = ServiceSettings()


class InferenceDeploymentSpec(Value):
    """Desired state."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.pools.size() == 1 ? self.pools[0].role == 'colocated' : self.pools.size() == 2"
                " && ['prefill', 'decode'].all(r, self.pools.exists(p, p.role == r))",
                "pools must be one colocated pool, or one prefill and one decode pool",
                shown="pools must be one colocated pool, or one prefill and one decode pool,"
                " got {self.pools.filter(p, p.role == 'colocated').size()} colocated,"
                " {self.pools.filter(p, p.role == 'prefill').size()} prefill,"
                " {self.pools.filter(p, p.role == 'decode').size()} decode",
                field=".pools",
            ),
            rule(
                "!has(self.engine.transfer) || self.pools.size() == 2",
                "transfer has no effect in a colocated pool",
                field=".engine.transfer",
                reason="FieldValueForbidden",
            ),
            *CACHE_EVENT_RULES,
            rule(
                "!has(self.router.models) || !has(self.model.names)"
                " || self.router.models.all(m, !(m.name in self.model.names))",
                "a name of router.models is one of model.names",
                field=".router.models",
            ),
            rule(
                "self.router.holdSeconds > 0"
                " || self.pools.all(p, !has(p.autoscaling) || p.autoscaling.mode in ['fixed', 'external']"
                " || p.autoscaling.min > 0)",
                "autoscaling.min 0 needs router.holdSeconds above 0: requests that routers hold wake the pool",
                field=".router.holdSeconds",
            ),
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
    """Checkpoint of a revision."""

    name: Annotated[str, Field(max_length=253)]
    uid: Uid | None = None
    folder: Folder
    step: Int64 | None = None
    digest: Digest


class RevisionStatus(Value):
    """Rendered revision: a hash of spec and checkpoint."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    intent: Annotated[str, Field(max_length=64)] | None = None
    generation: Int64 | None = None
    """Generation of its spec; absent for an accepted one while an edit is refused."""
    created_at: Time | None = None
    share: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of the traffic."""
    checkpoint: CurrentCheckpoint | None = None


class GateStatus(Value):
    """Verdict of one gate and what it was made from."""

    metric: Annotated[str, Field(max_length=64)]
    verdict: Literal["Passed", "Failed", "Waiting"]
    value: Decimal | None = None
    """Of the new revision."""
    base: Decimal | None = None
    """Of the old revision in the same window, where the gate compares."""
    samples: Int64 = 0
    base_samples: Int64 = 0
    message: Text | None = None


class CanaryStatus(Value):
    """State of a canary."""

    phase: Literal["Waiting", "Holding", "Promoted", "Failed"] = "Waiting"
    step: Int32 = 0
    """Number of the present step, from 1."""
    percent: Annotated[int, Field(ge=0, le=100)] = 0
    """Of the traffic, now."""
    since: Time | None = None
    """When the step was entered, or its share began."""
    reason: Annotated[str, Field(max_length=64)] | None = None
    message: Text | None = None
    judged_at: Time | None = None
    gates: Annotated[tuple[GateStatus, ...], Field(max_length=16, json_schema_extra=ATOMIC)] = ()


class RolloutStatus(Value):
    """Progress from one revision to the next."""

    phase: RolloutPhase = "Progressing"
    from_revision: Annotated[str, Field(max_length=63)] | None = None
    to_revision: Annotated[str, Field(max_length=63)] | None = None
    step: Int32 | None = None
    started_at: Time | None = None
    progressed_at: Time | None = None
    canary: CanaryStatus | None = None


class ScalingDecision(Value):
    """One decision of the autoscaler with what it was computed from."""

    time: Time
    before: Int32
    after: Int32
    reason: Annotated[str, Field(max_length=64)]
    message: Text | None = None
    inputs: StringMap = Field(default_factory=dict)


class PoolSummary(Value):
    """Summary of one pool."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    role: Role = "colocated"
    engine_pool: Annotated[str, Field(max_length=253)] | None = None
    replicas: Int32 = 0
    ready: Int32 = 0
    updated: Int32 = 0
    message: Text | None = None
    last_start: Annotated[ReplicaStart | None, Field(json_schema_extra=described_elsewhere())] = None
    """Start of the newest replica, as in the EnginePool."""
    decisions: Annotated[tuple[ScalingDecision, ...], Field(max_length=20, json_schema_extra=ATOMIC)] = ()
    """The autoscaler's last changes of the pool, and the begin of what keeps it from one."""


class RouterStatus(Value):
    """Routers and the newest snapshot of backends that they got."""

    replicas: Int32 = 0
    ready: Int32 = 0
    revision: Annotated[str, Field(max_length=64)] | None = None
    intent: Annotated[str, Field(max_length=64)] | None = None
    snapshot_version: Int64 = 0
    snapshot_hash: Annotated[str, Field(max_length=64)] | None = None
    image: Annotated[str, Field(max_length=512)] | None = None
    rendered: Opaque | None = None
    """Internal: the routers' pod that every restart reuses."""


class OtherModelStatus(Value):
    """Model of another deployment."""

    name: Annotated[str, Field(max_length=128)]
    deployment: Annotated[str, Field(max_length=253)]
    ready: bool = False
    message: Text | None = None


class InferenceDeploymentStatus(EditableStatus):
    """Conditions: Ready, Reconciling, Stalled, EditRefused, ModelResolved, RouterReady, AutoscalingLimited,
    Disaggregated, PoolsIncompatible, StoreUnavailable, FallbackMissing, ModelsMissing."""

    phase: DeploymentPhase = "Pending"
    """`Scaling`: it answers while replicas are added or replaced; `Degraded`: engines or routers of it fail."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """Base URL of the OpenAI API inside the cluster."""
    models: Annotated[
        tuple[ServedName, ...], Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = ()
    other_models: Annotated[tuple[OtherModelStatus, ...], Field(max_length=32, json_schema_extra=list_map("name"))] = ()
    current_checkpoint: CurrentCheckpoint | None = None
    """Checkpoint that serves most requests."""
    model_digest: Annotated[str, Field(max_length=128)] | None = None
    """Digest of the current revision's model: of its manifest, or `commit:...`, `sha256:...` or `blake3:...` of what
    was fetched."""
    current_revision: Annotated[str, Field(max_length=63)] | None = None
    revisions: Annotated[tuple[RevisionStatus, ...], Field(max_length=24, json_schema_extra=list_map("name"))] = ()
    rollout: RolloutStatus | None = None
    pools: Annotated[tuple[PoolSummary, ...], Field(max_length=8, json_schema_extra=list_map("name"))] = ()
    router: RouterStatus | None = None
    ready: Annotated[str, Field(max_length=32)] | None = None
    """Ready and desired replicas of all pools: `2/3`."""


def _not_itself() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rules that no reference names its own deployment, for new objects and for edits.

    An object stored before the rules keeps its references: else no status could be written to it. It has a status,
    which a new one has not, and an edit may not bring a reference to itself in.
    """
    names_itself = (
        "(has(o.spec.router.fallback) && o.spec.router.fallback.deploymentRef.name == o.metadata.name"
        " || has(o.spec.router.models) && o.spec.router.models.exists(m, m.deploymentRef.name == o.metadata.name))"
    )
    new = f"has(self.status) || ![self].exists(o, {names_itself})"
    edited = f"!has(self.status) || [self, oldSelf].map(o, {names_itself}) != [true, false]"
    text = "fallback and models must name other deployments"
    return (
        rule(new, text, field=".spec.router"),
        rule(edited, text, field=".spec.router"),
    )


class InferenceDeployment(Resource):
    """Serves a model over the OpenAI API."""

    model_config = ConfigDict(json_schema_extra=rules(*_not_itself()))

    kind: Literal["InferenceDeployment"] = "InferenceDeployment"
    spec: InferenceDeploymentSpec
    status: InferenceDeploymentStatus = InferenceDeploymentStatus()
