"""Statuses of gangs that start wait a moment; what a person must see at once is written at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.domain.plan import ControlCall, Event, Key, Object, Patch, Plan, Ref
from stoker.operator.loop.settling import LONGEST_S, SETTLE_S, WRITES_PER_S, SettlingStatuses, can_wait
from testing.operator.fakes import FakeClock

KEY = Key("TrainingJob", "default", "run")
POD = Ref("Pod", "default", "p", "uid-p")


def status(phase: str = "Pending", reason: str = "Placed", **changes: Any) -> Object:
    conditions = [{"type": "Ready", "reason": reason}, {"type": "Reconciling", "reason": reason}]
    return {"phase": phase, "attempt": {"number": 0, "placedAt": "t"}, "conditions": conditions, **changes}


def stored(now: Object | None = None, uid: str = "uid-1", **metadata: Any) -> Object:
    opened = status("Starting", "Starting", attempt={"number": 0})
    return {"kind": "TrainingJob", "metadata": {"uid": uid, **metadata}, "status": now or opened}


STALLED: Object = {"conditions": [{"type": "Ready", "reason": "ImagePull"}, {"type": "Stalled", "reason": "ImagePull"}]}


@pytest.mark.parametrize(
    ("before", "plan", "waits"),
    [
        pytest.param(stored(), Plan(status=status(), patch=(Patch(POD, {}),)), True, id="placed"),
        pytest.param(stored(), Plan(status=status("Pending", "WaitingForPods")), True, id="scheduled"),
        pytest.param(stored(status()), Plan(status=status("Starting", "Starting")), True, id="pods run"),
        pytest.param(stored(), Plan(status=status("Running", "Running")), False, id="runs"),
        pytest.param(stored(), Plan(status=status(attempt={"number": 0})), False, id="not placed"),
        pytest.param(stored(), Plan(status=status("Pending", "WaitingForGPUs")), False, id="no room"),
        pytest.param(stored(), Plan(status=status(**STALLED)), False, id="a person must act"),
        pytest.param(stored(), Plan(status=status(attempt={"number": 1, "placedAt": "t"})), False, id="next attempt"),
        pytest.param(stored(status("Running", "Running")), Plan(status=status()), False, id="ran before"),
        pytest.param(stored(deletionTimestamp="t"), Plan(status=status()), False, id="is deleted"),
        pytest.param(stored(), Plan(status=status(), create=({"kind": "Pod"},)), False, id="children depend on it"),
        pytest.param(stored(), Plan(status=status(), delete=(POD,)), False, id="deletes"),
        pytest.param(stored(), Plan(status=status(), calls=(ControlCall(POD, "POST", "/", {}),)), False, id="calls"),
        pytest.param(stored(), Plan(status=status(), events=(Event("Normal", "A", "b"),)), False, id="event"),
        pytest.param({**stored(), "kind": "EnginePool"}, Plan(status=status()), False, id="another kind"),
    ],
)
def test_only_the_status_of_a_placed_gang_that_starts_waits(before: Object, plan: Plan, waits: bool) -> None:
    assert can_wait(before, plan) is waits


def test_a_status_that_lasts_is_written_and_the_next_pass_sees_it_before() -> None:
    clock = FakeClock()
    settling = SettlingStatuses(clock)
    placed = Plan(status=status(), patch=(Patch(POD, {}),), requeue_after_s=60.0)
    assert settling.settled(KEY, stored(), placed) == replace(placed, status=None, requeue_after_s=SETTLE_S)
    assert settling.shown(KEY, stored())["status"] == status()
    assert settling.settled(KEY, stored(), Plan()).status is None, "nothing changed, and the time is not over"
    clock.passed_s += SETTLE_S
    assert settling.settled(KEY, stored(), Plan()).status == status()
    assert settling.shown(KEY, stored()) == stored()


def test_a_gang_that_runs_within_that_time_has_one_write() -> None:
    settling = SettlingStatuses(FakeClock())
    settling.settled(KEY, stored(), Plan(status=status()))
    running = Plan(status=status("Running", "Running"))
    assert settling.settled(KEY, stored(), running) == running
    assert settling.settled(KEY, stored(), Plan()) == Plan()


def test_a_new_resource_of_the_same_name_does_not_get_the_status_of_the_old_one() -> None:
    settling = SettlingStatuses(FakeClock())
    settling.settled(KEY, stored(), Plan(status=status()))
    other = stored(uid="uid-2")
    assert settling.shown(KEY, other) == other
    assert settling.settled(KEY, other, Plan()) == Plan()


@given(st.integers(1, 600))
def test_a_burst_waits_longer_and_never_longer_than_the_limit(count: int) -> None:
    settling = SettlingStatuses(FakeClock())
    waits = [
        settling.settled(Key("TrainingJob", "default", str(number)), stored(), Plan(status=status())).requeue_after_s
        for number in range(count)
    ]
    assert waits[0] == SETTLE_S
    assert waits == sorted(waits, key=lambda wait: wait or 0.0)
    assert waits[-1] == pytest.approx(min(SETTLE_S + (count - 1) / WRITES_PER_S, LONGEST_S))
