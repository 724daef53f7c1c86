"""What the cluster refuses, said in the status of the resource that wanted it. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from stoker.operator.domain.conditions import Health, merge, summary
from stoker.operator.domain.plan import Object, Plan

REASON = "Refused"


def with_refusal(plan: Plan, resource: Object, refusal: str, now: datetime) -> Plan:
    """`plan` whose status says that the last pass was refused: a person must act, though the pass is tried again."""
    status = plan.status if plan.status is not None else (resource.get("status") or {})
    message = refusal[:1024]
    conditions = merge(
        status.get("conditions") or (),
        summary(Health.STALLED, REASON, message),
        now,
        int(resource["metadata"].get("generation", 1)),
    )
    return replace(plan, status={**status, "message": message, "conditions": conditions})
