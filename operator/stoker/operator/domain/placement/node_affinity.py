"""Whether a node meets the required node affinity of a pod, as the scheduler reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def meets(labels: Mapping[str, str], name: str, terms: Any) -> bool:
    """Return whether one of the terms matches, or there is none.

    Args:
        terms: `nodeSelectorTerms`; each has `matchExpressions` over labels and `matchFields` over the name.
    """
    if not terms:
        return True
    fields = {"metadata.name": name}
    return any(_matches(term, labels, fields) for term in terms)


def _matches(term: Mapping[str, Any], labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    expressions, names = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not names:
        return False
    return all(_holds(found, labels) for found in expressions) and all(_holds(found, fields) for found in names)


def _holds(found: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    value, wanted = values.get(found["key"]), found.get("values") or ()
    match found["operator"]:
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return _compares(found["operator"], value, wanted)
    return False


def _compares(operator: str, value: str | None, wanted: Any) -> bool:
    try:
        left, right = int(value or ""), int(wanted[0])
    except (ValueError, IndexError):
        return False
    return left > right if operator == "Gt" else left < right
