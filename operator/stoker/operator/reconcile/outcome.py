"""The typed result of one pass, and the status that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from stoker.operator.api.metadata import Condition as StatusCondition
from stoker.operator.api.metadata import Status
from stoker.operator.domain.conditions import Condition, Health, merge, summary
from stoker.operator.domain.plan import Event, Observed, Plan

S = TypeVar("S", bound=Status)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one pass decided. Kinds derive from it and add their own fields."""

    health: Health | None = None
    """None: the pass has nothing new to report."""
    reason: str = ""
    message: str | None = None
    explanation: str | None = None
    conditions: tuple[Condition, ...] = ()
    plan: Plan = Plan()  # noqa: RUF009  frozen


def derive_plan(
    outcome: Outcome,
    *,
    seen: Observed,
    status: S,
    fields: Mapping[str, Any],
    now: datetime,
    conditions: tuple[Condition, ...] = (),
    events: tuple[Event, ...] = (),
) -> Plan:
    """The outcome's plan with the whole new status, or without one where nothing changes."""
    plan = replace(outcome.plan, events=(*outcome.plan.events, *events))
    if outcome.health is None:
        return plan
    generation = int(seen.resource["metadata"].get("generation", 1))
    text = outcome.message if outcome.explanation is None else outcome.explanation
    own = (*summary(outcome.health, outcome.reason, text or ""), *outcome.conditions, *conditions)
    merged = merge([item.to_wire() for item in status.conditions], own, now, generation)
    shared = {
        "message": outcome.message[:1024] if outcome.message else None,
        "conditions": tuple(StatusCondition.model_validate(item) for item in merged),
        "observed_generation": generation,
    }
    new = status.model_copy(update={**fields, **shared}).to_wire()
    written = type(status).model_validate(new).to_wire()
    return plan if written == status.to_wire() else replace(plan, status=written)
