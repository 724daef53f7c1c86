"""The goodput ledger: every second of a run is booked once, and repeated training is lost."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.api.trainingjob_status import TERMINAL_PHASES, TrainingPhase
from stoker.operator.domain.goodput import STATES, Ledger, booked, opened, read_ledger, state_of, totals
from stoker.operator.domain.placement.node_capacity import pinned_node
from stoker.operator.domain.plan import Key
from stoker.operator.domain.settings import Settings
from stoker.pod.causes import Cause
from testing.operator.ready_node import ready_node
from testing.operator.simulated_cluster import Crash
from testing.operator.training_world import JOB, Run

START = datetime(2026, 1, 1, tzinfo=UTC)
PHASES = sorted(set(get_args(TrainingPhase)) - TERMINAL_PHASES)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@given(
    st.lists(st.tuples(st.floats(0, 500), st.sampled_from(PHASES), st.booleans(), st.floats(-0.5, 1.5)), max_size=30),
    st.floats(0, 500),
)
def test_the_seconds_of_a_run_add_up_to_its_age(history: list[tuple[float, str, bool, float]], rest: float) -> None:
    ledger, now, attempt = opened(START, "Pending", None), 0.0, 0
    for passed, phase, restarted, share in history:
        now, attempt = now + passed, attempt + restarted
        ledger = booked(ledger, at(now), phase, attempt, share)
    found = totals(ledger, at(now + rest))
    assert sum(found.values()) == int((at(now + rest) - START).total_seconds())
    assert all(seconds >= 0 for seconds in found.values())


@given(st.lists(st.floats(0, 50), min_size=2, max_size=10))
def test_a_run_that_stays_in_its_state_writes_nothing(times: list[float]) -> None:
    ledger = opened(START, "Running", 0)
    for before, after in pairwise(sorted(times)):
        assert before <= after
        assert booked(ledger, at(after), "Running", 0) is ledger


def test_repeated_training_moves_from_productive_to_lost() -> None:
    ledger = opened(START, "Starting", 0)
    ledger = booked(ledger, at(10), "Running", 0)
    ledger = booked(ledger, at(110), "Restarting", 0)
    ledger = booked(ledger, at(120), "Starting", 1, 0.25)
    assert ledger.state == "restarting"
    assert {state: spent for state, spent in totals(ledger, at(130)).items() if spent} == {
        "starting": 10,
        "productive": 75,
        "lost": 25,
        "restarting": 20,
    }


def test_no_time_passes_after_the_end() -> None:
    ledger = booked(opened(START, "Running", 0), at(30), "Completed", 0)
    assert (ledger.state, totals(ledger, at(99))["productive"]) == (None, 30)
    assert isinstance(ledger, Ledger)
    assert state_of("Failed", 3) is None


def test_a_clock_that_goes_back_books_nothing() -> None:
    ledger = booked(opened(at(100), "Running", 0), at(50), "Suspended", 0)
    assert totals(ledger, at(100))["productive"] == 0


def test_the_ledger_of_a_job_through_a_failure() -> None:
    run = Run()
    run.cluster.settle()
    run.cluster.advance(30)
    for pod in run.gang:
        run.cluster.run(pod)
    run.train(0)
    run.cluster.advance(100)
    run.train(50, (run.save(40),))
    assert run.cluster.plan(JOB).empty
    run.cluster.end(run.gang[0], Cause.RANK_FAILED, saves=(run.word(40),), step=50)
    for _ in range(8):
        run.cluster.settle()
        run.cluster.collect()
        run.answer_tasks("list", saves=[])
        run.cluster.advance(1)
    run.cluster.settle()
    assert run.attempt == 1
    found = run.status["goodput"]
    assert (found["queued"], found["productive"], found["lost"]) == (30, 80, 20)
    states = ("queued", "starting", "productive", "checkpointing", "restarting", "suspended", "lost")
    since = datetime.fromisoformat(found["since"])
    assert sum(found.get(state, 0) for state in states) == (since - START).total_seconds()


# Whole histories of a run


HISTORY = st.lists(
    st.tuples(
        st.sampled_from(
            ["pass", "run", "train", "save", "kill", "end", "suspend", "resume", "node", "lose", "edit", "wait", "back"]
        ),
        st.integers(0, 5),
    ),
    max_size=25,
)


def live(run: Run, event: str, number: int) -> None:
    """Let one thing happen to an elastic run, and the operator's clock go on, or back."""
    cluster, gang = run.cluster, run.gang if "attempt" in run.status else []
    running = [pod for pod in gang if pod["status"]["phase"] == "Running"]
    if event == "pass":
        with contextlib.suppress(Crash):  # the next operator reads everything from the status
            cluster.reconcile(JOB, crash_after=number)
    elif event == "run":
        for pod in gang:
            if pinned_node(pod):
                cluster.run(pod)
    elif event in ("train", "save") and len(running) == len(gang) > 0:
        saves = (run.save(number + 1),) if event == "save" else ()
        cluster.report(
            running[0], {"attempt": run.attempt, "phase": "Training", "step": 2 * number, "saves": list(saves)}
        )
    elif event == "kill" and running:
        cluster.kill(running[number % len(running)])
    elif event == "end":
        for pod in running:
            cluster.end(pod, Cause.INTERRUPTED, step=number, saves=(run.word(number + 1),))
    elif event in ("suspend", "resume"):
        cluster.change_spec(JOB, lambda spec: spec["run"].update(suspend=event == "suspend"))
    elif event == "edit":
        cluster.change_spec(JOB, lambda spec: spec["workers"].update(env=[{"name": "A", "value": str(number)}]))
    elif event == "node":
        cluster.add(ready_node(f"n{number}", 1))
    elif event == "lose":
        cluster.objects.pop(Key("Node", "", f"n{number}"), None)
    cluster.advance({"wait": 700.3 * number, "back": -40.7 * number}.get(event, 1.5))


@settings(max_examples=30)
@given(HISTORY)
def test_every_second_of_any_history_is_booked_once(history: list[tuple[str, int]]) -> None:
    """Suspends, failures, edits, sizes, operators that die, and clocks that jump: the states add up to the age."""
    run = Run(
        Settings(places_gangs=True),
        workers={"replicas": 2, "gpusPerPod": 1},
        training={"totalSteps": 100, "globalBatchSize": 8},
        run={"elastic": {"minWorkers": 1, "maxWorkers": 4}, "backoffLimit": 1000, "applyChanges": "Restart"},
    )
    for name in ("n0", "n1"):
        run.cluster.add(ready_node(name, 1))
    run.cluster.settle_once()
    born = latest = run.cluster.now
    for event, number in history:
        live(run, event, number)
        run.cluster.settle_once()
        run.cluster.collect()
        for pod in run.cluster.pods("task"):
            if pod["status"]["phase"] == "Pending":
                run.cluster.end(pod, Cause.COMPLETED, result={"task": "list", "ok": True, "saves": []})
        latest = max(latest, run.cluster.now)
        ledger = read_ledger(run.status["goodput"])
        spent = totals(ledger, run.cluster.now)
        assert set(spent) == set(STATES)
        assert all(seconds >= 0 for seconds in spent.values())
        assert sum(spent.values()) == int((max(ledger.since, run.cluster.now) - born).total_seconds())
        assert ledger.since <= latest
        if run.status["phase"] not in TERMINAL_PHASES:
            assert ledger.state == state_of(run.status["phase"], run.status.get("attempt", {}).get("number"))
