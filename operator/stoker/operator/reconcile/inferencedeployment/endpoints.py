"""Endpoints of the deployments that a deployment names: for its fallback, and for models that it serves too. Pure.

An edit of names reaches engines with their revision, so names come from what is served, and from the spec only where
nothing is served yet.

Called by `fallback`, `other_models`, `evaluation` and `status`.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.operator.api.enginepool import Revision
from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.domain.plan import Object
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, has_pods
from stoker.operator.reconcile.intent import read_in_force
from stoker.operator.render.engine import API_KEYS


def other_deployment(view: DeploymentView, name: str) -> InferenceDeployment | None:
    """The deployment of that name in the namespace, with its spec in force; None where there is none, or it is being
    deleted."""
    others = (read_in_force(InferenceDeployment, item)[0] for item in view.seen.of_kind("InferenceDeployment"))
    return next((item for item in others if item.metadata.name == name and not item.deleting), None)


def own_names(deployment: InferenceDeployment) -> tuple[str, ...]:
    """The names by which engines of its spec serve its model."""
    return tuple(deployment.spec.model.names or (deployment.metadata.name,))


def served_names(view: DeploymentView, current: str | None) -> tuple[str, ...]:
    """The names that all of its engines know; those of the current revision where they have none in common."""
    mine = revision_names(view, current) or own_names(view.deployment)
    common = tuple(name for name in mine if all(name in names for names in _names_in_use(view)))
    return common or mine


def known_names(view: DeploymentView) -> tuple[str, ...]:
    """The names that any of its engines knows, with those of the spec."""
    return tuple(dict.fromkeys((*own_names(view.deployment), *(name for one in _names_in_use(view) for name in one))))


def revision_names(view: DeploymentView, revision: str | None) -> tuple[str, ...]:
    """The names by which engines of a revision serve its model; empty where no pool has it."""
    found = (one for pool in view.pools for one in pool.spec.revisions if one.name == revision)
    return next((_names_of(one) for one in found), ())


def revision_api_keys(view: DeploymentView, revision: str) -> Object | None:
    """The Secret, as the source of a volume, of the API keys of a revision's engines; None where they need none."""
    templates = (one.template for pool in view.pools for one in pool.spec.revisions if one.name == revision)
    volumes = next(((one.pod.get("spec") or {}).get("volumes") or () for one in templates), ())
    return next((volume["secret"] for volume in volumes if volume["name"] == API_KEYS), None)


def url_of(deployment: InferenceDeployment) -> str:
    """The base URL of its endpoint inside the cluster."""
    metadata = deployment.metadata
    return f"http://{metadata.name}.{metadata.namespace}.svc:{deployment.spec.router.service.port}"


def endpoint_of(deployment: InferenceDeployment, wanted: str | None = None) -> dict[str, str]:
    """Endpoint, deployment and model, as routers get them.

    Args:
        wanted: the name that is passed on as it is where the deployment serves it; else its first name is sent.
    """
    names = deployment.status.models or own_names(deployment)
    return {
        "url": url_of(deployment),
        "deployment": deployment.metadata.name,
        "model": wanted if wanted in names and wanted is not None else names[0],
    }


def _names_in_use(view: DeploymentView) -> Iterator[tuple[str, ...]]:
    """The names of each revision that has engines or gets some."""
    return (_names_of(one) for pool in view.pools for one in pool.spec.revisions if one.share or has_pods(pool, one))


def _names_of(revision: Revision) -> tuple[str, ...]:
    return tuple(revision.template.config["model"]["names"])
