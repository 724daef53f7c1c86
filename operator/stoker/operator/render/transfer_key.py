"""The Secret with the key by which the engines of prefill and decode pools know each other.

It is made once for a deployment and goes with it. The operator writes a random key into it and cannot read it.

Pure; called by the renderer of engines and by the reconciler of InferenceDeployments.
"""

from __future__ import annotations

from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.domain.plan import Object
from stoker.operator.render.names import stem
from stoker.operator.render.pod import metadata_of
from stoker.operator.render.router import deployment_labels


def transfer_secret_name(deployment: InferenceDeployment) -> str:
    return f"{stem(deployment.metadata.name, deployment.metadata.uid)}-transfer"


def transfer_secret(deployment: InferenceDeployment, resource: Object) -> Object:
    """Render the Secret without its key."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata_of(resource, transfer_secret_name(deployment), "engine", deployment_labels(deployment)),
        "type": "Opaque",
        "immutable": True,
    }
