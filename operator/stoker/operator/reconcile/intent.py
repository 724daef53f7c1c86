"""The spec in force: the present one, or the last accepted one while an edit is refused.

An edit that asks for something that is not built never stops maintenance and is never silent. `accept` picks the spec
that a reconcile works with. `EditableStatus.accepted_spec` remembers it across restarts of the operator, because the
API server keeps no earlier spec. It is stored in wire form, so the store's interning keeps a spec and its accepted
copy once in memory. Fields named as `controls` (cancel, suspend, deadlines) always come from the present spec.

How a kind uses it:

1. Its view calls `read_in_force(cls, resource, controls=...)`: the typed resource with the spec in force, and the
   `Intent`. Views of other kinds that depend on the resource read it the same way.
2. `intent.never_accepted`: nothing was ever accepted, so there is nothing to maintain: stall with `intent.text`.
3. Its `derive_status` writes `accepted_spec=intent.accepted` and passes `edit_conditions(...)` and `edit_events(...)`
   to `derive_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic.alias_generators import to_camel

from stoker.operator.api.metadata import EditableStatus, Resource, read
from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.late_classes import misplaced_classes
from stoker.operator.domain.model_paths import misplaced_model
from stoker.operator.domain.plan import Event
from stoker.operator.domain.pod_paths import misplaced_paths
from stoker.operator.domain.text import shortened
from stoker.operator.domain.unsupported import unsupported
from stoker.operator.domain.wakeable_pools import pools_without_wake

EDIT_REFUSED = "EditRefused"
"""Condition while the present spec is refused and an earlier one is in force."""
EDIT_PENDING = "EditPending"
"""Condition while an edit waits for something, for instance the next attempt."""

CHECKS: Mapping[str, tuple[Callable[[Mapping[str, Any]], Sequence[str]], ...]] = {
    "TrainingJob": (misplaced_paths,),
    "InferenceDeployment": (misplaced_model, misplaced_classes, pools_without_wake),
}
"""The checks of a kind for which its CRD has no room."""
_ABSENT = object()
_ACCEPTED_SPEC = to_camel("accepted_spec")

R = TypeVar("R", bound=Resource)


@dataclass(frozen=True)
class Intent:
    """The spec in force, and why the present one may not be."""

    spec: Mapping[str, Any]
    """In wire form, to work with."""
    accepted: Mapping[str, Any] | None
    """The spec to remember as `acceptedSpec`; None while no spec was accepted."""
    refused: tuple[str, ...] = ()
    """One line for each field that keeps the present spec from being in force."""

    @property
    def never_accepted(self) -> bool:
        return self.accepted is None

    @property
    def text(self) -> str:
        return "; ".join(self.refused)


def accept(
    kind: str, spec: Mapping[str, Any], accepted: Mapping[str, Any] | None, *, controls: Sequence[str] = ()
) -> Intent:
    """Pick the spec in force.

    A spec that was accepted once stays accepted, also by an operator that can do less.

    Args:
        spec: as the resource has it now.
        accepted: `status.acceptedSpec`.
        controls: paths (`run.cancel`) that come from `spec` even where it is refused.
    """
    if spec == accepted:
        return Intent(spec, accepted)
    refused = (*unsupported(kind, spec), *(line for check in CHECKS.get(kind, ()) for line in check(spec)))
    if not refused:
        return Intent(spec, spec)
    if accepted is None:
        return Intent(spec, None, refused)
    in_force = dict(accepted)
    for path in controls:
        in_force = _with_value(in_force, path.split("."), _value(spec, path.split(".")))
    return Intent(in_force, accepted, refused)


def read_in_force(cls: type[R], resource: Mapping[str, Any], *, controls: Sequence[str] = ()) -> tuple[R, Intent]:
    """Typed view of a stored object with the spec in force, and the intent that picked it."""
    accepted = (resource.get("status") or {}).get(_ACCEPTED_SPEC)
    intent = accept(cls.__name__, resource["spec"], accepted, controls=controls)
    return read(cls, {**resource, "spec": intent.spec}), intent


EditTime = Literal["NextAttempt", "Restart", "Ended"]
"""When an edit takes effect: with the next attempt, by a restart now, or never, as the run has ended."""
_EFFECTS: Mapping[EditTime, str] = {
    "NextAttempt": "takes effect with the next attempt:",
    "Restart": "the run saves and restarts with",
    "Ended": "has no effect, as the run has ended (a job that is resumed from a checkpoint takes it):",
}


def edit_conditions(
    intent: Intent, pending: Sequence[str] = (), when: EditTime = "NextAttempt"
) -> tuple[Condition, ...]:
    """`EditRefused` and `EditPending`, true while they hold and absent otherwise.

    Args:
        pending: one line for each field whose change waits (`spec.workers.replicas 2 -> 4`).
    """
    refused = bool(intent.refused) and not intent.never_accepted
    return (
        Condition(EDIT_REFUSED, True if refused else None, "NotSupported", _refusal_text(intent)),
        Condition(EDIT_PENDING, True if pending else None, when, f"{_EFFECTS[when]} {', '.join(pending)}"),
    )


def edit_events(intent: Intent, status: EditableStatus) -> tuple[Event, ...]:
    """An Event when an edit begins to be refused, or for other fields than before."""
    if not intent.refused or intent.never_accepted:
        return ()
    known = next((item.message for item in status.conditions if item.type == EDIT_REFUSED), None)
    text = shortened(_refusal_text(intent))
    return () if known == text else (Event("Warning", EDIT_REFUSED, text),)


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "spec") -> Iterator[str]:
    """One line for each field that differs: `spec.workers.replicas 2 -> 4`; of a list for each item with a name."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changed_fields(before, after, f"{path}.{name}")
        elif before != after:
            yield from _changed_field(f"{path}.{name}", before, after)


def _changed_field(path: str, before: Any, after: Any) -> Iterator[str]:
    """The lines of a field that is no mapping. Items are not shown: values of environment variables may be secret."""
    old, new = _by_name(before), _by_name(after)
    if old is None or new is None:
        shown = _shown(after)
        yield f"{path} {_shown(before)} -> {f'another {shown}' if shown == _shown(before) else shown}"
        return
    changed = [name for name in (*old, *(new.keys() - old.keys())) if old.get(name) != new.get(name)]
    for name in sorted(changed):
        texts = ("unset" if name not in old else "(set)", "unset" if name not in new else "(set)")
        yield f"{path}[{name}] {texts[0]} -> {'(another value)' if texts == ('(set)', '(set)') else texts[1]}"
    if old and not changed:
        yield f"{path} {_shown(before)} -> (another order)"


def _by_name(value: Any) -> Mapping[str, Any] | None:
    """The items of a list by name; None where it is none, or an item has no name of its own."""
    if value is not None and not isinstance(value, list | tuple):
        return None
    items = {item["name"]: item for item in value or () if isinstance(item, Mapping) and "name" in item}
    return items if len(items) == len(value or ()) else None


def _refusal_text(intent: Intent) -> str:
    return f"the edit is ignored and the spec before it stays in force: {intent.text}"


def _value(spec: Any, path: Sequence[str]) -> Any:
    for name in path:
        if not isinstance(spec, Mapping) or name not in spec:
            return _ABSENT
        spec = spec[name]
    return spec


def _with_value(spec: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy with the value at the path, or without the path."""
    name, rest = path[0], path[1:]
    if rest and (name in spec or value is not _ABSENT):
        return {**spec, name: _with_value(spec.get(name) or {}, rest, value)}
    others = {key: inner for key, inner in spec.items() if key != name}
    return others if rest or value is _ABSENT else {**others, name: value}


def _shown(value: Any) -> str:
    """A value in one short word."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return shortened(str(value), 60)
    if isinstance(value, list | tuple):
        return f"(list of {len(value)})" if value else "unset"
    return "(set)"
