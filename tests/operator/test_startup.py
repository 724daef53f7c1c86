"""The starts of attempts and engines in their parts: they add up, whatever the clocks say, and reach the status."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic.alias_generators import to_camel

from stoker.operator.api.enginepool import StartParts
from stoker.operator.domain.plan import Object
from stoker.operator.domain.startup import ENGINE_PARTS, PARTS, broken_down, engine_start
from testing.operator.serving_world import CHAT, POOL, Serving
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


@given(
    st.none() | st.integers(-5, 100),
    st.integers(-5, 300),
    st.dictionaries(st.sampled_from([*ENGINE_PARTS, "Dreaming"]), st.floats(-1, 500)),
    st.integers(-5, 2000),
)
def test_the_parts_of_an_engine_add_up_to_the_last_moment(
    scheduled: int | None, started: int, reported: dict[str, float], ready: int
) -> None:
    found = engine_start(START, None if scheduled is None else at(scheduled), at(started), reported, at(ready))
    assert all(seconds >= 0 for seconds in found.values())
    last = started + sum(max(took_s, 0.0) for name, took_s in _until_known(reported))
    assert abs(sum(found.values()) - max([0, scheduled or 0, started, last, ready])) <= 1, "whole seconds"
    assert found.keys() <= set(StartParts.model_fields)


def _until_known(reported: dict[str, float]) -> list[tuple[str, float]]:
    """The parts until the last one that has a name: what follows is in `ready`."""
    names = list(reported)
    known = [place for place, name in enumerate(names) if name in ENGINE_PARTS]
    return list(reported.items())[: known[-1] + 1 if known else 0]


PARTS_OF_AN_ENGINE = {
    "Importing": 2.4,
    "Planning": 0.3,
    "LoadingWeights": 5.0,
    "AllocatingCache": 0.1,
    "CompilingKernels": 1.5,
    "CapturingGraphs": 2.2,
    "Warming": 0.5,
}


def become_ready(serving: Serving, pod: Object, *, after_s: float) -> None:
    created = serving.cluster.now
    pod["metadata"]["creationTimestamp"] = created.strftime("%Y-%m-%dT%H:%M:%SZ")
    serving.cluster.advance(after_s)
    serving.cluster.run(pod)
    moments = {"PodScheduled": 1, "Ready": after_s}
    pod["status"]["conditions"] = [
        {"type": kind, "status": "True", "lastTransitionTime": (created + timedelta(seconds=moment)).isoformat()}
        for kind, moment in moments.items()
    ]
    running = {"running": {"startedAt": (created + timedelta(seconds=4)).isoformat()}}
    pod["status"]["containerStatuses"] = [{"name": "main", "state": running}]


def test_a_pool_shows_the_start_of_its_newest_replica_and_its_deployment_too() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.cluster.settle()
    first, second = serving.engines()
    become_ready(serving, first, after_s=18)
    serving.cluster.settle()
    assert "lastStart" not in serving.pool_status, "the engine has not told its parts"
    serving.cluster.report(first, {"phase": "Loading", "startup_s": {"Importing": 2.4, "Planning": 0.3}})
    serving.cluster.settle()
    assert "lastStart" not in serving.pool_status, "a report from before the end of the start"
    serving.cluster.report(first, {"phase": "Serving", "startup_s": PARTS_OF_AN_ENGINE})
    serving.cluster.settle()
    expected = {
        "schedule": 1,
        "pull": 3,
        "start": 2,
        "plan": 0,
        "load": 5,
        "cache": 0,
        "kernels": 2,
        "graphs": 2,
        "warm": 1,
        "ready": 2,
    }
    found = serving.pool_status["lastStart"]
    assert found["createdAt"] == "2026-01-01T00:00:00Z"
    assert (found["engine"], found["seconds"], found["parts"]) == (first["metadata"]["name"], 18, expected)
    assert serving.status["pools"][0]["lastStart"] == found
    serving.cluster.report(first, {"phase": "Serving", "startup_s": {**PARTS_OF_AN_ENGINE, "Warming": 99.0}})
    serving.cluster.settle()
    assert serving.pool_status["lastStart"] == found, "written once"
    become_ready(serving, second, after_s=30)
    serving.cluster.report(second, {"phase": "Serving", "startup_s": PARTS_OF_AN_ENGINE})
    serving.cluster.settle()
    assert serving.pool_status["lastStart"]["engine"] == second["metadata"]["name"]
    assert serving.pool_status["lastStart"]["seconds"] == 30
    assert serving.cluster.plan(POOL).empty
    assert serving.cluster.plan(CHAT).empty


def test_every_part_has_its_field() -> None:
    assert {*ENGINE_PARTS.values(), "schedule", "pull", "ready"} == set(StartParts.model_fields)
    assert all(to_camel(name) == name for name in StartParts.model_fields)
