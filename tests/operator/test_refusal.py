"""What the cluster refuses is said where its owner looks."""

from __future__ import annotations

from datetime import UTC, datetime

from stoker.operator.domain.plan import Plan
from stoker.operator.loop.refusal import with_refusal

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_status_names_what_was_refused_and_asks_for_a_person() -> None:
    resource = {"metadata": {"generation": 3}, "status": {"phase": "Starting", "message": "the workers start"}}
    plan = with_refusal(Plan(), resource, "pods: exceeded quota: gpus", NOW)
    assert plan.status is not None
    assert plan.status["phase"] == "Starting"
    assert plan.status["message"] == "pods: exceeded quota: gpus"
    found = {item["type"]: (item["status"], item["reason"]) for item in plan.status["conditions"]}
    assert found == {"Ready": ("False", "Refused"), "Stalled": ("True", "Refused")}


def test_a_repeated_refusal_changes_nothing() -> None:
    resource = {"metadata": {"generation": 1}, "status": {}}
    first = with_refusal(Plan(), resource, "no", NOW)
    again = with_refusal(Plan(), {**resource, "status": first.status}, "no", NOW)
    assert again.status == first.status
