"""The validation with which an attempt begins: of the save that it resumes, where a stop had left it.

Pure. Called by the reconcile of Checkpoints, and by the loop, which wakes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import ended, exit_of


class StartValidation(NamedTuple):
    """A loss of weights that no step of the attempt has changed."""

    step: int
    loss: float | None
    """None where it is not finite, which JSON has no number for."""


def start_validation(pod: Object, report: Mapping[str, Any] | None) -> StartValidation | None:
    """Return what the agent of a leader reports, or left at its end; None where it began with a step."""
    message = exit_of(pod).message if ended(pod) else None
    found = (message.result if message else {}).get("start_validation") or (report or {}).get("start_validation")
    return StartValidation(int(found["step"]), found.get("loss")) if found else None
