"""Requests of a spec that this version has not built, as lines for people (table: `stoker.pod.capabilities`).

Reconcilers set `Stalled` with them; admission accepts such a spec, so that a later operator can run the same manifest.

Pure; called by `reconcile/intent` and by `stoker train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.pod.capabilities import refusals


def unsupported(kind: str, spec: Mapping[str, Any]) -> list[str]:
    """One line `spec.FIELD VALUE is not supported yet; allowed: ...` per field; empty where everything is built.

    Args:
        spec: as stored, camelCase, with or without defaults: an absent field asks for nothing.
    """
    return refusals(kind, spec, "spec")
