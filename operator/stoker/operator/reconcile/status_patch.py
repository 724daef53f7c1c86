"""The status that a pass leaves behind, for every kind alike: changed fields, conditions, the generation that was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from stoker.operator.api.metadata import Status
from stoker.operator.domain.conditions import Condition, merge
from stoker.operator.domain.plan import Plan


def settled(
    plan: Plan | None,
    old: Status,
    changes: Mapping[str, Any],
    conditions: tuple[Condition, ...],
    *,
    now: datetime,
    generation: int,
) -> Plan:
    """`plan` with the whole new status; the status is left out where nothing changes.

    It is rebuilt through its type, so that what is written is what a later pass reads.
    """
    base = plan or Plan()
    new = old.model_copy(update={**changes, "observed_generation": generation}).to_wire()
    new["conditions"] = merge([item.to_wire() for item in old.conditions], conditions, now, generation)
    status = type(old).model_validate(new).to_wire()
    return base if status == old.to_wire() else replace(base, status=status)
