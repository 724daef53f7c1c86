"""Which spec is in force: the present one, or the last accepted one while an edit is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.operator.api.metadata import EditableStatus
from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.plan import Event
from stoker.operator.domain.unsupported import unsupported

EDIT_REFUSED = "EditRefused"
"""Condition while the present spec is refused and an earlier one is in force."""


@dataclass(frozen=True)
class Intent:
    """The spec in force."""

    spec: Mapping[str, Any]
    """In wire form, to work with."""
    accepted: Mapping[str, Any] | None
    """To remember as `acceptedSpec`; None while no spec was accepted."""
    refused: tuple[str, ...] = ()
    """Why the present spec is not in force, one line for each field; empty when it is."""

    @property
    def never_accepted(self) -> bool:
        return self.accepted is None

    @property
    def text(self) -> str:
        return "; ".join(self.refused)


def accept(
    kind: str, spec: Mapping[str, Any], accepted: Mapping[str, Any] | None, *, controls: Sequence[str] = ()
) -> Intent:
    """The spec in force. `controls` are fields that come from `spec` even where it is refused."""
    refused = tuple(unsupported(kind, spec))
    if not refused:
        return Intent(spec, spec)
    if accepted is None:
        return Intent(spec, None, refused)
    return Intent({**accepted, **{name: spec[name] for name in controls if name in spec}}, accepted, refused)


def edit_conditions(intent: Intent) -> tuple[Condition, ...]:
    """`EditRefused`, true while it holds and absent otherwise."""
    refused = bool(intent.refused) and not intent.never_accepted
    return (Condition(EDIT_REFUSED, True if refused else None, "NotSupported", _refusal_text(intent)),)


def edit_events(intent: Intent, status: EditableStatus) -> tuple[Event, ...]:
    """An Event when an edit begins to be refused, or for other fields than before."""
    if not intent.refused or intent.never_accepted:
        return ()
    known = next((item.message for item in status.conditions if item.type == EDIT_REFUSED), None)
    text = _refusal_text(intent)[:1024]
    return () if known == text else (Event("Warning", EDIT_REFUSED, text),)


def _refusal_text(intent: Intent) -> str:
    return f"the edit is ignored and the spec before it stays in force: {intent.text}"
