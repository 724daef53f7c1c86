"""Requests of a spec that this version has not built (table: `stoker.pod.capabilities`) or that surely cannot run.

Reconcilers set `Stalled` with them; admission accepts such a spec, so that a later operator can run the same manifest.

Pure; called by `reconcile/intent` and by `stoker train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.domain.conflicts import conflicts
from stoker.operator.domain.job_plan import over_budget, too_large
from stoker.operator.domain.place_conflicts import place_conflicts
from stoker.operator.domain.pod_template import refused_templates
from stoker.pod.capabilities import refusals


def unsupported(kind: str, spec: Mapping[str, Any]) -> list[str]:
    """One line `spec.FIELD VALUE is not supported yet; allowed: ...` per field; empty where everything is built.

    A TrainingJob with values that have no effect or fail beside each other gets a line for each. One whose node
    selector names a GPU that cannot hold a rank gets a line with the arithmetic, and so does one whose budget of
    activations cannot be met.

    Args:
        spec: as stored, camelCase, with or without defaults: an absent field asks for nothing.
    """
    refused = not_runnable(kind, spec)
    if kind != "TrainingJob":
        return refused
    return refused + too_large(spec) + ([] if refused else over_budget(spec))


def not_runnable(kind: str, spec: Mapping[str, Any]) -> list[str]:
    """Return the lines of `unsupported` that do not depend on memory."""
    refused = refusals(kind, spec, "spec") + refused_templates(kind, spec)
    return refused + (conflicts(spec) + place_conflicts(spec) if kind == "TrainingJob" else [])
