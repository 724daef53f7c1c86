"""The ConfigMap with the operator's public keys, which every pod mounts to check control calls.

Pure. Called by the loop and by the reconcilers that make pods.
"""

from __future__ import annotations

from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import Settings


def keys_config_map(resource: Object, settings: Settings) -> Object:
    """Render the public keys for the namespace of `resource`."""
    return keys_object(resource["metadata"]["namespace"], settings)


def keys_object(namespace: str, settings: Settings) -> Object:
    """Render the public keys for a namespace. All resources there share the object, so it has no owner."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": settings.control_keys_config_map,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/part-of": "stoker", "app.kubernetes.io/managed-by": "stoker-operator"},
        },
        "data": dict(settings.control_public_keys),
    }
