"""The start of an attempt in its parts: they add up, whatever the clocks say, and reach status and metrics."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.domain.plan import Object
from stoker.operator.domain.startup import PARTS, broken_down
from testing.operator.simulated_cluster import START
from testing.operator.training_world import JOB, Run

ENDS = [part for part in PARTS if part != "compile"]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@given(st.dictionaries(st.sampled_from(ENDS), st.integers(-100, 5000)), st.floats(0, 10000))
def test_the_parts_add_up_to_the_time_until_the_last_known_moment(ends: dict[str, int], compile_s: float) -> None:
    found = broken_down(START, {part: at(seconds) for part, seconds in ends.items()}, compile_s)
    assert sum(found.values()) == max([0, *ends.values()])
    assert all(seconds >= 0 for seconds in found.values())
    assert [part for part in PARTS if part in found] == list(found)
    assert ("compile" in found) == ("first_step" in ends)


def test_a_moment_that_is_not_known_gives_its_part_to_the_next() -> None:
    ends = {"queue": at(5), "pull": at(30), "start": at(28), "load": at(60.5), "first_step": at(100)}
    assert broken_down(START, ends, 12.4) == {
        "queue": 5,
        "pull": 25,
        "start": 0,
        "load": 30,
        "compile": 12,
        "first_step": 28,
    }
    assert broken_down(START, {"first_step": at(3)}, 60) == {"compile": 3, "first_step": 0}


def text(seconds: float) -> str:
    return at(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def started(pod: Object, *, scheduled_s: float, started_s: float) -> None:
    """What scheduler and kubelet write."""
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": text(scheduled_s)}
    container = {"name": "main", "state": {"running": {"startedAt": text(started_s)}}}
    pod["status"] |= {"phase": "Running", "conditions": [condition], "containerStatuses": [container]}


def report(run: Run, **startup: float) -> None:
    moments: dict[str, Any] = {
        name: value if name == "compile_s" else at(value).timestamp() for name, value in startup.items()
    }
    body = {"attempt": run.attempt, "phase": "Training", "step": 1, "total_steps": 100, "saves": []}
    run.cluster.report(run.gang[0], {**body, "startup": moments})
    run.cluster.settle()


def test_the_status_shows_the_parts_once_the_first_step_is_done() -> None:
    run = Run()
    run.cluster.settle()
    started(run.gang[0], scheduled_s=2, started_s=30)
    started(run.gang[1], scheduled_s=4, started_s=20)
    report(run, started_at=41, joined_at=45)
    assert "startup" not in run.status["attempt"]
    report(run, started_at=41, joined_at=45, loaded_at=70, stepped_at=80, compile_s=6)
    found = run.status["attempt"]["startup"]
    assert found == {
        "queue": 0,
        "schedule": 4,
        "pull": 26,
        "start": 11,
        "rendezvous": 4,
        "load": 25,
        "compile": 6,
        "firstStep": 4,
    }
    report(run, started_at=41, joined_at=45, loaded_at=70, stepped_at=99, compile_s=6)
    assert run.status["attempt"]["startup"] == found, "written once"
    assert run.cluster.plan(JOB).empty
    assert START.tzinfo is UTC
