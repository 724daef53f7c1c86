"""The least hours of a pool that knows its trace, against all plans of a short one."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.step_curve import StepCurve
from testing.clocked.fleet import FleetSettings, simulate
from testing.clocked.foresight import Plan, least_hours
from testing.clocked.replica import EngineSettings
from testing.clocked.trace import TracedRequest

SIZES = (1, 2, 3)


def orders(sizes: tuple[int, ...], startup: int) -> list[tuple[int, int]]:
    """(slot of the order, 1 up or -1 down) of each change, in the order of the plan."""
    changes = [(slot, after - before) for slot, (before, after) in enumerate(pairwise(sizes), 1) if after != before]
    return [(slot - startup, 1) if change > 0 else (slot, -1) for slot, change in changes]


def is_allowed(sizes: tuple[int, ...], rest: int, startup: int) -> bool:
    found = orders(sizes, startup)
    turns = [slot for (_, before), (slot, after) in pairwise(found) if before != after]
    return all(slot >= 0 for slot, _ in found) and all(late - early >= rest for early, late in pairwise(turns))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=6, max_size=6), st.integers(1, 3), st.integers(0, 20), st.integers(0, 2))
def test_a_plan_is_allowed_and_nearly_as_cheap_as_the_best_of_all(
    load: list[int], rest: int, allowed: int, startup: int
) -> None:
    missed = {size: [max(work - 3 * size, 0) for work in load] for size in SIZES}
    plans = [sizes for sizes in product(SIZES, repeat=len(load)) if is_allowed(sizes, rest, startup)]
    of = {sizes: sum(missed[size][slot] for slot, size in enumerate(sizes)) for sizes in plans}
    found = least_hours(missed, allowed, rest, startup)
    assert found is not None
    assert found.sizes in of
    assert found.missed == of[found.sizes] <= allowed
    best = min(Plan(sizes, lost, startup).cost for sizes, lost in of.items() if lost <= allowed)
    assert best <= found.cost
    if allowed == 0:
        assert found.cost == best


def test_no_plan_is_found_where_the_largest_pool_misses_too_much() -> None:
    assert least_hours({1: [5, 5], 2: [4, 4]}, 7, 1) is None


def test_a_planned_pool_is_ready_in_time_and_pays_for_its_starts() -> None:
    """Three slots of 60 s with 1, 3 and 1 replicas; one start-up is a slot."""
    plan = Plan((1, 3, 1), 0, startup_slots=1)
    assert (plan.cost, plan.orders(60.0)) == (7, [(0.0, 2), (120.0, -2)])
    engine = EngineSettings(StepCurve(0.01, 1e-5, 1e-4), prefix_cache=False)
    requests = [TracedRequest(number, at_s, 100, 1) for number, at_s in enumerate((10.0, 70.0, 180.0))]
    result = simulate(FleetSettings(engine, 1, startup_s=60.0, orders=tuple(plan.orders(60.0))), requests)
    assert result.most == 3
    assert 420 <= result.replica_s < 421
