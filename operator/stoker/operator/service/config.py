"""The operator's configuration file, one per installation. Unknown keys fail; docs/operator.md lists every key.

Frozen. Read once by `__main__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from stoker.operator.domain.elastic import Pace
from stoker.operator.domain.settings import NetworkPolicies, Settings
from stoker.pod.config_file import Config

Seconds = Annotated[float, Field(gt=0)]
Namespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]
Resources = Mapping[Literal["requests", "limits"], Mapping[str, str]]


def _resources(cpu: str, memory: str, limit: str = "") -> Resources:
    requests: Resources = {"requests": {"cpu": cpu, "memory": memory}}
    return {**requests, "limits": {"memory": limit}} if limit else requests


class ApiConfig(Config):
    """The API server: credentials, and limits for the operator's requests."""

    kubeconfig: str | None = None
    """A kubeconfig file; without one the pod's service account is used."""
    context: str | None = None
    """A context of that file; its current one by default."""
    qps: float = Field(default=400.0, gt=0)
    """Requests per second in the long run, watches not counted."""
    burst: int = Field(default=1500, ge=1)
    """Requests at once after a pause."""
    timeout_s: Seconds = 15.0
    """Longest time of one request; a watch has its own."""
    page_size: int = Field(default=100, ge=1, le=5000)
    """Objects in one page of a list: the operator's memory never holds more of them whole."""
    max_requests: int = Field(default=128, ge=1)
    """Largest number of writes at the same time."""


class ProbeListenConfig(Config):
    """The address of `/livez`, `/readyz`, `/metrics` and `/status`."""

    host: str = "0.0.0.0"
    port: int = Field(default=8080, ge=0, le=65535)


class LeaseConfig(Config):
    """Leader election among replicas."""

    name: ObjectName = "stoker-operator"
    duration_s: int = Field(default=15, ge=1)
    """Time without a renewal after which another replica takes over."""
    renew_deadline_s: Seconds = 10.0
    """Time without a successful renewal after which the holder stops; shorter than `duration_s`."""
    retry_s: Seconds = 2.0
    """Time between two attempts to renew or to take over."""

    @model_validator(mode="after")
    def _in_order(self) -> LeaseConfig:
        if not self.retry_s < self.renew_deadline_s < self.duration_s:
            given = (
                f"retry_s {self.retry_s:g}, renew_deadline_s {self.renew_deadline_s:g}, duration_s {self.duration_s}"
            )
            raise ValueError(f"retry_s < renew_deadline_s < duration_s is needed, got {given}")
        return self


class ControlKeyConfig(Config):
    """The key pair that signs control calls to pods."""

    secret: ObjectName = "stoker-control-key"
    """Secret in the operator's namespace: `current.pem` and `next.pem` (Ed25519, PKCS#8), made at the first start."""
    rotate_days: int = Field(default=90, ge=0)
    """Days after which `next` becomes `current`; 0: the keys are rotated by hand only."""
    folder: str | None = None
    """A mounted folder with `current.pem` (and `next.pem`) instead of the Secret; nothing is made or rotated then."""


class ImagesConfig(Config):
    """Images of pods whose resource names none."""

    runtime: str = Settings.runtime_image
    """Trainers and engines."""
    control: str = Settings.control_image
    """Routers and tasks."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: tuple[ObjectName, ...] = ()
    """Added to the pull secrets of every pod; they must exist in the pod's namespace."""


class PollConfig(Config):
    """Polls of running pods."""

    interval_s: Seconds = Settings.poll_interval_s
    timeout_s: Seconds = Settings.poll_timeout_s


class RoutersConfig(Config):
    """Router pods of an InferenceDeployment that names no resources for them."""

    resources: Resources = _resources("250m", "256Mi")


class TasksConfig(Config):
    """Task pods: verify, inspect, import, delete, list."""

    resources: Resources = _resources("250m", "512Mi", "2Gi")
    deadline_s: int = Field(default=Settings.task_deadline_s, ge=1)


class PodsConfig(Config):
    """All pods."""

    drain_timeout_s: Seconds = Settings.drain_timeout_s
    """Longest drain of an engine before its pod is deleted all the same."""
    node_lost_s: float = Field(default=Settings.node_lost_s, ge=0)
    """A pod counts as lost when its node stays silent for this time after the cluster marked it NotReady."""
    node_outage_share: float = Field(default=Settings.node_outage_share, gt=0, le=1)
    """No pod counts as lost while more than this share of the nodes with pods (of all, or of one zone) is silent.
    1: never an outage."""
    node_outage_nodes: int = Field(default=Settings.node_outage_nodes, ge=1)
    """Smallest number of silent nodes that can be an outage."""
    zone_outage_s: float = Field(default=Settings.zone_outage_s, ge=0)
    """Outage of one zone after which the pods of its silent nodes count as lost. 0: never."""
    elastic_patience_s: float = Field(default=Pace.patience_s, ge=0)
    """Time that a gang of an elastic run waits for room before it is made smaller."""
    elastic_rest_s: float = Field(default=Pace.rest_s, ge=0)
    """Shortest time from one change of an elastic run's size to the next."""
    model_cache_path: str = Field(default="", pattern=r"^(/[^\s]+)?$")
    """Folder of each node that keeps models fetched from a URI or a bucket, so that the pods of a node fetch them once.
    It must exist and belong to user 65532. Empty: each pod fetches into a folder of its own."""


class WatchConfig(Config):
    """Kinds that the operator reads beside its own. Off means fewer permissions and less precise messages."""

    secrets: bool = False
    """Names of Secrets, to report a missing one. Kubernetes cannot grant the names without the content."""
    nodes: bool = True
    """Nodes, to detect a lost one before the cluster evicts its pods."""
    pods: bool = True
    """Requests of all users' pods, to place gangs with the room that nodes have left. It needs `nodes` and no limit to
    some `namespaces`."""


class NetworkPoliciesConfig(Config):
    """NetworkPolicies that the operator makes for the pods of each resource."""

    enabled: bool = False
    metrics_from: tuple[Mapping[str, object], ...] = ()
    """NetworkPolicyPeers that may scrape agents and engines, for instance a namespace with Prometheus."""


class OperatorConfig(Config):
    """The whole file; every key has a default."""

    namespace: Namespace | None = None
    """The operator's own namespace, with Lease and control key. By default that of its service account."""
    namespaces: tuple[Namespace, ...] = ()
    """Namespaces whose resources are reconciled; empty: all."""
    identity: str | None = Field(default=None, min_length=1)
    """This replica's name in the Lease; by default its host name with a random suffix."""
    api: ApiConfig = ApiConfig()
    listen: ProbeListenConfig = ProbeListenConfig()
    lease: LeaseConfig = LeaseConfig()
    control_key: ControlKeyConfig = ControlKeyConfig()
    images: ImagesConfig = ImagesConfig()
    poll: PollConfig = PollConfig()
    routers: RoutersConfig = RoutersConfig()
    tasks: TasksConfig = TasksConfig()
    pods: PodsConfig = PodsConfig()
    watch: WatchConfig = WatchConfig()
    network_policies: NetworkPoliciesConfig = NetworkPoliciesConfig()
    workers: int = Field(default=Settings.workers, ge=1)
    """Largest number of reconciles at the same time."""
    resync_interval_s: Seconds = Settings.resync_interval_s
    wake_ups: tuple[Literal["TrainingJob", "Checkpoint", "InferenceDeployment", "EnginePool"], ...] = (
        "InferenceDeployment",
    )
    """Kinds that Kopf watches beside the informers, so that a dead watch costs no time. It takes about 1 ms for each
    change and 40 KiB for each object, so the many are left out."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    def settings(self) -> Settings:
        """Select what reconcilers receive; the public keys come from the key ring."""
        return Settings(
            runtime_image=self.images.runtime,
            control_image=self.images.control,
            image_pull_policy=self.images.pull_policy,
            image_pull_secrets=self.images.pull_secrets,
            poll_interval_s=self.poll.interval_s,
            poll_timeout_s=self.poll.timeout_s,
            resync_interval_s=self.resync_interval_s,
            workers=self.workers,
            max_requests=self.api.max_requests,
            router_resources=_plain(self.routers.resources),
            task_resources=_plain(self.tasks.resources),
            drain_timeout_s=self.pods.drain_timeout_s,
            task_deadline_s=self.tasks.deadline_s,
            node_lost_s=self.pods.node_lost_s,
            node_outage_share=self.pods.node_outage_share,
            node_outage_nodes=self.pods.node_outage_nodes,
            zone_outage_s=self.pods.zone_outage_s,
            elastic_pace=Pace(patience_s=self.pods.elastic_patience_s, rest_s=self.pods.elastic_rest_s),
            sees_secrets=self.watch.secrets,
            model_cache_path=self.pods.model_cache_path,
        )

    def policies(self, namespace: str) -> NetworkPolicies | None:
        """Return the peers of pods for NetworkPolicies; `namespace` is the operator's own."""
        if not self.network_policies.enabled:
            return None
        return NetworkPolicies(operator_namespace=namespace, metrics_from=self.network_policies.metrics_from)


def _plain(resources: Resources) -> dict[str, dict[str, str]]:
    return {str(name): dict(amounts) for name, amounts in resources.items()}
