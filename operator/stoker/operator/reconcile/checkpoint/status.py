"""The status of a Checkpoint: the one function that derives it from the view and the outcome of a pass. Pure."""

from __future__ import annotations

from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.plan import Plan
from stoker.operator.reconcile.checkpoint.outcome import CheckpointFields, CheckpointOutcome
from stoker.operator.reconcile.checkpoint.view import CheckpointView
from stoker.operator.reconcile.intent import edit_conditions, edit_events
from stoker.operator.reconcile.outcome import derive_plan

MAX_USERS = 64
"""Limit of `status.inUseBy`."""


def derive_status(view: CheckpointView, outcome: CheckpointOutcome) -> Plan:
    """The outcome's plan with the whole status."""
    status, accepted = view.checkpoint.status, view.intent.accepted
    fields = CheckpointFields(
        phase=outcome.phase or status.phase,
        accepted_spec=None if accepted is None else dict(accepted),
        in_use_by=view.users[:MAX_USERS],
    )
    return derive_plan(
        outcome,
        seen=view.seen,
        status=status,
        fields={**fields, **outcome.changes},
        now=view.now,
        conditions=(_in_use(view), *edit_conditions(view.intent)),
        events=edit_events(view.intent, status),
    )


def _in_use(view: CheckpointView) -> Condition:
    users = ", ".join(f"{user.kind} {user.name}" for user in view.users)
    return Condition("InUse", True if view.users else None, "InUse", users)
