"""Two kinds of gangs on the same nodes: what one takes, the other cannot have; against every order of placing them."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.decision import REVIEW_S
from stoker.operator.domain.placement.beside import Kind, count_beside
from stoker.operator.domain.placement.gang import Gang
from stoker.operator.domain.placement.node_capacity import NodeCapacity
from stoker.operator.loop.load_watch import LoadWatch
from testing.operator.engine_load import load
from testing.operator.serving_world import CHAT
from tests.operator.test_lent_replicas import World

GPU = "nvidia.com/gpu"


def kind(gpus: int) -> Kind:
    return Kind(Gang(requests={GPU: gpus}))


def nodes(*free: int) -> list[NodeCapacity]:
    return [NodeCapacity(name=f"n{number}", free={GPU: gpus, "pods": 9}) for number, gpus in enumerate(free)]


def fits(free: tuple[int, ...], sizes: list[int]) -> bool:
    """Whether pods of these sizes can be put onto the nodes in any way."""
    for places in itertools.product(range(len(free)), repeat=len(sizes)):
        used = [sum(size for size, node in zip(sizes, places, strict=True) if node == own) for own in range(len(free))]
        if all(one <= other for one, other in zip(used, free, strict=True)):
            return True
    return False


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple), st.integers(1, 2), st.integers(1, 2))
def test_what_is_counted_can_be_placed(free: tuple[int, ...], first: int, second: int) -> None:
    counts = count_beside(kind(first), kind(second), nodes(*free))
    assert len(counts) == 1 + sum(one // first for one in free)
    for number, count in enumerate(counts):
        assert fits(free, [first] * number + [second] * count)
    assert not fits(free, [second] * (counts[0] + 1))


def test_replicas_of_one_kind_share_what_is_free() -> None:
    assert count_beside(kind(1), kind(1), nodes(2, 1)) == (3, 2, 1, 0)
    assert count_beside(kind(2), kind(1), nodes(3, 2)) == (5, 3, 1)


def test_two_pools_that_are_short_start_one_replica_for_one_free_place() -> None:
    """Each by itself would start one there, and one more for a node autoscaler."""
    goals: dict[str, Any] = {"min": 1, "max": 6, "mode": "slo", "scaleDownAfterSeconds": 600}
    world = World(
        [
            {"name": "pre", "role": "prefill", "replicas": 2, "autoscaling": {**goals, "ttftMs": 1000}},
            {"name": "dec", "role": "decode", "replicas": 2, "autoscaling": {**goals, "itlMs": 100}},
        ]
    )
    room = NodeCapacity(name="n", free={"cpu": 10**9, "memory": 10**15, "pods": 1})
    world.watch = LoadWatch(world.store, world.clock, world.woken.append, lambda: (room,))
    world.watch.review_all()
    for number in range(1, 60):
        world.clock.passed_s += 1
        for pod in world.engines():
            world.watch.note(pod, {"load": load(12 * number, 12 * number, max_requests=3)})
        if number % REVIEW_S == 0:
            world.watch.review_all()
    newest = [world.watch.scaling(CHAT)[name].newest for name in ("pre", "dec")]
    assert all(found.needed is not None and found.needed > found.before for found in newest)
    assert [found.before for found in newest] == [2, 2]
    assert 1 <= sum(found.after - 2 for found in newest) <= 2, "one has a place, and one asks for a node"
