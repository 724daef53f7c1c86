"""The fields of a request's JSON body, for the few requests whose model decides where they go. Pure.

Called by `other_models` and `fallback`. What is no JSON object is passed on as it is: the engine refuses it with a
reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def fields_of(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a body; None where it is no JSON object, or one that is nested too deeply to be read."""
    if not body:
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def with_model(fields: Mapping[str, Any], model: str) -> bytes:
    """Return the body with another model's name."""
    changed = {**fields, "model": model}
    try:
        return json.dumps(changed, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: it has no UTF-8, but an escape
        return json.dumps(changed).encode()
