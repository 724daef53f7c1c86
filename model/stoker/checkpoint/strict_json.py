"""Strict parsing of JSON from outside: limits of size and depth first, then kinds and keys, each error with its field.

Pure; owns no format. Called by `manifest` and `entries`, which name the fields.
"""

from __future__ import annotations

import json
from typing import Any

from stoker.checkpoint.errors import CheckpointError


def parse_json(data: bytes, *, max_bytes: int, max_containers: int, max_values: int) -> Any:
    """Parse JSON whose objects fit a bounded memory: they are counted in the text before any is made.

    A key that appears twice, NaN and infinity are refused. Braces and commas inside texts count as well.
    """
    for what, count, limit in (
        ("bytes", len(data), max_bytes),
        ("objects and lists", data.count(b"{") + data.count(b"["), max_containers),
        ("values", data.count(b","), max_values),
    ):
        if count > limit:
            raise CheckpointError(f"{count} {what}, {limit} are allowed")
    return json.loads(data.decode(), object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant)


def need_depth(raw: object, what: str, limit: int) -> None:
    """Refuse a value whose objects and lists are nested deeper than `limit`."""
    level: list[Any] = [raw]
    for _ in range(limit + 1):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise CheckpointError(f"{what}: nested deeper than {limit} levels")


def need_fields(raw: object, what: str, keys: frozenset[str]) -> dict[str, Any]:
    """Return an object that has exactly these keys."""
    item = need_object(raw, what)
    if item.keys() != keys:
        odd = sorted(item.keys() ^ keys)
        raise CheckpointError(f"{what}: keys must be {sorted(keys)}; missing or unknown: {odd}")
    return item


def need_object(raw: object, what: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{what}: an object is needed, got {type(raw).__name__}")
    return raw


def need_list(raw: object, what: str, limit: int) -> list[Any]:
    if not isinstance(raw, list):
        raise CheckpointError(f"{what}: a list is needed, got {type(raw).__name__}")
    if len(raw) > limit:
        raise CheckpointError(f"{what}: {len(raw)} items, {limit} are allowed")
    return raw


def need_text(raw: object, what: str) -> str:
    if not isinstance(raw, str):
        raise CheckpointError(f"{what}: text is needed, got {type(raw).__name__}")
    return raw


def need_integers(raw: object, what: str) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise CheckpointError(f"{what}: a list is needed, got {type(raw).__name__}")
    for value in raw:
        if type(value) is not int:
            raise CheckpointError(f"{what}: integers are needed, got {str(raw)[:200]}")
    return tuple(raw)


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    item = dict(pairs)
    if len(item) != len(pairs):
        raise CheckpointError("a key appears twice in one object")
    return item


def _refuse_constant(name: str) -> float:
    raise CheckpointError(f"{name} is not a number of JSON")
