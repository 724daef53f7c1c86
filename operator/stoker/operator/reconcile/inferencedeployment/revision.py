"""The revision of the user's intent and the chosen checkpoint. Pure.

Its name is a hash of both when it is made. Another version of the operator reads the same manifest with other defaults
and gets another hash; so the revision of an unedited spec is kept under its name, with the hash of this version.

Called by `rollout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.api.inferencedeployment import InferenceDeploymentSpec, RevisionStatus
from stoker.operator.domain.rollout.canary import INTERRUPTED
from stoker.operator.reconcile.inferencedeployment.model_choice import ModelChoice, NoModel, checkpoint_choice
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView
from stoker.operator.render.engine import ModelSource
from stoker.operator.render.names import digest_of

_POOL_ONLY = {"replicas", "autoscaling", "maxSurge", "maxUnavailable"}
"""Fields of a pool whose change makes no new revision."""


def revision_of(view: DeploymentView, choice: ModelChoice) -> RevisionStatus:
    """Return the known revision of this intent, or a new one, with the generation of the spec that asks for it now."""
    intent = _intent(view.deployment.spec, choice)
    known = next((found for found in view.deployment.status.revisions if found.intent == intent), None)
    known = known or _revision_of_last_pass(view, choice, intent)
    generation = None if view.intent.refused else view.deployment.metadata.generation
    if known is not None:
        return known.model_copy(update={"intent": intent, "generation": generation or known.generation})
    return RevisionStatus(
        name=f"r{intent}",
        intent=intent,
        generation=generation,
        created_at=view.time,
        checkpoint=choice.checkpoint,
    )


def source_of(view: DeploymentView, choice: ModelChoice | NoModel, name: str) -> ModelSource | None:
    """Return the model of a revision that the spec in force describes: the wanted one, or one of another Checkpoint."""
    if isinstance(choice, ModelChoice) and revision_of(view, choice).name == name:
        return choice.source
    known = view.revision(name)
    older = checkpoint_choice(view, known.checkpoint.uid) if known is not None and known.checkpoint else None
    same = older is not None and known is not None and _intent(view.deployment.spec, older) == known.intent
    return older.source if older is not None and same else None


def last_target(view: DeploymentView) -> str | None:
    """Return the revision that the last pass moved to, or kept."""
    rollout = view.deployment.status.rollout
    return (rollout.to_revision if rollout else None) or view.deployment.status.current_revision


def was_interrupted(view: DeploymentView) -> bool:
    """Return whether the last target is the revision of a canary in whose place another one is wanted."""
    rollout = view.deployment.status.rollout
    return rollout is not None and rollout.canary is not None and rollout.canary.reason == INTERRUPTED


def _intent(spec: InferenceDeploymentSpec, choice: ModelChoice) -> str:
    """Return the hash of the fields that shape engines, and of the checkpoint."""
    wire = spec.to_wire()
    model = {
        name: value for name, value in wire["model"].items() if name not in {"checkpointRef", "checkpointSelector"}
    }
    pools = [_pool_intent(pool) for pool in wire["pools"]]
    checkpoint = {"uid": choice.checkpoint.uid, "digest": choice.checkpoint.digest} if choice.checkpoint else None
    return digest_of({"model": model, "engine": wire["engine"], "pools": pools, "checkpoint": checkpoint}, 10)


def _pool_intent(pool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a pool that shape engines.

    The default backend is left out, so that manifests from before there was a choice keep their hash.
    """
    found = {name: value for name, value in pool.items() if name not in _POOL_ONLY}
    scheduling = dict(found.get("scheduling") or {})
    if scheduling.get("backend") == "stoker":
        del scheduling["backend"]
    return found | ({"scheduling": scheduling} if "scheduling" in found else {})


def _revision_of_last_pass(view: DeploymentView, choice: ModelChoice, intent: str) -> RevisionStatus | None:
    """Return the revision that the last pass wanted, if that pass worked with the same spec and checkpoint.

    Both specs are read with the defaults of this version, so an upgrade of the operator is no edit.
    """
    last, wanted = view.last_spec(), _wanted_by_last_pass(view, choice)
    if last is None or wanted is None or not _had_model(view) or not _is_of(wanted, choice):
        return None
    return wanted if _intent(last, choice) == intent else None


def _wanted_by_last_pass(view: DeploymentView, choice: ModelChoice) -> RevisionStatus | None:
    """Return the revision of the newest generation that was worked with.

    Without one (an edit of it is refused, or a version before this one left another number) it is the target, which
    says nothing about the spec after a pass that was paused or ended an interrupted canary.
    """
    status, last = view.deployment.status, view.last_spec()
    asked = (found for found in status.revisions if found.generation == status.observed_generation)
    newest = next((found for found in asked if _is_of(found, choice)), None)
    if newest is not None or last is None or last.rollout.paused or was_interrupted(view):
        return newest
    return view.revision(last_target(view))


def _is_of(revision: RevisionStatus, choice: ModelChoice) -> bool:
    before, now = revision.checkpoint, choice.checkpoint
    return (before.uid, before.digest) == (now.uid, now.digest) if before and now else before is now


def _had_model(view: DeploymentView) -> bool:
    conditions = view.deployment.status.conditions
    return any(found.type == "ModelResolved" and found.status == "True" for found in conditions)
