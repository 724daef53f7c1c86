"""Conditions as kstatus reads them: Ready, and Reconciling or Stalled only while they are true.

`Ready=False` with `Reconciling=True` means "under way", with `Stalled=True` "a person must act".

Pure; called by the reconcilers of every kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.text import shortened


class Health(StrEnum):
    """Health of a resource, as every client of kstatus reads it."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    STALLED = "Stalled"
    IDLE = "Idle"
    """Not ready, and as the spec asks: nothing is under way and nothing is wrong."""


@dataclass(frozen=True)
class Condition:
    """A condition to set; `status` None removes it."""

    type: str
    status: bool | None
    reason: str
    message: str = ""


def summary(health: Health, reason: str, message: str = "") -> tuple[Condition, ...]:
    """The conditions Ready, Reconciling and Stalled for one state of health."""
    return (
        Condition("Ready", health is Health.READY, reason, message),
        Condition("Reconciling", True if health is Health.PROGRESSING else None, reason, message),
        Condition("Stalled", True if health is Health.STALLED else None, reason, message),
    )


def merge(
    current: Iterable[Mapping[str, Any]], wanted: Iterable[Condition], now: datetime, generation: int
) -> list[dict[str, Any]]:
    """The new list of conditions, sorted by type: wanted ones are replaced or removed, all others stay.

    `lastTransitionTime` moves only when the status flips.
    """
    old = {item["type"]: dict(item) for item in current}
    new = dict(old)
    for condition in wanted:
        if condition.status is None:
            new.pop(condition.type, None)
        else:
            new[condition.type] = _rendered(condition, old.get(condition.type), now, generation)
    return [new[name] for name in sorted(new)]


def is_true(conditions: Iterable[Mapping[str, Any]], type_: str) -> bool:
    return any(item["type"] == type_ and item["status"] == "True" for item in conditions)


def _rendered(condition: Condition, old: Mapping[str, Any] | None, now: datetime, generation: int) -> dict[str, Any]:
    status = "True" if condition.status else "False"
    flipped = old is None or old["status"] != status
    return {
        "type": condition.type,
        "status": status,
        "reason": condition.reason,
        "message": shortened(condition.message),
        "observedGeneration": generation,
        "lastTransitionTime": timestamp(now) if flipped or old is None else old["lastTransitionTime"],
    }
