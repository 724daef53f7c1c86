"""The status that a pass of the serving kinds leaves behind. They move to `outcome.derive_plan`; then this module goes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stoker.operator.api.metadata import Status
from stoker.operator.domain.conditions import Condition, Health
from stoker.operator.domain.plan import Observed, Plan
from stoker.operator.reconcile.outcome import Outcome, derive_plan


def settled(
    plan: Plan | None,
    old: Status,
    changes: Mapping[str, Any],
    conditions: tuple[Condition, ...],
    *,
    seen: Observed,
    now: datetime,
) -> Plan:
    """`plan` with the whole new status; the status is left out where nothing changes."""
    found = {condition.type: condition for condition in conditions}
    own = tuple(item for item in conditions if item.type not in ("Ready", "Reconciling", "Stalled"))
    outcome = Outcome(conditions=own, plan=plan or Plan())
    if "Ready" in found:
        stalled = Health.STALLED if found["Stalled"].status else Health.PROGRESSING
        outcome = Outcome(
            health=Health.READY if found["Ready"].status else stalled,
            reason=found["Ready"].reason,
            message=changes["message"],
            explanation=found["Ready"].message,
            conditions=own,
            plan=plan or Plan(),
        )
    return derive_plan(outcome, seen=seen, status=old, fields=changes, now=now)
