"""Numbers of a save, as an agent's report or a task's result has them, in the form of the status. Pure.

Called by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from stoker.operator.api.checkpoint import Layout
from stoker.operator.api.value import measured
from stoker.operator.reconcile.checkpoint.outcome import CheckpointChanges


def save_metrics(raw: Mapping[str, Any]) -> CheckpointChanges:
    """The numbers that the report has. Absent ones are left out: an earlier report may have named them."""
    layout = raw.get("layout")
    found = CheckpointChanges(
        tokens=_whole(raw.get("tokens")),
        loss=measured(raw.get("loss")),
        validation_loss=measured(raw.get("validation_loss")),
        learning_rate=measured(raw.get("learning_rate")),
        elapsed_seconds=_whole(raw.get("elapsed_s")),
        bytes=_whole(raw.get("bytes")),
        files=_whole(raw.get("files")),
        pieces=_whole(raw.get("pieces")),
        layout=_layout(layout) if isinstance(layout, dict) else None,
    )
    return cast("CheckpointChanges", {name: value for name, value in found.items() if value is not None})


def _whole(value: float | None) -> int | None:
    """An integer in the range of the status field, else None: an adopted manifest may hold anything."""
    return int(value) if value is not None and 0 <= value < 2**63 else None


def _layout(raw: dict[str, Any]) -> Layout:
    known = {name: raw[name] for name in Layout.model_fields if type(raw.get(name)) is int and 0 <= raw[name] < 2**31}
    return Layout(**known)
