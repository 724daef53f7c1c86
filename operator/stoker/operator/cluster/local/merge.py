"""The effect of a write on an object: JSON merge patch, and as much of server-side apply as our children use. Pure.

Called by the object store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stoker.operator.domain.plan import Object

Intent = Mapping[str, Any]
"""The object that one manager applied last, without status."""


Identity = Callable[[Any], str]
_IDENTITY: Mapping[str, Identity] = {"finalizers": str, "ownerReferences": lambda owner: str(owner["uid"])}
"""Lists that merge, and what makes two of their members the same."""


def merge_patch(target: Any, patch: Any) -> Any:
    """Merge a patch (RFC 7396): maps merge, null removes, everything else is replaced."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def apply_merge(
    live: Object,
    before: Intent | None,
    intent: Intent,
    others: tuple[Intent, ...] = (),
    defaulted: Mapping[str, Any] | None = None,
) -> Object:
    """Apply `intent` to `live` in place of the same manager's intent `before`; every named field becomes the manager's.

    Fields that the manager leaves out now are removed, unless one of the `others` applied them too. Maps merge by key,
    owner references by uid, finalizers as a set; other lists are replaced whole.

    Args:
        defaulted: `before` with the defaults that it got. Those of a map that is left out go with it.
    """
    kept = _without_dropped(live, before or {}, intent, others, defaulted or {})
    merged = _overlay(kept, intent)
    assert isinstance(merged, dict)
    return merged


def _without_dropped(live: Any, before: Any, intent: Any, others: tuple[Any, ...], defaulted: Any) -> Any:
    if not all(isinstance(one, Mapping) for one in (live, before, intent)):
        return live  # an intent that is null, as of an empty section, replaces the map
    kept = dict(live)
    for key, value in before.items():
        if key not in kept:
            continue
        theirs = tuple(other[key] for other in others if isinstance(other, Mapping) and key in other)
        if isinstance(value, Mapping) and isinstance(kept[key], Mapping):
            wanted = intent.get(key, {})
            filled = defaulted.get(key) if isinstance(defaulted, Mapping) else None
            kept[key] = _without_dropped(kept[key], value, wanted, theirs, filled)
            if key not in intent and not theirs:
                kept[key] = _without_defaults(kept[key], filled)
                if not kept[key]:
                    del kept[key]
        elif key in _IDENTITY and isinstance(value, list | tuple) and isinstance(kept[key], list | tuple):
            kept[key] = _without_members(kept[key], value, intent.get(key), theirs, _IDENTITY[key])
            if not kept[key]:
                del kept[key]
        elif key not in intent and not theirs:
            del kept[key]
    return kept


def _without_members(live: Any, before: Any, intent: Any, theirs: tuple[Any, ...], identity: Identity) -> list[Any]:
    """The members of a list that merges, less those that only this manager had given."""
    wanted = {identity(member) for one in (intent, *theirs) for member in one or ()}
    dropped = {identity(member) for member in before} - wanted
    return [member for member in live if identity(member) not in dropped]


def _without_defaults(live: Mapping[str, Any], defaulted: Any) -> dict[str, Any]:
    """The members that are not what a default made them."""
    filled = defaulted if isinstance(defaulted, Mapping) else {}
    return {key: value for key, value in live.items() if key not in filled or filled[key] != value}


def _overlay(live: Any, intent: Any, field: str = "") -> Any:
    if isinstance(intent, Mapping):
        base = live if isinstance(live, Mapping) else {}
        return {**base, **{key: _overlay(base.get(key), value, key) for key, value in intent.items()}}
    if field == "ownerReferences" and isinstance(live, list):
        uids = {owner["uid"] for owner in intent}
        return [*(owner for owner in live if owner["uid"] not in uids), *intent]
    if field == "finalizers" and isinstance(live, list):
        return [*live, *(name for name in intent if name not in live)]
    return intent
