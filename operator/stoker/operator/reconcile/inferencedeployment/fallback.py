"""The fallback of a deployment: the endpoint of another one, for the routers' snapshot, and why there is none. Pure.

Called by `backends` and `status`.
"""

from __future__ import annotations

from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.domain.conditions import Condition
from stoker.operator.reconcile.inferencedeployment.endpoints import endpoint_of, other_deployment
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView

FALLBACK_MISSING = "FallbackMissing"
"""Condition while `router.fallback` names a deployment that cannot be used."""


def fallback_target(view: DeploymentView) -> dict[str, str] | None:
    """The other deployment's endpoint, name and model, as the routers get them."""
    found = _resolve(view)
    if not isinstance(found, InferenceDeployment):
        return None
    return endpoint_of(found)


def fallback_condition(view: DeploymentView) -> Condition:
    """`FallbackMissing`: true with the reason, absent when there is nothing to say."""
    found = _resolve(view)
    if isinstance(found, tuple):
        return Condition(FALLBACK_MISSING, True, *found)
    return Condition(FALLBACK_MISSING, None, "Resolved")


def _resolve(view: DeploymentView) -> InferenceDeployment | tuple[str, str] | None:
    """The named deployment; (reason, message) where it cannot be used; None where none is named."""
    settings = view.deployment.spec.router.fallback
    if settings is None:
        return None
    own, name = view.deployment.metadata.name, settings.deployment_ref.name
    where = "spec.router.fallback.deploymentRef"
    if name == own:
        return "Loop", f"{where} names the deployment itself"
    found = other_deployment(view, name)
    if found is None:
        return "NotFound", f"{where}: InferenceDeployment {name} does not exist"
    back = found.spec.router.fallback
    if back is not None and back.deployment_ref.name == own:
        return "Loop", f"{where}: {name} falls back to {own}; only one of them may"
    return found
