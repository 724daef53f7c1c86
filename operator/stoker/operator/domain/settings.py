"""Settings of an installation, the same for every resource. Reconcilers read nothing else of their surroundings.

Frozen; made at the start of the operator and passed through the loop to each reconcile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.operator.domain.elastic import Pace
from stoker.operator.domain.lost_nodes import NodeLimits
from stoker.operator.domain.schedulers import Installed


@dataclass(frozen=True, kw_only=True)
class NetworkPolicies:
    """Peers that may reach pods from outside of their own resource."""

    operator_namespace: str
    metrics_from: tuple[Mapping[str, object], ...] = ()
    """NetworkPolicyPeers that may scrape agents and engines."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Frozen; the same settings and the same observation give the same plan."""

    operator_version: str = "0.1.0"
    runtime_image: str = "ghcr.io/stoker-dev/runtime:0.1.0"
    """Trainer and engine pods (ignored by the embedded cluster)."""
    control_image: str = "ghcr.io/stoker-dev/control:0.1.0"
    """Router and task pods: no torch."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets, beside those that a resource names itself."""
    python: tuple[str, ...] = ("python",)
    """Command that starts Python in a pod; the embedded cluster replaces `python` by its own interpreter."""
    control_public_keys: Mapping[str, str] = field(default_factory=dict)
    """Public keys in PEM by file name (`*.pem`): the data of the ConfigMap of each namespace with pods."""
    control_keys_config_map: str = "stoker-control-keys"

    agent_port: int = 8080
    rendezvous_port: int = 29500
    engine_port: int = 8000
    transfer_port: int = 8101
    """Messages between the engines of prefill and decode pools. Each rank of a copy of the model has the next two ports
    behind it: blocks over TCP, and links between GPUs. Further copies in the pod have the same ports behind those."""
    router_port: int = 8000

    poll_interval_s: float = 2.0
    """Time between two polls of one pod's `/status`."""
    poll_timeout_s: float = 5.0
    resync_interval_s: float = 600.0
    workers: int = 8
    """Passes at the same time; one key is never in two of them."""
    max_requests: int = 128
    """API writes at the same time."""

    # Resources of pods whose owner names none.
    router_resources: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: {"requests": {"cpu": "250m", "memory": "256Mi"}}
    )
    task_resources: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    )
    drain_timeout_s: float = 300.0
    """Longest drain of an engine before its pod is deleted anyway."""
    router_acknowledge_s: float = 10.0
    """Longest wait of a drain for every Ready router to take the snapshot without the pod."""
    task_deadline_s: int = 3600
    """`activeDeadlineSeconds` of a task pod."""
    node_lost_s: float = 10.0
    """Silence of a node after which its pods are lost, counted from when the cluster reported it."""
    node_outage_share: float = 0.5
    node_outage_nodes: int = 3
    """Silent nodes beyond that share of the nodes with pods, and at least so many, are an outage: none is lost."""
    places_gangs: bool = False
    """Whether the operator sees all nodes and pods, so that it can choose the nodes of a gang."""
    zone_outage_s: float = 900.0
    """Outage of one zone after which its nodes count as lost; 0: never."""
    elastic_pace: Pace = field(default_factory=Pace)
    """How fast the sizes of elastic runs may change."""
    installed: Installed = field(default_factory=Installed)
    """Schedulers of gangs that the cluster has."""
    model_cache_path: str = ""
    """Folder of each node that keeps models fetched from a URI or a bucket; without it each pod has its own."""
    network_policies: NetworkPolicies | None = None
    """Without them the operator makes no NetworkPolicy."""
    sees_secrets: bool = True
    """Whether the operator may see that a Secret is absent; otherwise nothing waits for one."""

    @property
    def node_limits(self) -> NodeLimits:
        zone_outage_s = self.zone_outage_s or math.inf
        return NodeLimits(self.node_lost_s, self.node_outage_share, self.node_outage_nodes, zone_outage_s)
