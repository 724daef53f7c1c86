"""The step between revisions, as numbers: invariants at each step, and the end of repeated steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.reconcile.enginepool.step import Counts, ReplicaStep, next_step, resolve

SMALL = st.integers(0, 6)


@given(replicas=SMALL, surge=SMALL, unavailable=SMALL, counts=st.builds(Counts, SMALL, SMALL, SMALL, SMALL))
def test_a_step_keeps_the_budget(replicas: int, surge: int, unavailable: int, counts: Counts) -> None:
    step = next_step(replicas, surge, unavailable, counts)
    after = counts.total + step.create_new - step.drop_old_unready - step.drop_new_unready
    assert step.create_new == 0 or after <= replicas + max(surge, 0 if unavailable else 1)
    ready = counts.new_ready + counts.old_ready - step.drain_new - step.drain_old
    assert step.drain_old == 0 or ready >= replicas - unavailable
    assert step.drain_old <= counts.old_ready
    assert step.drop_new_unready + step.drain_new == max(counts.new_ready + counts.new_unready - replicas, 0)


@given(replicas=SMALL, surge=SMALL, unavailable=SMALL, counts=st.builds(Counts, SMALL, SMALL, SMALL, SMALL))
def test_repeated_steps_end_at_the_wanted_replicas(replicas: int, surge: int, unavailable: int, counts: Counts) -> None:
    for _ in range(60):
        step = next_step(replicas, surge, unavailable, counts)
        if step == ReplicaStep() and counts.new_unready == 0:
            break
        counts = Counts(
            new_ready=counts.new_ready + counts.new_unready - step.drop_new_unready - step.drain_new + step.create_new,
            new_unready=0,
            old_ready=counts.old_ready - step.drain_old,
            old_unready=counts.old_unready - step.drop_old_unready,
        )
    assert counts == Counts(replicas, 0, 0, 0)


@pytest.mark.parametrize(
    ("value", "replicas", "up", "expected"),
    [(1, 8, True, 1), ("25%", 6, True, 2), ("25%", 6, False, 1), ("0%", 6, True, 0), ("100%", 3, False, 3)],
)
def test_percentages_round_surge_up_and_unavailable_down(
    value: int | str, replicas: int, up: bool, expected: int
) -> None:
    assert resolve(value, replicas, up=up) == expected
