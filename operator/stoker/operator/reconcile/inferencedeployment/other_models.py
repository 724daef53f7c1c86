"""Models of other deployments behind one endpoint: what its routers get, its status, and what cannot be served. Pure.

A router passes a request on once, and a deployment serves for others only its own model. So two deployments may name
each other, and no chain is followed.

Called by `backends` and `status`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.operator.api.inferencedeployment import InferenceDeployment, OtherModelSettings, OtherModelStatus
from stoker.operator.domain.conditions import Condition
from stoker.operator.reconcile.inferencedeployment.endpoints import (
    endpoint_of,
    known_names,
    other_deployment,
    own_names,
)
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView

MODELS_MISSING = "ModelsMissing"
"""Condition while `router.models` has one that cannot be served."""


@dataclass(frozen=True)
class Missing:
    """Why a model cannot be served."""

    reason: str
    problem: str


def other_models(view: DeploymentView) -> dict[str, Any]:
    """The fields of the routers' snapshot; none without other models."""
    wanted = view.deployment.spec.router.models
    if not wanted:
        return {}
    own = own_names(view.deployment)
    listed = [_entry(view, one) for one in wanted if one.name not in own]
    here = [name for name in known_names(view) if all(name != one["name"] for one in listed)]
    return {"own_models": here, "models": listed} if listed else {}


def other_model_statuses(view: DeploymentView) -> tuple[OtherModelStatus, ...]:
    """One line for each model of another deployment: whether it answers now, and why not."""
    return tuple(_status(view, one) for one in view.deployment.spec.router.models)


def other_models_condition(view: DeploymentView) -> Condition:
    """`ModelsMissing`: true with the reason of the first one and all messages; absent when there is nothing to say."""
    found = [(index, _resolve(view, one)) for index, one in enumerate(view.deployment.spec.router.models)]
    missing = [(index, one) for index, one in found if isinstance(one, Missing)]
    if not missing:
        return Condition(MODELS_MISSING, None, "Resolved")
    message = "; ".join(f"spec.router.models[{index}]: {one.problem}" for index, one in missing)
    return Condition(MODELS_MISSING, True, missing[0][1].reason, message)


def _entry(view: DeploymentView, wanted: OtherModelSettings) -> dict[str, Any]:
    found = _resolve(view, wanted)
    target = {"problem": found.problem} if isinstance(found, Missing) else {"endpoint": endpoint_of(found, wanted.name)}
    return {"name": wanted.name, "deployment": wanted.deployment_ref.name, **target}


def _status(view: DeploymentView, wanted: OtherModelSettings) -> OtherModelStatus:
    found, name = _resolve(view, wanted), wanted.deployment_ref.name
    if isinstance(found, Missing):
        return OtherModelStatus(name=wanted.name, deployment=name, message=found.problem)
    if any(pool.ready for pool in found.status.pools):
        return OtherModelStatus(name=wanted.name, deployment=name, ready=True)
    message = f"InferenceDeployment {name} is {found.status.phase}"
    return OtherModelStatus(name=wanted.name, deployment=name, message=message)


def _resolve(view: DeploymentView, wanted: OtherModelSettings) -> InferenceDeployment | Missing:
    """The deployment that serves the model, or why none can."""
    name = wanted.deployment_ref.name
    if name == view.deployment.metadata.name:
        return Missing("Loop", f"{name} is the deployment itself")
    if wanted.name in own_names(view.deployment):
        return Missing("NameTaken", f"{wanted.name} is a name of the deployment's own model")
    found = other_deployment(view, name)
    return found if found is not None else Missing("NotFound", f"InferenceDeployment {name} does not exist")
