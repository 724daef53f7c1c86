"""Names of our labels: what children carry so that state survives the operator, and what the store indexes."""

from __future__ import annotations

PREFIX = "stoker.dev"

JOB = f"{PREFIX}/job"
JOB_UID = f"{PREFIX}/job-uid"
ATTEMPT = f"{PREFIX}/attempt"
NODE_RANK = f"{PREFIX}/node-rank"
ROLE = f"{PREFIX}/role"
"""`trainer`, `engine`, `router` or `task`."""
DEPLOYMENT = f"{PREFIX}/deployment"
DEPLOYMENT_UID = f"{PREFIX}/deployment-uid"
POOL = f"{PREFIX}/pool"
REVISION = f"{PREFIX}/revision"
CHECKPOINT_UID = f"{PREFIX}/checkpoint-uid"
APPLIED_HASH = f"{PREFIX}/applied-hash"

ZONE = "topology.kubernetes.io/zone"
"""Of nodes; Kubernetes' own."""

INDEXED = (JOB, JOB_UID, DEPLOYMENT, DEPLOYMENT_UID, POOL, CHECKPOINT_UID)
