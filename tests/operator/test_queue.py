"""The queue of gangs: order against a naive one, back-fill against every order of ends, and that every gang starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import NodeCapacity, PodUse
from stoker.operator.domain.placement.place import Placement, place
from stoker.operator.domain.queue.applicant import Applicant, Holding, Turn
from stoker.operator.domain.queue.backfill import TOGETHER, delays
from stoker.operator.domain.queue.decide import LOOK_AHEAD, decide
from stoker.operator.domain.queue.order import order, share

GPU = "gpu"


def node(name: str, gpus: int, cpus: int = 64, **labels: str) -> NodeCapacity:
    return NodeCapacity(name=name, free={GPU: gpus, "cpu": cpus, "pods": 110}, labels=labels)


def applicant(name: str, pods: int, gpus: int = 8, namespace: str = "a", **more: object) -> Applicant:
    selector = more.pop("selector", {})
    gang = Gang(replicas=pods, requests={GPU: gpus, "cpu": 1}, node_selector=selector)  # type: ignore[arg-type]
    return Applicant(name=name, namespace=namespace, gang=gang, **{"since": name, **more})  # type: ignore[arg-type]


def holding(*nodes: str, gpus: int = 8, namespace: str = "a") -> Holding:
    return Holding(namespace=namespace, uses=tuple(PodUse(name, {GPU: gpus, "cpu": 1}) for name in nodes))


def names(found: Iterable[Applicant]) -> list[str]:
    return [item.name for item in found]


# Order


def test_priority_comes_first_then_runs_that_come_back_then_age() -> None:
    waiting = [
        applicant("old", 1),
        applicant("young", 1),
        applicant("back", 1, returning=True, since="z"),
        applicant("urgent", 1, priority=5, since="z"),
    ]
    assert names(order(waiting, (), {GPU: 8})) == ["urgent", "back", "old", "young"]


def test_namespaces_take_turns_and_one_that_runs_nothing_comes_first() -> None:
    waiting = [applicant(f"a{index}", 1) for index in range(3)] + [applicant("b0", 1, namespace="b", since="z")]
    assert names(order(waiting, (), {GPU: 80})) == ["a0", "b0", "a1", "a2"]
    assert names(order(waiting, [holding("n0")], {GPU: 80})) == ["b0", "a0", "a1", "a2"]


WAITING = st.lists(
    st.builds(
        lambda pods, gpus, namespace, priority, returning, since: (pods, gpus, namespace, priority, returning, since),
        st.integers(1, 4),
        st.sampled_from([0, 1, 2, 4, 8]),
        st.sampled_from("abc"),
        st.sampled_from([0, 0, 0, 10]),
        st.booleans(),
        st.integers(0, 5),
    ),
    max_size=7,
).map(
    lambda found: [
        applicant(f"j{index}", pods, gpus, namespace, priority=priority, returning=returning, since=str(since))
        for index, (pods, gpus, namespace, priority, returning, since) in enumerate(found)
    ]
)
HOLDINGS = st.lists(
    st.builds(
        lambda places, gpus, namespace: holding(*(f"n{place}" for place in places), gpus=gpus, namespace=namespace),
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
        st.sampled_from([1, 2, 3, 4, 8]),
        st.sampled_from("abc"),
    ),
    max_size=5,
)


def naive_order(waiting: Sequence[Applicant], holdings: Sequence[Holding], total: dict[str, int]) -> list[str]:
    """Pick the best of all that are left, again and again."""
    used = {namespace: Counter[str]() for namespace in "abc"}
    for held in holdings:
        for use in held.uses:
            used[held.namespace].update(use.requests)
    left, picked = list(waiting), []
    while left:
        best = min(
            left,
            key=lambda found: (
                -found.priority,
                not found.returning,
                share(used[found.namespace], total),
                min(
                    (other.since, other.name)
                    for other in left
                    if (other.namespace, other.priority, other.returning)
                    == (found.namespace, found.priority, found.returning)
                )[0],
                found.namespace,
                found.since,
                found.name,
            ),
        )
        left.remove(best)
        picked.append(best.name)
        used[best.namespace].update(best.demand)
    return picked


@settings(max_examples=300, deadline=None)
@given(waiting=WAITING, holdings=HOLDINGS)
def test_the_order_is_that_of_picking_one_after_the_other(waiting: list[Applicant], holdings: list[Holding]) -> None:
    total = {GPU: 32, "cpu": 256}
    assert names(order(waiting, holdings, total)) == naive_order(waiting, holdings, total)


# Back-fill


def after(nodes: Sequence[NodeCapacity], uses: Iterable[PodUse], sign: int) -> tuple[NodeCapacity, ...]:
    """The nodes with what pods take added (1) or removed (-1)."""
    change: dict[str, Counter[str]] = {found.name: Counter(found.free) for found in nodes}
    for use in uses:
        for resource, amount in {**use.requests, "pods": 1}.items():
            change[use.node][resource] += sign * amount
    return tuple(replace(found, free=dict(change[found.name])) for found in nodes)


def fits(found: Applicant, nodes: Sequence[NodeCapacity]) -> bool:
    return isinstance(place(found.gang, nodes, found.levels), Placement)


def really_delays(
    head: Applicant, nodes: Sequence[NodeCapacity], holdings: Sequence[Holding], added: Sequence[PodUse]
) -> bool:
    """Try every set of runs that may have ended."""
    for size in range(len(holdings) + 1):
        for ended in combinations(holdings, size):
            emptied = after(nodes, (use for held in ended for use in held.uses), 1)
            if fits(head, emptied) and not fits(head, after(emptied, added, -1)):
                return True
    return False


def test_back_fill_takes_what_the_head_cannot_use_or_has_too_much_of() -> None:
    nodes = [node("n0", 8), node("n1", 8), node("n2", 8), node("n3", 8), node("c0", 0)]
    runs = [holding("r0", "r1", "r2", "r3")]
    busy = [node(f"r{index}", 0) for index in range(4)]
    head = applicant("head", 6)
    turns = decide([head, applicant("small", 2), applicant("tiny", 1)], nodes + busy, runs)
    assert turns["head"] == Turn(position=1, total=3, is_head=True)
    assert turns["small"].nodes is not None, "when the run of 4 ends, 8 nodes are free and the head needs 6"
    assert turns["tiny"].kept_for == "head"
    assert turns["tiny"].line == "Queued 3 of 3"


def test_two_runs_that_end_one_after_the_other_leave_no_room_for_back_fill() -> None:
    nodes = [node("n0", 8), node("n1", 8)] + [node(f"r{index}", 0) for index in range(8)]
    runs = [holding("r0", "r1", "r2", "r3"), holding("r4", "r5", "r6", "r7")]
    turns = decide([applicant("head", 6), applicant("small", 2)], nodes, runs)
    assert turns["small"].nodes is None, "the first end frees exactly what the head needs"
    assert turns["small"].kept_for == "head"
    other = decide([applicant("head", 8), applicant("small", 2)], nodes, runs)
    assert other["small"].nodes is not None, "no end frees 8 or 9 nodes: both must end, and then there are 10"


def test_back_fill_prefers_nodes_that_are_not_for_the_head() -> None:
    nodes = [node("a", 8, pool="a"), node("b", 8, pool="b"), node("r", 0, pool="a")]
    head = applicant("head", 2, selector={"pool": "a"})
    turns = decide([head, applicant("small", 1)], nodes, [holding("r")])
    assert turns["small"].nodes == ("b",)


def test_a_gang_that_fits_in_no_cluster_of_this_size_holds_no_other_back() -> None:
    turns = decide([applicant("giant", 100), applicant("small", 1)], [node("n0", 8)], [])
    assert turns["giant"] == Turn(position=1, total=2)
    assert turns["small"].nodes == ("n0",)


def test_a_head_with_a_required_topology_shares_no_node() -> None:
    nodes = [node(f"n{index}", 8, rack=str(index % 2)) for index in range(4)] + [node("r", 0, rack="0")]
    head = replace(applicant("head", 3), levels=(Level("rack", "Preferred"), Level("rack", "Preferred"), Level("rack")))
    turns = decide([head, applicant("small", 1)], nodes, [holding("r")])
    assert (turns["head"].nodes, turns["small"].nodes) == (None, None)


def test_many_runs_on_common_nodes_are_taken_carefully() -> None:
    runs = [holding("n0", gpus=1) for _ in range(TOGETHER + 2)]
    nodes = [node("n0", 0), node("n1", 8)]
    assert delays(applicant("head", 2), nodes, runs, [PodUse("n1", {GPU: 8})])


NODES = st.lists(st.sampled_from([2, 4, 8]), min_size=4, max_size=4).map(
    lambda sizes: [
        node(f"n{index}", gpus, pool="even" if index % 2 == 0 else "odd") for index, gpus in enumerate(sizes)
    ]
)


@settings(max_examples=400, deadline=None)
@given(nodes=NODES, holdings=HOLDINGS, waiting=WAITING, selected=st.booleans())
def test_what_starts_fits_and_never_delays_the_head(
    nodes: list[NodeCapacity], holdings: list[Holding], waiting: list[Applicant], selected: bool
) -> None:
    if selected and waiting:
        waiting[0] = replace(waiting[0], gang=replace(waiting[0].gang, node_selector={"pool": "even"}))
    turns = decide(waiting, nodes, holdings)
    by_name = {found.name: found for found in waiting}
    assert [turn.position for turn in turns.values()] == list(range(1, len(waiting) + 1))
    room, runs, head = tuple(nodes), list(holdings), None
    for name, turn in turns.items():
        found = by_name[name]
        if turn.nodes is None:
            if fits(found, room):
                assert turn.kept_for, "who waits beside free room is told for which job it is kept"
                assert head is not None
            elif head is None and fits(found, after(room, (use for held in runs for use in held.uses), 1)):
                head = found
            continue
        uses = [PodUse(place_, found.gang.requests) for place_ in turn.nodes]
        assert len(uses) == found.gang.size
        assert head is None or not really_delays(head, room, runs, uses)
        room = after(room, uses, -1)
        assert all(amount >= 0 for left in room for amount in left.free.values())
        runs.append(Holding(namespace=found.namespace, uses=tuple(uses)))


@settings(max_examples=100, deadline=None)
@given(waiting=WAITING, nodes=NODES, ends=st.lists(st.integers(0, 6), min_size=8, max_size=8))
def test_every_gang_that_fits_starts_in_whatever_order_runs_end(
    waiting: list[Applicant], nodes: list[NodeCapacity], ends: list[int]
) -> None:
    hopeless = {found.name for found in waiting if not fits(found, nodes)}
    room, runs, left = tuple(nodes), list[Holding](), list(waiting)
    for number in range(len(waiting) + 1):
        turns = decide(left, room, runs)
        for found in list(left):
            chosen = turns[found.name].nodes
            if chosen is not None:
                uses = tuple(PodUse(name, found.gang.requests) for name in chosen)
                room = after(room, uses, -1)
                runs.append(Holding(namespace=found.namespace, uses=uses))
                left.remove(found)
        assert not runs or number < len(waiting) or {found.name for found in left} == hopeless
        if runs:
            ended = runs.pop(ends[number % len(ends)] % len(runs))
            room = after(room, ended.uses, 1)
        else:
            break
    assert {found.name for found in left} == hopeless


def test_gangs_far_behind_wait_without_a_trial_and_their_place_is_rounded() -> None:
    waiting = [applicant(f"j{index:04}", 2) for index in range(LOOK_AHEAD + 37)]
    turns = decide(waiting, [node("n0", 8)], [])
    assert all(turn.nodes is None for turn in turns.values())
    assert turns["j0019"].line == "Queued 20 of about 130"
    assert turns[f"j{LOOK_AHEAD + 36:04}"].line == "Queued about 130 of about 130"
