"""Bodies of answers about what runs: attempts and pods of a job, pools, engines and traffic of a deployment."""

from __future__ import annotations

from pydantic import BaseModel, Field


class SavedAt(BaseModel):
    """A save by name and step."""

    checkpoint_name: str | None
    step: int | None


class Failure(BaseModel):
    """The end of an attempt that failed."""

    cause: str
    exit_code: int | None
    node: str | None
    pod: str | None
    rank: int | None
    step: int | None
    detail: str
    at: str | None
    action: str | None = Field(description="Reaction: Retry, RetryFree, ResumeOlder, Fail")


class Attempt(BaseModel):
    """One attempt of a run."""

    attempt: int
    phase: str
    started_at: str | None
    placed_at: str | None
    ended_at: str | None
    first_step: int | None
    last_step: int | None
    resumed_from: SavedAt | None
    failure: Failure | None
    end: str | None = Field(description="Why it ended, if not by a failure")
    startup: dict[str, int] = Field(
        default={}, description="Seconds of each part of its start, in their order; empty before its first step"
    )


class Goodput(BaseModel):
    """Where the time of a run went, in seconds up to `since`; since then it is in `state`."""

    since: str | None
    state: str | None
    productive: int
    checkpointing: int
    starting: int
    restarting: int
    queued: int
    suspended: int
    lost: int


class RunHistory(BaseModel):
    """The attempts of a run, oldest first, and its use of time."""

    job_id: str
    attempts: list[Attempt]
    goodput: Goodput | None
    avoided_nodes: list[str]
    resource_version: str


class RankPod(BaseModel):
    """A pod of a job and the ranks in it."""

    pod_name: str
    attempt: int
    first_rank: int
    last_rank: int
    node: str | None
    phase: str
    ready: bool
    gpus: int | None
    """None: the caller may not read the claims of the pod; `unavailable` says so."""
    message: str
    unavailable: dict[str, str]
    """Fields that are not known, with the reason."""


class ScalingDecision(BaseModel):
    """One decision of the autoscaler, with what it was computed from."""

    time: str | None
    before: int
    after: int
    reason: str
    message: str
    inputs: dict[str, str]


class ReplicaStart(BaseModel):
    """Start of a replica, from the creation of its pods until it was ready."""

    engine: str
    created_at: str | None
    seconds: int
    parts: dict[str, int] = Field(description="Seconds of each part in their order; they add up to `seconds`")


class PoolState(BaseModel):
    """One pool of a deployment."""

    name: str
    role: str
    replicas: int
    ready: int
    updated: int
    message: str
    last_start: ReplicaStart | None = Field(default=None, description="Of the newest replica that became ready")
    decisions: list[ScalingDecision] = Field(default=[], description="Of the autoscaler, newest first")


class RevisionState(BaseModel):
    """One revision of a deployment, newest first."""

    name: str
    share: int = Field(description="Percent of the traffic")
    created_at: str | None
    checkpoint: SavedAt | None


class RolloutState(BaseModel):
    """Progress from one revision to the next."""

    phase: str
    from_revision: str | None
    to_revision: str | None
    step: int | None
    started_at: str | None
    progressed_at: str | None


class Bucket(BaseModel):
    """One bucket of a cumulative histogram."""

    up_to: float | None = Field(description="Seconds; null: no bound")
    count: float


class Traffic(BaseModel):
    """Counters of all routers since each started; the difference of two answers is the traffic between them."""

    requests: dict[str, float] = Field(description="Answers by status code")
    first_byte_seconds: list[Bucket]
    held: float
    pending: float
    ready_engines: float


class EngineLoad(BaseModel):
    """Gauges and counters of one engine."""

    running: float | None
    waiting: float | None
    kv_cache_usage: float | None = Field(description="Share of blocks in use, 0 to 1")
    first_token_seconds: list[Bucket]


class EngineState(BaseModel):
    """One engine of a pool."""

    pod_name: str
    pool: str = Field(description="Its name in the deployment's spec")
    revision: str
    phase: str
    ready: bool
    draining: bool
    message: str
    load: EngineLoad | None


class GpuFigures(BaseModel):
    """Measured use of one GPU; a figure that its driver does not give is null."""

    gpu: str = Field(description="UUID of the device")
    utilization: float | None = Field(default=None, description="Share of time with a kernel running, 0 to 1")
    memory_used: float | None = Field(default=None, description="Bytes")
    memory_total: float | None = Field(default=None, description="Bytes")


class Serving(BaseModel):
    """Engines and traffic of a deployment. What cannot be read is null or empty, and `unavailable` says why."""

    deployment_id: str
    measured_at: str
    routers: int
    traffic: Traffic | None
    engines: list[EngineState]
    unavailable: dict[str, str]
