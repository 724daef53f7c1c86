"""One review of a prefill and a decode pool together: shared room, work that moves, flips of needed replicas, holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.decision import REVIEW_S, Change, Limits, Memory, PoolInput
from stoker.operator.domain.autoscaling.demand import Demand
from stoker.operator.domain.autoscaling.pair_review import Member, review_pair, reviewed
from stoker.operator.domain.autoscaling.prediction import EngineShape, Goals
from stoker.operator.domain.autoscaling.role_flip import Reviewed
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.pod.histogram import Histogram

CURVE = StepCurve(base_s=0.015, prompt_token_s=8e-5, decode_token_s=1e-4)
SHAPE = EngineShape(400_000, 256, 2048, 512)
PREFILL, DECODE = Goals(first_token_s=2.0), Goals(gap_s=0.07)
NOW_S = 5000.0


def sizes(*tokens: int) -> Histogram:
    found = Histogram()
    for size in tokens:
        found.add(size)
    return found


def prefill(replicas: int, rate: float, most: int = 16, **changes: Any) -> Member:
    """A pool that computes so many prompts per second."""
    demand = Demand(rate, 1.2, sizes(500, 1500, 2500, 4000), 2100, 3)
    return member(replicas, demand, Limits(1, most, goals=PREFILL), **changes)


def decode(replicas: int, rate: float, most: int = 16, **changes: Any) -> Member:
    """A pool that answers so many requests per second, and computes one prompt in ten."""
    demand = Demand(rate, 1.2, sizes(*[30] * 9, 1500), 2100, 200)
    return member(replicas, demand, Limits(1, most, goals=DECODE), **changes)


def member(replicas: int, demand: Demand, limits: Limits, memory: Memory | None = None, **changes: Any) -> Member:
    seen = PoolInput(replicas, replicas, (), demand, demand.rate, CURVE, SHAPE, running=1, startup_s=60.0)
    return Member(limits, replace(seen, **changes), memory or Memory())


def after(found: tuple[Reviewed, Reviewed]) -> tuple[int, int]:
    return found[0].decision.after, found[1].decision.after


def roomy(pool: Member, free: int) -> Member:
    return replace(pool, limits=replace(pool.limits, placeable=pool.seen.replicas + free))


def test_where_both_needs_can_be_had_each_pool_is_reviewed_as_if_alone() -> None:
    one, other = prefill(1, 6.0), decode(2, 40.0)
    expected = tuple(reviewed(NOW_S, pool) for pool in (one, other))
    assert expected[0].decision.after > 1
    assert expected[1].decision.after > 2
    assert review_pair(NOW_S, one, other) == expected
    assert review_pair(NOW_S, one, other, beside=tuple(range(60, -1, -1))) == expected


def test_free_gpus_are_given_once() -> None:
    """By itself each pool would take the one that is free, and one more."""
    one, other = roomy(prefill(2, 30.0), 1), roomy(decode(2, 80.0), 1)
    assert [reviewed(NOW_S, pool).decision.after for pool in (one, other)] == [4, 4]
    found = review_pair(NOW_S, one, other, beside=(1, 0))
    assert sum(after(found)) == 4 + 1 + 1, "one has room, and one is for a node autoscaler"
    assert "WaitingForRoom" in {pool.decision.reason for pool in found}
    waiting = review_pair(NOW_S, one, other, beside=(-1,))
    assert sum(after(waiting)) == 4


def test_a_decode_pool_grows_for_prompts_that_a_prefill_pool_at_its_max_cannot_compute() -> None:
    one, other = prefill(1, 8.0, most=1), decode(2, 8.0)
    assert reviewed(NOW_S, other).decision.after == 2
    found = review_pair(NOW_S, one, other)
    assert found[0].decision.reason == "AtMax"
    assert (found[1].decision.reason, found[1].decision.after) == ("Load", 4), "at most twice as many"
    assert "work of the other pool" in found[1].decision.message
    assert found[1].decision.needed is not None
    assert found[1].decision.needed >= 4


def test_a_prefill_pool_grows_for_answers_that_a_decode_pool_at_its_max_cannot_give() -> None:
    found = review_pair(NOW_S, prefill(1, 0.5), decode(1, 40.0, most=1))
    assert found[1].decision.reason == "AtMax"
    assert (found[0].decision.reason, found[0].decision.after) == ("Load", 2)


def test_a_spare_replica_is_room_for_the_other_pool_and_changes_its_role() -> None:
    spare = Memory(needs=((NOW_S - 1, 2),), since_s=NOW_S - 600)
    one, other = prefill(4, 6.0, memory=spare), decode(2, 40.0)
    found = review_pair(NOW_S, roomy(one, 0), roomy(other, 0), beside=(0,), flips=True)
    assert found[1].decision.flips > 0
    assert found[0].decision.flips == -found[1].decision.flips
    assert "RoleFlip" == found[0].decision.reason == found[1].decision.reason


def test_nothing_is_moved_while_an_input_is_unknown() -> None:
    one = prefill(1, 8.0, most=1, unknown=("the load of engine e is 20 s old",))
    other = decode(2, 8.0)
    found = review_pair(NOW_S, one, other, flips=True)
    assert [pool.decision.reason for pool in found] == ["Unknown", "Proving"]


def test_work_of_the_other_pool_is_no_reason_for_a_second_change_of_direction() -> None:
    changes = Change(NOW_S - 400, 2, 3), Change(NOW_S - 30, 3, 2)
    found = review_pair(NOW_S, prefill(1, 8.0, most=1), decode(2, 8.0, memory=Memory(changes=changes)))
    assert (found[1].decision.after, found[1].decision.reason) == (2, "Burst")


def test_a_pool_keeps_what_it_needs_for_the_other_one() -> None:
    """Without the other pool's work fewer replicas would suffice for the whole proof."""
    memory, other = Memory(), decode(8, 8.0)
    for number in range(round(400 / REVIEW_S)):
        found = review_pair(number * REVIEW_S, prefill(1, 10.0, most=1), replace(other, memory=memory))[1]
        memory = found.memory
        assert found.decision.after >= 8
    assert reviewed(400.0, replace(other, memory=Memory(needs=((0.0, 1),), since_s=0.0))).decision.after == 7


MEMBERS = st.tuples(st.integers(1, 6), st.floats(0.5, 60), st.integers(1, 10), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(MEMBERS, MEMBERS, st.integers(-1, 4), st.booleans()), min_size=1, max_size=8))
def test_both_pools_stay_in_their_limits_and_in_the_room(history: list[Any]) -> None:
    memories = [Memory(), Memory()]
    for number, (first, second, free, flips) in enumerate(history):
        pools = []
        for make, (replicas, rate, more, unknown), memory in zip(
            (prefill, decode), (first, second), memories, strict=True
        ):
            made = make(replicas, rate, replicas + more, memory=memory, unknown=("engine e",) * unknown)
            pools.append(roomy(made, max(free, 0)))
        beside = tuple(range(free, -1, -1)) or (free,)
        found = review_pair(number * 200.0, pools[0], pools[1], beside, flips=flips)
        for before, one in zip(pools, found, strict=True):
            replicas = before.seen.replicas
            assert 1 <= one.decision.after <= before.limits.max
            assert one.decision.after <= 2 * replicas
            assert one.decision.flips or replicas - 1 <= one.decision.after
            assert not before.seen.unknown or one.decision.after == replicas
        assert sum(one.decision.flips for one in found) == 0
        memories = [one.memory for one in found]


def test_a_pool_whose_spare_replicas_can_change_their_role_keeps_none_for_the_other_ones_work() -> None:
    memory = Memory(needs=((NOW_S - 1, 1),), since_s=NOW_S - 600)
    one, other = prefill(3, 1.0, memory=memory), decode(2, 90.0)
    found = review_pair(NOW_S, roomy(one, 0), roomy(other, 0), beside=(0,), flips=True)
    assert (found[1].decision.flips, found[0].decision.flips) == (2, -2)
    kept = review_pair(NOW_S, roomy(one, 0), roomy(other, 0), beside=(0,))
    assert kept[0].decision.after == 3, "it answers requests"
