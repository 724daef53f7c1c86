"""Names of our labels: those by which children survive an operator, and those that the store indexes.

Constants, read by renderers, reconcilers and the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

PREFIX = "stoker.dev"

MANAGED_BY: Mapping[str, str] = {"app.kubernetes.io/managed-by": "stoker-operator"}
"""The label of every object that the operator makes."""

JOB = f"{PREFIX}/job"
JOB_UID = f"{PREFIX}/job-uid"
ATTEMPT = f"{PREFIX}/attempt"
NODE_RANK = f"{PREFIX}/node-rank"
TENSOR_GROUP = f"{PREFIX}/tensor-group"
MODEL_REPLICA = f"{PREFIX}/model-replica"
"""Numbers of the units that a pod belongs to, where affinity between pods keeps them together."""
ROLE = f"{PREFIX}/role"
"""A `PodRole`, or METRICS_ROLE."""
METRICS_ROLE = "metrics"
"""Role of a short pod that a client makes to read a job's log of metrics. The operator takes no part in it."""
TASK = f"{PREFIX}/task"
"""Verb of a task pod: `verify`, `import`, `list` or `delete`."""
TASK_TRY = f"{PREFIX}/try"
WRITER = f"{PREFIX}/writer"
"""The attempt whose folders a task pod lists."""
AFTER_STEP = f"{PREFIX}/after-step"
"""Step after which a task pod lists saves; absent where it lists all."""
DEPLOYMENT = f"{PREFIX}/deployment"
DEPLOYMENT_UID = f"{PREFIX}/deployment-uid"
POOL = f"{PREFIX}/pool"
REVISION = f"{PREFIX}/revision"
LENT_TO = f"{PREFIX}/lent-to"
"""Name of the pool that an engine pod serves instead of its own; the pod keeps its pool, and changes its role."""
DRAINING = f"{PREFIX}/draining"
"""Label on engine pods that get no new request. They are deleted when their replica's last request has finished."""
REPLICA = f"{PREFIX}/replica"
"""Name of the replica that an engine pod belongs to, which is the name of its leader; absent where it is one pod."""
PLACED_AT = f"{PREFIX}/placed-at"
"""Annotation of an engine pod: when it got its node."""
REPLICA_PODS = f"{PREFIX}/replica-pods"
"""Pods of the replica."""
RANK_PODS = f"{PREFIX}/rank-pods"
"""Pods of one data-parallel rank of the replica, the first of which answers requests; absent where it has one rank."""
SCHEDULER = f"{PREFIX}/scheduler"
"""Scheduler that an engine pod's replica was given to; absent where that is the operator, or Kubernetes' own for single
pods."""
POD_GROUP = f"{PREFIX}/pod-group"
"""Name of the group by which that scheduler knows the pods of the replica; each replica has a new one."""
CHECKPOINT_UID = f"{PREFIX}/checkpoint-uid"
EXPIRED = f"{PREFIX}/expired"
"""Mark of a Checkpoint whose data the job's retention gives up; its own reconcile deletes data and object."""
APPLIED_HASH = f"{PREFIX}/applied-hash"

ZONE = "topology.kubernetes.io/zone"
"""Label of nodes, and of pods where Kubernetes copies it; Kubernetes' own."""

INDEXED = (JOB, JOB_UID, DEPLOYMENT, DEPLOYMENT_UID, POOL, CHECKPOINT_UID)


class PodRole(StrEnum):
    """Purpose of a pod of ours."""

    TRAINER = "trainer"
    ENGINE = "engine"
    ROUTER = "router"
    TASK = "task"


def is_managed(resource: Mapping[str, Any]) -> bool:
    """Whether the operator made an object."""
    labels = resource["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in MANAGED_BY.items())
