"""The typed outcome: its keys are fields of the status, and one place derives the common parts of every kind."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_type_hints

import pytest

from stoker.operator.api.checkpoint import CheckpointStatus
from stoker.operator.api.enginepool import EnginePoolStatus
from stoker.operator.api.inferencedeployment import InferenceDeploymentStatus
from stoker.operator.api.metadata import Status
from stoker.operator.api.trainingjob_status import Attempt, Failure, TrainingJobStatus
from stoker.operator.api.value import Value
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.plan import Observed, Plan
from stoker.operator.reconcile.checkpoint.outcome import CheckpointFields
from stoker.operator.reconcile.enginepool.outcome import PoolFields
from stoker.operator.reconcile.inferencedeployment.outcome import DeploymentFields
from stoker.operator.reconcile.outcome import Outcome, SharedFields, derive_plan
from stoker.operator.reconcile.trainingjob.outcome import AttemptChanges, FailureChanges, JobFields

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        (SharedFields, Status),
        (JobFields, TrainingJobStatus),
        (AttemptChanges, Attempt),
        (FailureChanges, Failure),
        (CheckpointFields, CheckpointStatus),
    ],
    ids=lambda cls: str(cls.__name__),
)
def test_every_key_of_the_changes_is_a_field_of_the_value_with_its_type(changes: Any, value: type[Value]) -> None:
    """mypy rejects a misspelt keyword where changes are made (`JobChanges(phse=...)`); this checks the keys."""
    fields = get_type_hints(value)
    assert get_type_hints(changes).items() <= {name: fields[name] for name in value.model_fields}.items()


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        (JobFields, TrainingJobStatus),
        (CheckpointFields, CheckpointStatus),
        (PoolFields, EnginePoolStatus),
        (DeploymentFields, InferenceDeploymentStatus),
    ],
    ids=["TrainingJob", "Checkpoint", "EnginePool", "InferenceDeployment"],
)
def test_every_field_of_a_status_is_written(changes: Any, status: type[Value]) -> None:
    assert set(status.model_fields) == get_type_hints(changes).keys() | get_type_hints(SharedFields).keys()


def observed(refusal: str | None = None, **status: Any) -> Observed:
    resource = {"kind": "EnginePool", "metadata": {"name": "a", "uid": "u", "generation": 3}, "status": status}
    return Observed(resource, refusal=refusal)


def derived(seen: Observed, outcome: Outcome | None = None) -> Plan:
    status = Status.model_validate(seen.resource["status"])
    return derive_plan(outcome or Outcome(), seen=seen, status=status, fields={}, now=NOW)


def conditions(plan: Plan) -> dict[str, tuple[str, str]]:
    assert plan.status is not None
    return {item["type"]: (item["status"], item["reason"]) for item in plan.status["conditions"]}


def test_the_status_names_what_was_refused_and_asks_for_a_person() -> None:
    starts = Outcome(health=Health.PROGRESSING, reason="Starting", message="the workers start")
    plan = derived(observed("pods: exceeded quota: gpus"), starts)
    assert plan.status is not None
    assert plan.status["message"] == "pods: exceeded quota: gpus"
    assert conditions(plan) == {"Ready": ("False", "Refused"), "Stalled": ("True", "Refused")}


def test_a_repeated_refusal_changes_nothing() -> None:
    first = derived(observed("no"))
    assert derived(observed("no", **(first.status or {}))) == Plan()


def test_a_refusal_that_is_over_leaves_no_message_behind() -> None:
    refused = derived(observed("no"))
    plan = derived(observed(None, **(refused.status or {})))
    assert plan.status is not None
    assert "message" not in plan.status
    assert conditions(plan) == {"Ready": ("False", "Refused")}


def test_a_silent_outcome_leaves_message_and_health() -> None:
    outcome = Outcome(health=Health.READY, reason="Serving", message="as it was")
    status = derived(observed(), outcome).status or {}
    assert derived(observed(None, **status)) == Plan()


def test_a_message_that_is_too_long_for_the_status_is_cut() -> None:
    plan = derived(observed(), Outcome(health=Health.PROGRESSING, reason="Starting", message="x" * 2000))
    assert plan.status is not None
    assert plan.status["message"] == "x" * 1021 + "..."
