"""Gates and nodes of replicas: all pods of one get theirs at once, or the pool says what is missing."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.operator.domain.placement.gang import Level
from stoker.operator.domain.placement.node_capacity import empty_node, pinned_node, pod_use, remaining
from stoker.operator.domain.placement.place import place
from stoker.operator.domain.placement.replica_gang import gang_of_replica
from stoker.operator.domain.placement.unplaceable import Unplaceable
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import is_gated
from stoker.operator.domain.settings import Settings
from testing.operator.ready_node import GPU, ready_node
from testing.operator.serving_world import CHAT, POOL, Serving, condition_of, disturb, label_of
from testing.operator.simulated_cluster import Crash

READY = [{"type": "Ready", "status": "True"}]
RACKS = {"topology": [{"key": "rack", "mode": "Required"}]}
WIDE: dict[str, Any] = {"name": "main", "podsPerReplica": 2, "gpusPerPod": 4, "parallelism": {"tensor": 8}}


def raw_node(name: str, gpus: int, rack: str = "r0") -> Object:
    return ready_node(name, gpus, rack=rack)


def world(*nodes: Object, places: bool = True, pools: list[dict[str, Any]] | None = None, **pool: Any) -> Serving:
    serving = Serving(model={"uri": "file:///m"}, pools=pools or [{**WIDE, "replicas": 1, **pool}])
    serving.cluster.settings = Settings(places_gangs=places)
    for node in nodes:
        serving.cluster.add(node)
    return serving


def nodes_by_replica(serving: Serving) -> dict[str, list[str | None]]:
    found: dict[str, list[str | None]] = {}
    for pod in serving.engines():
        found.setdefault(pod["metadata"]["labels"].get("stoker.dev/replica", pod["metadata"]["name"]), []).append(
            pinned_node(pod)
        )
    return found


def test_replicas_get_all_their_nodes_each_inside_of_a_rack() -> None:
    racks = {"n0": "r0", "n1": "r1", "n2": "r0", "n3": "r1"}
    nodes = [raw_node(name, 4, rack) for name, rack in racks.items()]
    serving = world(*nodes, replicas=2, scheduling=RACKS)
    serving.rest(8)
    placed = nodes_by_replica(serving)
    assert sorted(node for names in placed.values() for node in map(str, names)) == sorted(racks)
    assert [len({racks[str(node)] for node in names}) for names in placed.values()] == [1, 1]
    assert serving.status["ready"] == "2/2"
    assert serving.cluster.plan(POOL).empty


def test_a_replica_without_room_keeps_every_gate_names_what_is_missing_and_starts_when_there_is_room() -> None:
    serving = world(raw_node("n0", 4), raw_node("n1", 4, "r1"), scheduling=RACKS)
    serving.rest(4)
    assert list(nodes_by_replica(serving).values()) == [[None, None]]
    missing = "TopologyUnsatisfied: no rack has room for the 2 pods of a tensor group; the largest, r1, has room for 1"
    assert serving.pool_status["message"] == f"0 of 1 replicas are ready: {missing}"
    assert missing in serving.status["message"]
    serving.cluster.add(raw_node("n2", 4, "r1"))
    serving.rest(6)
    assert [sorted(map(str, names)) for names in nodes_by_replica(serving).values()] == [["n1", "n2"]]
    assert serving.status["ready"] == "1/1"


def test_a_preferred_level_that_does_not_hold_is_told() -> None:
    preferred = {"topology": [{"key": "rack"}]}
    serving = world(raw_node("n0", 4), raw_node("n1", 4, "r1"), scheduling=preferred)
    serving.cluster.settle_once()
    while not condition_of(serving.pool_status, "TopologyRelaxed"):
        serving.cluster.settle_once()
    assert condition_of(serving.pool_status, "TopologyRelaxed")["message"].endswith("for every pod: rack")


def test_a_replica_whose_room_was_taken_is_placed_anew() -> None:
    serving = world(raw_node("n0", 4), raw_node("n1", 4))
    while not serving.engines() or any(map(is_gated, serving.engines())):
        serving.cluster.settle_once()
    first = {pod["metadata"]["uid"] for pod in serving.engines()}
    serving.cluster.run(serving.engines()[0], ready=False)
    serving.cluster.advance(59)
    serving.cluster.settle_once()
    assert {pod["metadata"]["uid"] for pod in serving.engines()} == first
    serving.cluster.advance(2)
    serving.cluster.settle_once()
    assert "GangTimeout" in serving.cluster.events
    serving.cluster.collect()
    serving.rest(6)
    assert not first & {pod["metadata"]["uid"] for pod in serving.engines()}
    assert serving.status["ready"] == "1/1"


def test_without_a_view_of_nodes_nothing_is_gated_and_the_wish_is_told() -> None:
    serving = world(places=False, scheduling=RACKS)
    serving.rest(6)
    assert serving.status["ready"] == "1/1"
    assert condition_of(serving.pool_status, "PlacementLimited")["reason"] == "NoNodes"
    for pod in serving.engines():
        unit = {"stoker.dev/replica": label_of(pod, "replica"), "stoker.dev/tensor-group": "0"}
        term = {"labelSelector": {"matchLabels": unit}, "topologyKey": "rack"}
        assert pod["spec"]["affinity"]["podAffinity"] == {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        assert unit.items() <= pod["metadata"]["labels"].items()


def test_pools_of_prefill_and_decode_are_placed_by_the_same_function() -> None:
    pools = [{"name": name, "role": name, "scheduling": RACKS} for name in ("prefill", "decode")]
    serving = world(raw_node("n0", 0), pools=pools)
    serving.cluster.objects[next(key for key in serving.cluster.objects if key.kind == "Node")]["metadata"][
        "labels"
    ] = {}
    serving.rest(4)
    assert set(nodes_by_replica(serving)) == {pod["metadata"]["name"] for pod in serving.engines()}
    assert all(map(is_gated, serving.engines())), "the only node is in no rack"
    assert "no usable node has the label rack" in serving.status["message"]
    serving.cluster.add(raw_node("n1", 0))
    serving.rest(8)
    assert list(nodes_by_replica(serving).values()) == [["n1"], ["n1"]]
    assert serving.status["ready"] == "2/2"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["pool", "pool", "deployment", "run", "collect", "kill engine", "vanish", "scale", "node", "lose node"]
        ),
        st.integers(0, 6),
    ),
    max_size=25,
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS, required=st.booleans())
def test_in_any_order_no_replica_is_placed_in_part_and_no_node_holds_too_much(
    events: list[tuple[str, int]], required: bool
) -> None:
    scheduling = RACKS if required else {}
    serving = world(raw_node("n0", 4), raw_node("n1", 4), replicas=2, scheduling=scheduling)
    for event, number in events:
        if event == "node":
            serving.cluster.add(raw_node(f"n{number}", 4 * (1 + number % 2), f"r{number % 3}"))
        elif event == "lose node":
            serving.cluster.vanish_node(f"n{number}")
        else:
            disturb(serving, event, number)
        check_room(serving)
    for _ in range(3):
        serving.cluster.advance(600)
        serving.rest(6)
    check_room(serving)
    check_rest(serving, required=required)


def check_room(serving: Serving) -> None:
    """No node has more pods of ours than it can hold."""
    held = Counter(use.node for pod in serving.engines() if (use := pod_use(pod)) is not None)
    present = {node["metadata"]["name"]: int(node["status"]["allocatable"][GPU]) // 4 for node in nodes_of(serving)}
    assert all(count <= present[name] for name, count in held.items() if name in present)


def check_rest(serving: Serving, *, required: bool) -> None:
    """At rest every replica has all its nodes, in one rack where that is required, or there is no room for it."""
    racks = {node["metadata"]["name"]: node["metadata"]["labels"]["rack"] for node in nodes_of(serving)}
    waiting = 0
    for names in nodes_by_replica(serving).values():
        assert len(names) == 2
        assert None not in names or set(names) == {None}
        waiting += None in names
        known = {racks[node] for node in names if node in racks}
        assert not required or len(known) <= 1
    wanted = serving.cluster.objects[CHAT]["spec"]["pools"][0]["replicas"]
    assert len(nodes_by_replica(serving)) == wanted
    if waiting:
        gated = next(pod for pod in serving.engines() if is_gated(pod))
        free = remaining(map(empty_node, nodes_of(serving)), filter(None, map(pod_use, serving.engines())))
        levels = [Level("rack")] if required else []
        assert isinstance(place(gang_of_replica(gated, 2, {"parallelism": {"tensor": 8}}), free, levels), Unplaceable)


def nodes_of(serving: Serving) -> list[Object]:
    return serving.cluster.of_kind("Node")


def test_stages_of_a_replica_may_lie_in_racks_of_their_own() -> None:
    """The narrowest level keeps a tensor group together, not its pipeline."""
    racks = {"n0": "r0", "n1": "r1", "n2": "r0", "n3": "r1"}
    nodes = [raw_node(name, 4, rack) for name, rack in racks.items()]
    serving = world(*nodes, podsPerReplica=4, parallelism={"tensor": 8, "pipeline": 2}, scheduling=RACKS)
    serving.rest(8)
    ((*names,),) = nodes_by_replica(serving).values()
    assert [len({racks[str(node)] for node in stage}) for stage in (names[:2], names[2:])] == [1, 1]
    assert sorted(map(str, names)) == sorted(racks)


@pytest.mark.parametrize("writes", range(6, 14))
def test_a_placement_that_was_cut_short_is_completed(writes: int) -> None:
    serving = world(raw_node("n0", 4), raw_node("n1", 4))
    for _ in range(4):
        with contextlib.suppress(Crash):
            serving.cluster.reconcile(CHAT)
            serving.cluster.reconcile(POOL, crash_after=writes)
    serving.rest(6)
    assert [sorted(map(str, names)) for names in nodes_by_replica(serving).values()] == [["n0", "n1"]]
    assert all(label_of(pod, "replica-pods") == "2" for pod in serving.engines())


def test_an_operator_killed_between_the_pods_of_a_replica_makes_the_other_and_keeps_the_first() -> None:
    """It dies after each of its writes, until one pod of two exists; that one takes no node and is not ready alone."""
    serving = world(raw_node("n0", 4), raw_node("n1", 4))
    for _ in range(20):
        with contextlib.suppress(Crash):
            serving.cluster.reconcile(CHAT)
        with contextlib.suppress(Crash):
            serving.cluster.reconcile(POOL, crash_after=1)
        if serving.engines():
            break
    (first,) = serving.engines()
    assert is_gated(first)
    assert pinned_node(first) is None
    serving.rest(6)
    assert first["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in serving.engines()}
    assert [sorted(map(str, names)) for names in nodes_by_replica(serving).values()] == [["n0", "n1"]]
    assert serving.status["ready"] == "1/1"
