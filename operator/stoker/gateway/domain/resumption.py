"""The job that goes on from a checkpoint of a finished one. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.gateway.domain.checkpoint_pages import order_of
from stoker.gateway.domain.states import CheckpointState, checkpoint_state, condition
from stoker.gateway.domain.views import job_of
from stoker.gateway.problem import Problem, wrong_field

Object = dict[str, Any]
MOST_NAMES = 5
"""Checkpoints that a message names."""


def of_job(checkpoints: Sequence[Object], job: Object) -> list[Object]:
    """The Checkpoints of a job, newest first."""
    metadata = job["metadata"]
    own = [one for one in checkpoints if _belongs(job_of(one), metadata)]
    return sorted(own, key=order_of, reverse=True)


def _belongs(origin: Mapping[str, Any], metadata: Object) -> bool:
    if origin.get("uid"):
        return bool(origin["uid"] == metadata["uid"])
    return bool(origin.get("name") == metadata["name"])


def newest_verified(own: Sequence[Object]) -> Object | None:
    """The newest usable Checkpoint of `of_job`'s list."""
    return next((one for one in own if usable(one)), None)


def usable(checkpoint: Object) -> bool:
    return checkpoint_state(checkpoint) is CheckpointState.COMPLETE and condition(checkpoint, "Verified")


def usable_names(own: Sequence[Object]) -> str:
    """The checkpoints that a job can begin at, of `of_job`'s list, for a message."""
    names = [str(one["metadata"]["name"]) for one in own if usable(one)]
    more = f" and {len(names) - MOST_NAMES} older" if len(names) > MOST_NAMES else ""
    return f"verified: {', '.join(names[:MOST_NAMES])}{more}" if names else "it has no verified checkpoint"


def continued_spec(job: Object, checkpoint: Object, total_steps: int | None) -> dict[str, Any]:
    """The spec of a new job that goes on from a checkpoint with the whole state.

    Raises:
        Problem: no step would be left.
    """
    spec: dict[str, Any] = copy.deepcopy(dict(job["spec"]))
    spec.pop("model", None)
    spec["modelFrom"] = {"checkpoint": {"name": checkpoint["metadata"]["name"], "state": "All"}}
    spec["run"] = {name: value for name, value in (spec.get("run") or {}).items() if name not in ("suspend", "cancel")}
    training = spec.setdefault("training", {})
    if total_steps is not None:
        spec["training"] = {
            **{name: value for name, value in training.items() if name not in ("totalTokens", "epochs")},
            "totalSteps": total_steps,
        }
    _check_steps_left(spec, int((checkpoint.get("status") or {}).get("step") or 0))
    return spec


def _check_steps_left(spec: Mapping[str, Any], step: int) -> None:
    total = spec["training"].get("totalSteps")
    if total is not None and step >= total:
        raise wrong_field("total_steps", f"the checkpoint is at step {step} of {total}: give more than {step}")


def refuse_suspended(job: Object, chosen: Object, newest: Object | None) -> None:
    """Refuse another checkpoint than the newest for a suspended job, which goes on by itself. Raises Problem 409."""
    if newest is None or chosen["metadata"]["uid"] != newest["metadata"]["uid"]:
        name = None if newest is None else newest["metadata"]["name"]
        detail = (
            f"job {job['metadata']['name']} is suspended and goes on from its newest verified checkpoint ({name}); "
            f"to go on from {chosen['metadata']['name']}, cancel the job first"
        )
        raise Problem(409, "conflict", detail)
