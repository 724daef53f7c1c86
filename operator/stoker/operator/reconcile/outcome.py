"""The typed result of one pass, and the part of a status that every kind has.

A reconciler decides and returns an `Outcome` of its kind. The kind's `derive_status(view, outcome)` adds the fields
that follow from the view alone (progress, counts) and calls `derive_plan`. That adds what every kind has in common:
message, conditions, the observed generation, an outage, a refusal of the API server. `status.message` is
`Outcome.message`, unless the API server refused the last pass.

Fields of a status are named by the keywords of a TypedDict (`JobChanges(finished_at=...)`), so mypy rejects a
misspelt one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypedDict, TypeVar

from stoker.operator.api.metadata import Status, StatusCondition
from stoker.operator.domain.conditions import Condition, Health, is_true, merge, summary
from stoker.operator.domain.plan import Event, Observed, Plan
from stoker.operator.domain.pods import is_owned
from stoker.operator.domain.text import shortened

REFUSED = "Refused"
"""Reason while the API server refuses what the last pass wanted to write."""
OUTAGE = "NodesSilent"
"""Condition while pods of the resource are on nodes of an outage."""

S = TypeVar("S", bound=Status)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The decision of one pass. Kinds derive from it and add their `phase` and their typed `changes`."""

    health: Health | None = None
    """None: the pass has nothing new to report. Phase, message, Ready, Reconciling and Stalled stay."""
    reason: str = ""
    """Reason of Ready, Reconciling and Stalled."""
    message: str | None = None
    """The whole `status.message`; None removes it (with a `health`)."""
    explanation: str | None = None
    """Message of Ready, Reconciling and Stalled where it differs from `message`, for instance `verified by agent`."""
    conditions: tuple[Condition, ...] = ()
    """The kind's own conditions, besides those of `health`."""
    plan: Plan = field(default_factory=Plan)
    """Everything but the status."""

    @property
    def silent(self) -> bool:
        """Whether the pass decided nothing about the status."""
        return replace(self, plan=Plan()) == type(self)()


class SharedFields(TypedDict, total=False):
    """Status fields that every kind has."""

    message: str | None
    conditions: tuple[StatusCondition, ...]
    observed_generation: int | None


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
    """The outcome's plan with the whole new status, or without one where nothing changes.

    The status is rebuilt through its type, so that what is written is what a later pass reads. A resource that is being
    deleted keeps its status, unless the outcome or a refusal changes it.

    Args:
        status: as the resource has it.
        fields: the kind's changed fields, from its TypedDict.
        conditions: further conditions that follow from the view alone, for instance of an edit that is refused.
        events: what happened besides the plan's own events; of a resource that is being deleted they are left out.
    """
    deleting = bool(seen.resource["metadata"].get("deletionTimestamp"))
    told = () if deleting else events  # a status that stays as it is would bring them again in each pass
    plan = replace(with_lost_pods(outcome.plan, seen), events=(*outcome.plan.events, *told))
    if deleting and outcome.silent and seen.refusal is None:
        return plan
    outage, outage_events = _outage(seen, status) if not deleting else ((), ())
    shared = _shared_fields(outcome, seen, status, (*conditions, *outage), now)
    new = status.model_copy(update={**fields, **shared}).to_wire()
    written = type(status).model_validate(new).to_wire()
    changed = written != status.to_wire()
    return replace(plan, status=written if changed else None, events=(*plan.events, *outage_events))


def with_lost_pods(plan: Plan, seen: Observed) -> Plan:
    """`plan` that removes lost pods by force, and is requeued for when the next silent node counts as lost.

    Removed by force are the lost pods that the plan deletes, and those of the resource itself that are being deleted
    already. A pod of another owner stays until that owner has observed its loss.
    """
    deleted = set(plan.delete)
    own = [pod for pod in seen.of_kind("Pod") if is_owned(pod, seen.resource["metadata"]["uid"])]
    leaving = {pod["metadata"]["uid"] for pod in own if pod["metadata"].get("deletionTimestamp")}
    force = tuple(ref for ref in seen.lost_pods if ref in deleted or ref.uid in leaving)
    waits = [seconds for seconds in (plan.requeue_after_s, seen.next_loss_s) if seconds is not None]
    return replace(
        plan,
        delete=tuple(ref for ref in plan.delete if ref not in force),
        force_delete=force,
        requeue_after_s=min(waits, default=None),
    )


def _shared_fields(
    outcome: Outcome, seen: Observed, status: Status, conditions: tuple[Condition, ...], now: datetime
) -> SharedFields:
    generation = int(seen.resource["metadata"].get("generation", 1))
    own = (*_summary(outcome, status), *outcome.conditions, *conditions, *_refusal(seen))
    merged = merge([item.to_wire() for item in status.conditions], own, now, generation)
    return SharedFields(
        message=_message(outcome, seen, status),
        conditions=tuple(StatusCondition.model_validate(item) for item in merged),
        observed_generation=generation,
    )


def _message(outcome: Outcome, seen: Observed, status: Status) -> str | None:
    """The message: the refusal, else the outcome's, else the one of the last pass (unless that was a refusal)."""
    if seen.refusal is not None:
        return shortened(seen.refusal)
    if outcome.health is not None:
        return shortened(outcome.message) if outcome.message else None
    return None if _was_refused(status) else status.message


def _summary(outcome: Outcome, status: Status) -> tuple[Condition, ...]:
    if outcome.health is not None:
        text = outcome.message if outcome.explanation is None else outcome.explanation
        return summary(outcome.health, outcome.reason, text or "")
    return (Condition("Stalled", None, REFUSED),) if _was_refused(status) else ()


def _was_refused(status: Status) -> bool:
    return any(item.type == "Stalled" and item.reason == REFUSED for item in status.conditions)


def _refusal(seen: Observed) -> tuple[Condition, ...]:
    """The conditions of a refusal: a person must act, though the pass is tried again."""
    return () if seen.refusal is None else summary(Health.STALLED, REFUSED, seen.refusal)


def _outage(seen: Observed, status: Status) -> tuple[tuple[Condition, ...], tuple[Event, ...]]:
    """The condition that no pod counts as lost, and why; an Event when that begins."""
    reported = is_true([item.to_wire() for item in status.conditions], OUTAGE)
    if seen.outage is None:
        return ((Condition(OUTAGE, None, "Outage"),) if reported else ()), ()
    text = f"no pod counts as lost: {seen.outage.text}"
    return (Condition(OUTAGE, True, "Outage", text),), () if reported else (Event("Warning", OUTAGE, text),)
