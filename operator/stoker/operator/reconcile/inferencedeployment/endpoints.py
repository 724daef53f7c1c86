"""Endpoints of the deployments that a deployment names: for its fallback, and for models that it serves too. Pure.

Called by `fallback`, `other_models` and `status`.
"""

from __future__ import annotations

from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.metadata import read
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView


def other_deployment(view: DeploymentView, name: str) -> InferenceDeployment | None:
    """The deployment of that name in the namespace; None where there is none, or it is being deleted."""
    others = (read(InferenceDeployment, item) for item in view.seen.of_kind("InferenceDeployment"))
    return next((item for item in others if item.metadata.name == name and not item.deleting), None)


def own_names(deployment: InferenceDeployment) -> tuple[str, ...]:
    """The names by which its engines serve its model."""
    return tuple(deployment.spec.model.names or (deployment.metadata.name,))


def url_of(deployment: InferenceDeployment) -> str:
    """The base URL of its endpoint inside the cluster."""
    metadata = deployment.metadata
    return f"http://{metadata.name}.{metadata.namespace}.svc:{deployment.spec.router.service.port}"


def endpoint_of(deployment: InferenceDeployment, wanted: str | None = None) -> dict[str, str]:
    """Endpoint, deployment and model, as routers get them.

    Args:
        wanted: the name that is passed on as it is where the deployment serves it; else its first name is sent.
    """
    names = own_names(deployment)
    return {
        "url": url_of(deployment),
        "deployment": deployment.metadata.name,
        "model": wanted if wanted in names and wanted is not None else names[0],
    }
