"""What an edit changed that the running attempt does not have yet. Pure; called by `apply_edit` and `status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.api.trainingjob import TrainingJobSpec
from stoker.operator.api.trainingjob_status import Pinned
from stoker.operator.domain.pods import is_gated
from stoker.operator.reconcile.intent import changed_fields
from stoker.operator.reconcile.trainingjob.attempt import gang_size
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.trainer import shaping_fields


def pending_edit(view: TrainingView, pinned: Pinned | None) -> tuple[str, ...]:
    """One line for each field of the spec in force that the rendering lacks.

    Both are read with the defaults of this version, so an upgrade of the operator is no edit.
    """
    if pinned is None or pinned.spec is None or pinned.spec == view.intent.spec:
        return ()
    rendered = TrainingJobSpec.model_validate(spec_of_attempt(view, pinned.spec))
    return tuple(changed_fields(_fields_of_attempt(rendered), _fields_of_attempt(view.job.spec)))


def spec_of_attempt(view: TrainingView, pinned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of the running attempt: the pinned one, with the present topology while that places its pods."""
    present = view.intent.spec.get("scheduling") or {}
    if not _is_to_be_placed(view) or present.get("topology") == (pinned.get("scheduling") or {}).get("topology"):
        return dict(pinned)
    placement = {name: value for name, value in (pinned.get("scheduling") or {}).items() if name != "topology"}
    topology = {"topology": present["topology"]} if "topology" in present else {}
    return {**pinned, "scheduling": {**placement, **topology}}


def _is_to_be_placed(view: TrainingView) -> bool:
    """Whether the operator has yet to choose nodes, or affinities between pods. Other schedulers know the topology."""
    attempt = view.attempt
    if attempt is None or attempt.ended_at is not None or attempt.scheduler:
        return False
    return len(view.gang) < gang_size(view) or any(map(is_gated, view.gang))


def _fields_of_attempt(spec: TrainingJobSpec) -> dict[str, Any]:
    """Return what is settled when an attempt starts: what shapes its pods, and how these are placed."""
    placement = spec.scheduling.to_wire()
    placement.pop("gangTimeoutSeconds", None)
    return {**shaping_fields(spec), "scheduling": placement}
