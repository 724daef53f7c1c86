"""Field ownership of an object that was created by POST and is written by server-side apply afterwards. Pure.

The POST owns its fields as an Update. Without a change, a list item that leaves the applied set would keep what the
POST still owns of it, and half an item is refused. So ownership moves to Apply first, as kubectl does when it goes over
to server-side apply.

Called by `kube_cluster`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]


def owned_by_apply(entries: Sequence[Entry], manager: str, kept: Sequence[str]) -> list[Entry] | None:
    """Move what `manager` owns as Update to its Apply entry of the `managedFields`; None when there is nothing to move.

    Args:
        kept: path of the field that stays with the Update, because no apply ever names it (`("spec", "replicas")`).
    """
    posted = [found for found in entries if _is(found, manager, "Update")]
    moved: dict[str, Any] = {}
    left: list[Entry] = []
    for entry in posted:
        rest, stays = _split(entry.get("fieldsV1") or {}, [f"f:{name}" for name in kept])
        moved = _union(moved, rest)
        left += [{**entry, "fieldsV1": stays}] if stays else []
    if not moved:
        return None
    applied = next((found for found in entries if _is(found, manager, "Apply")), None)
    others = [found for found in entries if found not in posted and found is not applied]
    if applied is None:
        return [*others, *left, {**posted[0], "operation": "Apply", "fieldsV1": moved}]
    return [*others, *left, {**applied, "fieldsV1": _union(applied.get("fieldsV1") or {}, moved)}]


def _is(entry: Entry, manager: str, operation: str) -> bool:
    return (entry.get("manager"), entry.get("operation"), entry.get("subresource")) == (manager, operation, None)


def _split(fields: Mapping[str, Any], path: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a trie of fields into the part without the path and the path alone."""
    first, *rest = path
    if first not in fields:
        return dict(fields), {}
    without = {name: inner for name, inner in fields.items() if name != first}
    if not rest:
        return without, {first: fields[first]}
    inner, stays = _split(fields[first], rest)
    return {**without, **({first: inner} if inner else {})}, {first: stays} if stays else {}


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tries of fields."""
    both = dict(one)
    for name, inner in other.items():
        both[name] = _union(both[name], inner) if name in both else inner
    return both
