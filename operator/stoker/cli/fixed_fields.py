"""The fields that an edit changes in a section that is fixed. Pure.

A rule of the API names the section alone: `spec.training: Forbidden: training is fixed: make a new TrainingJob`.

Called by `submit` and `local_apply` for objects that exist and were refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SECTION = re.compile(r"(spec(?:\.\w+|\[\d+\])+): Forbidden")
"""Of a rule over several sections, `spec: Forbidden: model, modelFrom and lora are fixed`, the message names them."""
_STEP = re.compile(r"\w+")
_ABSENT: Any = object()
MOST = 4
"""Fields that are named; of more than these, their number."""


def with_changes(error: str, stored: Mapping[str, Any] | None, given: Mapping[str, Any]) -> str:
    """The error, and the fields of the sections that it forbids to change: what is stored, and what the manifest has.

    The error alone where nothing is stored or none of the manifest's fields differs (a field was removed).
    """
    sections = dict.fromkeys(_SECTION.findall(error))
    changes = [line for path in sections for line in _changes(path, _at(stored, path), _at(given, path))]
    if stored is None or not changes:
        return error
    more = f"; and {len(changes) - MOST} more" if len(changes) > MOST else ""
    return f"{error} ({'; '.join(changes[:MOST])}{more})"


def _changes(path: str, stored: Any, given: Any) -> Iterator[str]:
    """A line for each value below `path` that the manifest gives otherwise than it is stored."""
    if given is _ABSENT or given == stored:
        return
    if isinstance(given, dict) and isinstance(stored, dict):
        for name, value in given.items():
            yield from _changes(f"{path}.{name}", stored.get(name, _ABSENT), value)
    elif isinstance(given, list) and isinstance(stored, list) and len(given) == len(stored):
        for number, (before, value) in enumerate(zip(stored, given, strict=True)):
            yield from _changes(f"{path}[{number}]", before, value)
    else:
        yield f"{path} is {_text(stored)}, given is {_text(given)}"


def _at(found: Any, path: str) -> Any:
    """The value at a path; `_ABSENT` where there is none."""
    for step in _STEP.findall(path):
        if isinstance(found, Mapping):
            found = found.get(step, _ABSENT)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return _ABSENT
    return found


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "not set"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
