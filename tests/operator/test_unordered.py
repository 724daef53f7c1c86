"""The least hours to expect without the order of a trace, against all rules and all orders of a short one."""

from __future__ import annotations

from itertools import combinations, permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from testing.clocked.unordered import Expected, least_unordered

SIZES = (1, 2, 3)
LEFT = [frozenset(parts) for count in (1, 2, 3) for parts in combinations(range(3), count)]


def served(sizes: dict[frozenset[int], int], missed: dict[int, list[int]]) -> Expected:
    """Serve three parts of one slot in all orders, with the size that belongs to the set of parts that are left."""
    slots = lost = 0
    for order in permutations(range(3)):
        for place, part in enumerate(order):
            size = sizes[frozenset(order[place:])]
            slots, lost = slots + size, lost + missed[size][part]
    return Expected(slots / 6, lost / 6)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(0, 12))
def test_it_is_a_rule_that_is_allowed_and_nearly_the_best_of_all(load: list[int], allowed: int) -> None:
    missed = {size: [max(work - 3 * size, 0) for work in load] for size in SIZES}
    rules = [served(dict(zip(LEFT, sizes, strict=True)), missed) for sizes in product(SIZES, repeat=len(LEFT))]
    found = least_unordered(missed, [1, 1, 1], allowed)
    assert found is not None
    assert found.missed <= allowed + 1e-9
    assert any(
        abs(rule.replica_slots - found.replica_slots) < 1e-9 and abs(rule.missed - found.missed) < 1e-9
        for rule in rules
    )
    assert not any(
        rule.replica_slots < found.replica_slots - 1e-9 and rule.missed <= found.missed + 1e-9 for rule in rules
    )


def test_equal_parts_need_one_size_and_long_parts_count_by_their_length() -> None:
    assert least_unordered({1: [5, 5], 2: [0, 0]}, [3, 4], 0) == Expected(14.0, 0.0)
    assert least_unordered({1: [5, 5], 2: [0, 0]}, [3, 4], 10) == Expected(7.0, 10.0)


def test_nothing_is_found_where_the_largest_pool_misses_too_much() -> None:
    assert least_unordered({1: [5, 5], 2: [4, 4]}, [1, 1], 7) is None


def test_what_is_left_tells_of_the_rest() -> None:
    """One part needs two replicas: they are kept until it has come, so for one and a half parts in the mean."""
    assert least_unordered({1: [9, 0], 2: [0, 0]}, [1, 1], 0) == Expected(3.5, 0.0)
