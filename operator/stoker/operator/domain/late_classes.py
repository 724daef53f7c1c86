"""The classes in which late requests of an InferenceDeployment go on: each is a later one of the list.

The CRD has no room for these rules. Pure; called by `reconcile/intent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def misplaced_classes(spec: Mapping[str, Any]) -> list[str]:
    """Return one line per problem of a `lateClass`, with its value and what is allowed.

    Args:
        spec: of an InferenceDeployment as stored, camelCase, with or without defaults.
    """
    classes = (spec.get("router") or {}).get("classes") or ()
    lines = []
    for number, one in enumerate(classes):
        wanted = one.get("lateClass")
        if wanted is None:
            continue
        field = f"spec.router.classes[{number}].lateClass {wanted}"
        later = [str(other["name"]) for other in classes[number + 1 :]]
        if wanted not in later:
            allowed = ", ".join(later) or "none, because no class comes later"
            lines.append(f"{field} is no later class; allowed: {allowed}")
        elif one.get("ttftMs") is None:
            lines.append(f"{field} has no effect without ttftMs: no request of class {one['name']} is late")
    return lines
