"""The Secret with the key by which the pods of a replica know each other.

It is made once for an EnginePool and goes with it. The operator writes a random key into it and cannot read it.

Pure; called by the renderer of engines and by the reconciler of EnginePools.
"""

from __future__ import annotations

from stoker.operator.api.enginepool import EnginePool
from stoker.operator.domain.labels import DEPLOYMENT, DEPLOYMENT_UID, POOL
from stoker.operator.domain.plan import Object
from stoker.operator.render.names import stem
from stoker.operator.render.pod import metadata_of


def replica_secret_name(pool: EnginePool) -> str:
    return f"{stem(pool.metadata.name, pool.metadata.uid)}-replica"


def replica_secret(pool: EnginePool, resource: Object) -> Object:
    """Render the Secret without its key."""
    labels = {name: pool.metadata.labels[name] for name in (DEPLOYMENT, DEPLOYMENT_UID, POOL)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata_of(resource, replica_secret_name(pool), "engine", labels),
        "type": "Opaque",
        "immutable": True,
    }
