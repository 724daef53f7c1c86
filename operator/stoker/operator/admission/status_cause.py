"""Causes of a refusal, in the words of an API server's 422.

Values, made by the checks of this folder and joined by `admission`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.operator.cluster.interface import Invalid

GROUP = "stoker.dev"

_WORDS = {
    "FieldValueInvalid": "Invalid value",
    "FieldValueNotSupported": "Unsupported value",
    "FieldValueRequired": "Required value",
    "FieldValueForbidden": "Forbidden",
    "FieldValueDuplicate": "Duplicate value",
    "FieldValueTooLong": "Too long",
    "FieldValueTooMany": "Too many",
    "FieldValueTypeInvalid": "Invalid value",
}


@dataclass(frozen=True)
class StatusCause:
    """One wrong field."""

    field: str
    """Path in the manifest: `spec.workers.env[0].name`."""
    message: str
    """Text after the path: `Invalid value: 0: must be ...`."""
    reason: str
    """Machine-readable: FieldValueInvalid, FieldValueRequired, ..."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidObject(Invalid):
    """The object is refused: `causes` has every wrong field, and the text is the API server's."""

    def __init__(self, kind: str, name: str, causes: list[StatusCause]) -> None:
        self.causes = causes
        found = ", ".join(str(cause) for cause in causes)
        super().__init__(f'{kind}.{GROUP} "{name}" is invalid: {found if len(causes) == 1 else f"[{found}]"}')


def status_cause(field: str, reason: str, value: str = "", detail: str = "") -> StatusCause:
    """Make a cause with the API server's wording: `Invalid value: VALUE: DETAIL`."""
    return StatusCause(field, ": ".join(part for part in (_WORDS[reason], value, detail) if part), reason)


def object_name(found: Mapping[str, Any]) -> str:
    """Return the name for a message."""
    metadata = found.get("metadata") or {}
    return str(metadata.get("name") or metadata.get("generateName") or "")
