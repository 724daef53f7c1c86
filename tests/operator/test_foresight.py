"""The least hours of a pool that knows its trace, against all plans of a short one."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from testing.clocked.foresight import least_hours

SIZES = (1, 2, 3)


def turns_too_soon(sizes: tuple[int, ...], rest_slots: int) -> bool:
    moves = [
        (slot, 1 if after > before else -1) for slot, (before, after) in enumerate(pairwise(sizes)) if after != before
    ]
    turns = [slot for (_, before), (slot, after) in pairwise(moves) if before != after]
    return any(later - earlier < rest_slots for earlier, later in pairwise(turns))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=5, max_size=5), st.integers(1, 3), st.integers(0, 20))
def test_a_plan_is_allowed_and_nearly_as_cheap_as_the_best_of_all(load: list[int], rest: int, allowed: int) -> None:
    missed = {size: [max(work - 3 * size, 0) for work in load] for size in SIZES}
    plans = [sizes for sizes in product(SIZES, repeat=len(load)) if not turns_too_soon(sizes, rest)]
    of = {sizes: sum(missed[size][slot] for slot, size in enumerate(sizes)) for sizes in plans}
    found = least_hours(missed, allowed, rest)
    assert found is not None
    assert found.sizes in of
    assert found.missed == of[found.sizes] <= allowed
    best = min(sum(sizes) for sizes, lost in of.items() if lost <= allowed)
    assert best <= found.cost
    if allowed == 0:
        assert found.cost == best


def test_no_plan_is_found_where_the_largest_pool_misses_too_much() -> None:
    assert least_hours({1: [5, 5], 2: [4, 4]}, 7, 1) is None
