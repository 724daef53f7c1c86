"""The output for users."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from stoker.cli.description import events_of
from stoker.cli.local_endpoints import local_endpoint
from stoker.cli.printers import age, bytes_text, described, progress_line, state_of, table, value_at
from stoker.cli.text_style import aligned

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def job(**status: Any) -> dict[str, Any]:
    return {
        "kind": "TrainingJob",
        "metadata": {
            "name": "teach",
            "namespace": "default",
            "uid": "u",
            "generation": 2,
            "creationTimestamp": "2026-01-01T11:50:00Z",
        },
        "spec": {"training": {"totalSteps": 20}},
        "status": {"observedGeneration": 2, **status},
    }


PROGRESS = {"step": 5, "totalSteps": 20, "loss": "2.5", "tokensPerSecond": "310", "etaSeconds": 12}


def test_a_table_has_columns_and_the_reason() -> None:
    rows = table(
        "TrainingJob", [job(phase="Running", progress=PROGRESS, restarts=1, message="LoadingWeights 43 %")], NOW
    )
    assert aligned(rows).splitlines() == [
        "NAME    PHASE     STEP   OF   LOSS   VERIFIED   RESTARTS   AGE   MESSAGE",
        "teach   Running   5      20   2.5               1          10m   LoadingWeights 43 %",
    ]


def test_progress_is_one_line() -> None:
    line = progress_line(job(phase="Running", progress=PROGRESS, message="FirstStep"))
    assert line == "step 5/20  loss 2.5  310 tokens/s  12 s left  FirstStep"
    checkpoint = {
        "kind": "Checkpoint",
        "status": {
            "step": 8,
            "loss": "1.5",
            "bytes": 1_620_000_000,
            "conditions": [{"type": "Verified", "status": "True"}],
        },
    }
    assert progress_line(checkpoint) == "step 8  loss 1.5  1.62 GB  verified"


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"phase": "Running"}, ""),
        ({"phase": "Completed"}, "good"),
        ({"phase": "Failed"}, "bad"),
        ({"phase": "Completed", "observedGeneration": 1}, ""),
        ({"phase": "Pending", "conditions": [{"type": "Stalled", "status": "True"}]}, "bad"),
        ({}, ""),
    ],
)
def test_only_a_status_of_the_present_generation_settles(status: dict[str, Any], state: str) -> None:
    assert state_of(job(**status)) == state


def test_a_deployment_that_has_scaled_to_zero_has_settled() -> None:
    """Else `apply --wait` waits for a request that wakes it."""
    status = {"phase": "ScaledToZero", "observedGeneration": 2}
    chat = {"kind": "InferenceDeployment", "metadata": {"name": "chat", "generation": 2}, "status": status}
    assert state_of(chat) == "good"
    draining = [{"type": "Reconciling", "status": "True"}]
    assert state_of({**chat, "status": {**status, "conditions": draining}}) == ""


def test_paths_reach_into_lists_conditions_and_dotted_keys() -> None:
    found = {"a": [{"b": 1}], "conditions": [{"type": "Ready", "status": "True"}], "m": {"x.y": "z"}}
    paths = ("a.0.b", "a.3.b", "conditions[Ready]", "conditions[Gone]", "m.x~1y", "q.r")
    assert [value_at(found, path) for path in paths] == ["1", "", "True", "", "z", ""]


def test_a_description_tells_conditions_status_and_events() -> None:
    found = job(
        phase="Running", conditions=[{"type": "Ready", "status": "False", "reason": "Starting", "message": "m"}]
    )
    event = {"type": "Normal", "reason": "Started", "message": "attempt 0", "lastTimestamp": "2026-01-01T11:59:30Z"}
    text = described(found, [event], NOW)
    assert text.splitlines()[0] == "TrainingJob default/teach"
    assert "  Ready   False   Starting   m" in text
    assert "  phase: Running" in text
    assert "    totalSteps: 20" in text
    assert "  30s   Normal   Started   attempt 0" in text


def test_events_without_a_last_timestamp_have_their_age_and_their_place() -> None:
    """The scheduler writes `eventTime`; a message may be missing, or have several lines."""
    about = {"involvedObject": {"uid": "u"}, "type": "Warning"}
    late = {**about, "reason": "FailedScheduling", "lastTimestamp": None, "eventTime": "2026-01-01T11:59:30.123456Z"}
    early = {**about, "reason": "Pulling", "message": "an\nimage", "lastTimestamp": "2026-01-01T11:59:00Z"}
    found = {**job(), "metadata": {"name": "teach", "uid": "u"}}
    lines = described(found, events_of(found, [late, early]), NOW).splitlines()
    assert [line.split() for line in lines[-2:]] == [
        ["60s", "Warning", "Pulling", "an", "image"],
        ["30s", "Warning", "FailedScheduling"],
    ]


def test_the_description_of_an_event_has_its_fields() -> None:
    about = {"kind": "TrainingJob", "name": "teach"}
    found = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "teach.1", "namespace": "default", "creationTimestamp": "2026-01-01T11:59:30Z"},
        "involvedObject": about,
        "type": "Warning",
        "reason": "SavesNotListed",
        "message": "the saves of attempt 0 could not be listed",
        "eventTime": None,
        "source": {},
    }
    lines = described(found, [], NOW).splitlines()
    assert lines[2:] == [
        "Fields:",
        "  involvedObject:",
        "    kind: TrainingJob",
        "    name: teach",
        "  type: Warning",
        "  reason: SavesNotListed",
        "  message: the saves of attempt 0 could not be listed",
    ]


@pytest.mark.parametrize(
    ("moment", "text"),
    [("2026-01-01T11:59:18Z", "42s"), ("2026-01-01T09:00:00Z", "3h"), ("2025-12-20T12:00:00Z", "12d"), ("", "")],
)
def test_ages_are_short(moment: str, text: str) -> None:
    assert age(moment, NOW) == text


@pytest.mark.parametrize(
    ("count", "text"), [(17, "17 B"), (442_135, "442 kB"), (1_620_000_000, "1.62 GB"), (5e15, "5e+03 TB")]
)
def test_bytes_are_readable(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("http://chat.default.svc:8000/v1", "http://127.16.0.2:8000/v1"),
        ("http://chat.default.svc.cluster.local:8000", "http://127.16.0.2:8000"),
        ("http://plain.default.svc", "http://127.16.0.3:8080"),
        ("http://chat.other.svc:8000", ""),
        ("", ""),
    ],
)
def test_endpoints_are_shown_as_this_machine_reaches_them(inside: str, expected: str) -> None:
    endpoints = {"default/chat:8000": "http://127.16.0.2:8000", "default/plain:80": "http://127.16.0.3:8080"}
    assert local_endpoint(inside, "default", endpoints) == expected
