"""What an edit changed that the running attempt does not have yet. Pure; called by `apply_edit` and `status`."""

from __future__ import annotations

from stoker.operator.api.trainingjob import TrainingJobSpec
from stoker.operator.api.trainingjob_status import Pinned
from stoker.operator.reconcile.intent import changed_fields
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.trainer import shaping_fields


def pending_edit(view: TrainingView, pinned: Pinned | None) -> tuple[str, ...]:
    """One line for each field of the spec in force that the rendering lacks.

    Both are read with the defaults of this version, so an upgrade of the operator is no edit.
    """
    if pinned is None or pinned.spec is None or pinned.spec == view.intent.spec:
        return ()
    rendered = TrainingJobSpec.model_validate(pinned.spec)
    return tuple(changed_fields(shaping_fields(rendered), shaping_fields(view.job.spec)))
