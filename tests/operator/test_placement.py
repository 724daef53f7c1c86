"""Placement of gangs: against every assignment on small clusters, and the lines that say what is missing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.job_gang import gang_of_rendering
from stoker.operator.domain.placement.node_capacity import (
    HOSTNAME,
    NodeCapacity,
    affinity_to,
    empty_node,
    pinned_node,
    pod_use,
    remaining,
)
from stoker.operator.domain.placement.place import Placement, UsableNodes, _shares, place
from stoker.operator.domain.placement.unplaceable import Unplaceable
from stoker.pod.resources.pod_requests import pod_requests
from stoker.pod.resources.quantity import amount
from stoker.trainer.protocol.parallel_dims import ParallelDims

GPU = "nvidia.com/gpu"
CLIQUE, RACK, ZONE = "nvidia.com/gpu.clique", "rack", "zone"


def node(name: str, gpus: int, **labels: str) -> NodeCapacity:
    free = {GPU: gpus, "pods": 100}
    return NodeCapacity(name=name, free=free, labels={"kubernetes.io/hostname": name, **labels})


def gang(parts: int = 1, stages: int = 1, replicas: int = 1, gpus: int = 1, **fields: Any) -> Gang:
    return Gang(requests={GPU: gpus}, parts=parts, stages=stages, replicas=replicas, **fields)


def units(wanted: Gang, nodes: Sequence[str], level: int) -> Iterator[list[str]]:
    """The nodes of each tensor group (0), model replica (1) or of the gang (2)."""
    chosen = [nodes[pod] for pod in wanted.pods_by_replica()]
    size = (wanted.parts, wanted.parts * wanted.stages, wanted.size)[level]
    yield from (chosen[start : start + size] for start in range(0, len(chosen), size))


def num_broken(wanted: Gang, nodes: Sequence[str], level: int, labels: Mapping[str, str | None]) -> int:
    domains = [{labels[name] for name in unit} for unit in units(wanted, nodes, level)]
    return sum(len(found) > 1 or None in found for found in domains)


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeCapacity]:
    count = draw(st.integers(1, 5))
    label = st.sampled_from(["a", "b", None])
    nodes = []
    for index in range(count):
        drawn = {key: draw(label) for key in (CLIQUE, RACK, ZONE)}
        labels = {key: value for key, value in drawn.items() if value is not None}
        nodes.append(node(f"n{index}", draw(st.integers(0, 3)), **labels))
    return nodes


@st.composite
def gangs(draw: st.DrawFn) -> Gang:
    shapes = [shape for shape in itertools.product((1, 2, 3), repeat=3) if shape[0] * shape[1] * shape[2] <= 6]
    return gang(*draw(st.sampled_from(shapes)))


def levels_of(modes: Sequence[str | None]) -> list[Level]:
    keys = (CLIQUE, RACK, ZONE)
    return [Level(key, mode) for key, mode in zip(keys, modes, strict=True) if mode]  # type: ignore[arg-type]


def every_assignment(wanted: Gang, nodes: Sequence[NodeCapacity]) -> Iterator[tuple[str, ...]]:
    for names in itertools.product([found.name for found in nodes], repeat=wanted.size):
        used = Counter(names)
        if all(used[found.name] <= found.free[GPU] for found in nodes):
            yield names


@settings(max_examples=150, deadline=None)
@given(clusters(), gangs(), st.lists(st.sampled_from(["Required", "Preferred"]), max_size=3))
def test_a_gang_is_placed_exactly_when_some_assignment_keeps_every_required_level(
    nodes: list[NodeCapacity], wanted: Gang, modes: list[str]
) -> None:
    levels = levels_of([*modes, *([None] * (3 - len(modes)))])
    by_level = [{found.name: found.labels.get(level.key) for found in nodes} for level in levels]

    def keeps(names: Sequence[str], mode: str) -> bool:
        return all(
            num_broken(wanted, names, index, labels) == 0
            for index, (level, labels) in enumerate(zip(levels, by_level, strict=True))
            if mode == "all" or level.mode == mode
        )

    found = place(wanted, nodes, levels)
    possible = [names for names in every_assignment(wanted, nodes) if keeps(names, "Required")]
    assert isinstance(found, Placement) == bool(possible)
    if isinstance(found, Unplaceable):
        assert found.message
        return
    assert all(
        count <= next(item.free[GPU] for item in nodes if item.name == name)
        for name, count in Counter(found.nodes).items()
    )
    assert keeps(found.nodes, "Required")
    assert (found.relaxed == ()) == keeps(found.nodes, "all")
    assert set(found.relaxed) <= {level.key for level in levels if level.mode == "Preferred"}


@settings(max_examples=100, deadline=None)
@given(clusters(), gangs(), st.data())
def test_nodes_that_are_read_again_where_room_changed_give_the_placement_of_a_fresh_reading(
    nodes: list[NodeCapacity], wanted: Gang, data: st.DataObject
) -> None:
    levels = levels_of(data.draw(st.lists(st.sampled_from(["Required", "Preferred", None]), min_size=3, max_size=3)))
    avoid = data.draw(st.sampled_from([(), ("n0",)]))
    now = {found.name: found for found in nodes}
    usable = UsableNodes(wanted, nodes, levels, avoid)
    for _ in range(data.draw(st.integers(0, 4))):
        changed = data.draw(st.sampled_from(sorted(now)))
        now[changed] = replace(now[changed], free={GPU: data.draw(st.integers(0, 3)), "pods": 100})
        usable.update(now[changed])
        found = place(wanted, [*now.values()], levels, avoid)
        assert usable.place() == (found if isinstance(found, Placement) else None)


@settings(max_examples=150, deadline=None)
@given(clusters(), gangs(), st.lists(st.sampled_from(["Required", "Preferred", None]), min_size=3, max_size=3))
def test_nodes_under_their_own_names_are_placed_as_domains_of_one_node_are(
    nodes: list[NodeCapacity], wanted: Gang, modes: list[str | None]
) -> None:
    """Nodes with other names in the label take the long way."""
    other = [replace(found, labels={**found.labels, HOSTNAME: f"host-{found.name}"}) for found in nodes]
    found, slow = (place(wanted, given_, levels_of(modes)) for given_ in (nodes, other))
    assert isinstance(found, Placement) == isinstance(slow, Placement)
    assert not isinstance(found, Placement) or found == slow


def naive_shares(rooms: Mapping[str, int], sizes: Mapping[str, int], units: int) -> dict[str, int]:
    """The smallest domain that holds the rest, else the largest next, by sorting anew each time."""
    left, shares = dict(rooms), dict[str, int]()
    while units and (some := sorted((room, sizes[name], name) for name, room in left.items() if room)):
        room, _, name = next((one for one in some if one[0] >= units), some[-1])
        shares[name] = min(units, left.pop(name))
        units -= shares[name]
        assert room
    return shares


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=6), st.integers(0, 12))
def test_shares_take_the_smallest_domain_that_holds_the_rest(drawn: list[tuple[int, int]], units: int) -> None:
    rooms = {f"d{index}": room for index, (room, _) in enumerate(drawn)}
    sizes = {f"d{index}": size for index, (_, size) in enumerate(drawn)}
    assert list(_shares(rooms, sizes, units).items()) == list(naive_shares(rooms, sizes, units).items())


@settings(max_examples=100, deadline=None)
@given(clusters(), gangs())
def test_a_step_without_a_label_is_one_domain_of_all_nodes(nodes: list[NodeCapacity], wanted: Gang) -> None:
    """Steps without a label are skipped; a label that all nodes have alike takes the long way."""
    alike = [replace(found, labels={**found.labels, "all": "x"}) for found in nodes]
    levels = [Level("all", "Preferred")] * 3
    assert getattr(place(wanted, nodes), "nodes", None) == getattr(place(wanted, alike, levels), "nodes", None)


@settings(max_examples=100, deadline=None)
@given(clusters(), gangs(), st.integers(0, 2))
def test_a_single_preferred_level_is_kept_wherever_that_is_possible(
    nodes: list[NodeCapacity], wanted: Gang, index: int
) -> None:
    keys = ("none0", "none1", "none2")
    levels = [Level(key, "Preferred") for key in keys[:index]] + [Level(CLIQUE, "Preferred")]
    found = place(wanted, nodes, levels)
    labels = {item.name: item.labels.get(CLIQUE) for item in nodes}
    kept = any(num_broken(wanted, names, index, labels) == 0 for names in every_assignment(wanted, nodes))
    if isinstance(found, Placement):
        assert (CLIQUE not in found.relaxed) == kept


# What a pod takes, and what keeps it from a node

DEVICES = "devices of big"
TAINTS = [
    {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
    {"key": "gpu", "value": "no", "effect": "NoExecute"},
    {"key": "old", "effect": "PreferNoSchedule"},
]
TOLERATIONS = st.sampled_from([
    (), ({"operator": "Exists"},), ({"key": "gpu", "operator": "Exists"},), ({"key": "gpu", "value": "yes"},),
    ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"},),
])  # fmt: skip


@st.composite
def mixed_nodes(draw: st.DrawFn) -> list[NodeCapacity]:
    """Nodes of several resources, some tainted, cordoned or outside of a pool."""
    return [
        NodeCapacity(
            name=f"n{index}",
            free={name: draw(st.integers(-1, 4)) for name in draw(st.sets(st.sampled_from([GPU, "cpu", DEVICES])))}
            | {"pods": draw(st.integers(0, 4))},
            labels={RACK: draw(st.sampled_from("ab")), "pool": draw(st.sampled_from("xy"))},
            taints=tuple(draw(st.lists(st.sampled_from(TAINTS), max_size=2))),
            schedulable=draw(st.integers(0, 5)) > 0,
        )
        for index in range(draw(st.integers(1, 4)))
    ]


def may_run(found: NodeCapacity, wanted: Gang) -> bool:
    """Whether the scheduler's filters let pods of the gang onto a node, whatever is free."""

    def tolerated(taint: Mapping[str, str]) -> bool:
        return any(
            one.get("key") in (None, taint["key"])
            and (one.get("operator") == "Exists" or one.get("value", "") == taint.get("value", ""))
            and one.get("effect") in (None, taint["effect"])
            for one in wanted.tolerations
        )

    hard = [taint for taint in found.taints if taint["effect"] != "PreferNoSchedule"]
    selected = all(found.labels.get(key) == value for key, value in wanted.node_selector.items())
    return found.schedulable and selected and all(map(tolerated, hard))


@settings(max_examples=80, deadline=None)
@given(
    mixed_nodes(),
    st.sampled_from([(1, 1, 1), (1, 1, 3), (2, 1, 2), (1, 2, 2)]),
    st.dictionaries(st.sampled_from([GPU, "cpu", DEVICES]), st.integers(0, 2)),
    TOLERATIONS,
    st.sampled_from([{}, {"pool": "x"}]),
    st.lists(st.sampled_from(["Required", "Preferred"]), max_size=3),
    st.sampled_from([(), ("n0",)]),
)
def test_taints_selectors_devices_and_every_resource_decide_as_some_assignment_does(
    nodes: list[NodeCapacity],
    shape: tuple[int, int, int],
    requests: dict[str, int],
    tolerations: tuple[dict[str, str], ...],
    selector: dict[str, str],
    modes: list[str],
    avoid: tuple[str, ...],
) -> None:
    parts, stages, replicas = shape
    wanted = Gang(
        requests=requests,
        parts=parts,
        stages=stages,
        replicas=replicas,
        tolerations=tolerations,
        node_selector=selector,
    )
    levels = [Level(RACK, mode) for mode in modes]  # type: ignore[arg-type]
    by_name = {found.name: found for found in nodes}
    racks = {found.name: found.labels[RACK] for found in nodes}

    def holds(names: Sequence[str]) -> bool:
        return all(
            name not in avoid
            and may_run(by_name[name], wanted)
            and all(
                by_name[name].free.get(resource, 0) >= need * count
                for resource, need in {**requests, "pods": 1}.items()
                if need
            )
            for name, count in Counter(names).items()
        ) and not any(
            num_broken(wanted, names, index, racks) for index, level in enumerate(levels) if level.mode == "Required"
        )

    found = place(wanted, nodes, levels, avoid)
    if isinstance(found, Placement):
        assert holds(found.nodes)
        return
    assert not any(map(holds, itertools.product(by_name, repeat=wanted.size)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 5))
def test_a_gang_takes_the_fewest_nodes_and_where_one_is_enough_the_fullest(rooms: list[int], pods: int) -> None:
    """What stays free stays whole."""
    nodes = [node(f"n{index}", room) for index, room in enumerate(rooms)]
    found = place(gang(replicas=pods), nodes)
    sets = [
        chosen
        for size in range(1, len(rooms) + 1)
        for chosen in itertools.combinations(range(len(rooms)), size)
        if sum(rooms[index] for index in chosen) >= pods
    ]
    if isinstance(found, Unplaceable):
        assert not sets
        return
    fewest = min(map(len, sets))
    assert len(set(found.nodes)) == fewest
    if fewest == 1:
        assert rooms[int(found.nodes[0][1:])] == min(room for room in rooms if room >= pods)


def test_units_stay_together_and_whole_nodes_stay_free() -> None:
    nodes = [node(f"n{index}", 8, rack=f"r{index // 2}", zone="z") for index in range(4)]
    busy = node("busy", 2, rack="r0", zone="z")
    found = place(gang(parts=1, stages=2, replicas=1), [*nodes[:2], busy], [Level(RACK), Level(RACK)])
    assert found == Placement(("busy", "busy")), "the fullest node first"
    pair = place(gang(parts=2, stages=2, replicas=2, gpus=4), nodes, [Level("kubernetes.io/hostname"), Level(RACK)])
    assert isinstance(pair, Placement)
    assert [len({*unit}) for unit in units(gang(2, 2, 2), pair.nodes, 0)] == [1, 1, 1, 1]
    assert {name[1:] for name in pair.nodes} in ({"0", "1", "2", "3"}, {"0", "1", "2"})


def test_pods_are_numbered_with_the_stage_outermost() -> None:
    nodes = [node("n0", 2, rack="a"), node("n1", 2, rack="b")]
    found = place(gang(parts=1, stages=2, replicas=2), nodes, [Level(RACK, "Preferred"), Level(RACK)])
    assert isinstance(found, Placement)
    assert found.nodes[0] == found.nodes[2], "pods 0 and 2 are the stages of the first replica"
    assert found.nodes[1] == found.nodes[3]
    assert found.nodes[0] != found.nodes[1]


@pytest.mark.parametrize(
    ("grid", "shape"),
    [
        ({"pipeline": 1, "data": 4, "inner": 8, "ranks_per_pod": 8}, (1, 1, 4)),
        ({"pipeline": 4, "data": 2, "inner": 8, "ranks_per_pod": 8}, (1, 4, 2)),
        ({"pipeline": 2, "data": 2, "inner": 16, "ranks_per_pod": 8}, (2, 2, 2)),
        ({"pipeline": 2, "data": 8, "inner": 2, "ranks_per_pod": 8}, (1, 2, 2)),
        ({"pipeline": 4, "data": 2, "inner": 2, "ranks_per_pod": 8}, (1, 2, 1)),
        ({"pipeline": 1, "data": 1, "inner": 6, "ranks_per_pod": 4}, (1, 1, 1)),
        ({"pipeline": 2, "data": 3, "inner": 2, "ranks_per_pod": 4}, (1, 1, 3)),
    ],
)
def test_the_gang_of_a_rank_grid(grid: dict[str, int], shape: tuple[int, int, int]) -> None:
    found = Gang.of_ranks(requests={}, **grid)
    assert (found.parts, found.stages, found.replicas) == shape


@pytest.mark.parametrize(
    ("sizes", "world", "ranks_per_pod", "shape"),
    [
        ({"expert": 8}, 32, 4, (2, 1, 4)),
        ({"tensor": 2, "expert": 8, "pipeline": 2}, 32, 4, (2, 2, 2)),
        ({"tensor": 8, "expert": 4}, 32, 4, (2, 1, 4)),
        ({"tensor": 2, "expert": 4, "context": 2}, 32, 4, (2, 1, 4)),
        ({"tensor": 4, "expert": 6}, 24, 4, (3, 1, 2)),
        ({"tensor": 2, "expert": 4, "replicate": 2}, 16, 4, (1, 1, 4)),
    ],
)
def test_the_narrowest_unit_holds_whole_groups_of_experts_as_the_trainer_lays_them(
    sizes: dict[str, int], world: int, ranks_per_pod: int, shape: tuple[int, int, int]
) -> None:
    config = {"parallelism": sizes, "gang": {"nodes": world // ranks_per_pod, "ranks_per_node": ranks_per_pod}}
    found = gang_of_rendering({"pod": {"spec": {"containers": []}}, "config": config})
    assert (found.parts, found.stages, found.replicas) == shape
    pods = list(found.pods_by_replica())
    unit_of = {pod: index // found.parts for index, pod in enumerate(pods)}
    inner = sizes.get("context", 1) * sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("replicate", 1)
    dims = ParallelDims(**sizes, shard=world // inner)
    for ranks in (*dims.expert_groups(), *dims.groups("context", "tensor")):
        assert len({unit_of[rank // ranks_per_pod] for rank in ranks}) == 1, ranks


def test_a_group_of_experts_without_room_is_named() -> None:
    config = {"parallelism": {"expert": 8}, "gang": {"nodes": 4, "ranks_per_node": 4}}
    spec = {"containers": [{"resources": {"limits": {GPU: "4"}}}]}
    wanted = gang_of_rendering({"pod": {"spec": spec}, "config": config})
    nodes = [node(f"n{index}", 4, **{CLIQUE: f"c{index}"}) for index in range(4)]
    assert place(wanted, nodes, [Level(CLIQUE)]) == Unplaceable(
        "TopologyUnsatisfied",
        "no nvidia.com/gpu.clique has room for the 2 pods of an expert group; the largest, c3, has room for 1",
    )


def test_what_is_missing_is_said_in_one_line() -> None:
    nodes = [node(f"n{index}", 5 if index else 0, rack=f"r{index // 2}") for index in range(4)]
    short = place(gang(replicas=8, gpus=4), nodes)
    assert short == Unplaceable("WaitingForGPUs", "3 of 8 pods fit on 4 nodes, nvidia.com/gpu: 15 free, 32 needed")
    rack = place(gang(stages=3, gpus=5), nodes, [Level(CLIQUE, "Preferred"), Level(RACK)])
    assert rack == Unplaceable(
        "TopologyUnsatisfied", "no rack has room for the 3 pods of a model replica; the largest, r1, has room for 2"
    )
    label = place(gang(stages=3, gpus=5), nodes, [Level(CLIQUE)])
    assert label == Unplaceable("TopologyUnsatisfied", "no usable node has the label nvidia.com/gpu.clique")
    both = place(gang(parts=2, replicas=2, gpus=5), nodes[:4], [Level(RACK)])
    assert both == Unplaceable("WaitingForGPUs", "3 of 4 pods fit on 4 nodes, nvidia.com/gpu: 15 free, 20 needed")
    even = place(gang(parts=2, replicas=2, gpus=5), [*nodes, node("n4", 5, rack="r2")], [Level(RACK)])
    assert even == Unplaceable("TopologyUnsatisfied", "not all 4 pods fit with each tensor group in one rack")


def test_room_in_pieces_and_room_for_no_more_pods_are_told_apart() -> None:
    pieces = place(gang(replicas=2, gpus=8), [node(f"n{index}", 6) for index in range(4)])
    assert pieces == Unplaceable(
        "WaitingForGPUs",
        "0 of 2 pods fit on 4 nodes, nvidia.com/gpu: 24 free, 16 needed, 8 of them on one node for each pod",
    )
    full = [NodeCapacity(name="n0", free={GPU: 8, "pods": 1}), NodeCapacity(name="n1", free={GPU: 8, "pods": 0})]
    assert place(gang(replicas=4, gpus=1), full) == Unplaceable(
        "WaitingForCapacity", "1 of 4 pods fit on 2 nodes, pods: 1 free, 4 needed"
    )


@pytest.mark.parametrize("modes", list(itertools.product(["Required", "Preferred"], repeat=3)), ids="-".join)
def test_every_combination_of_modes_names_the_narrowest_required_level_without_room(modes: tuple[str, ...]) -> None:
    """Each level alone has too little room in every domain; capacity is there."""
    keys = ("clique", "rack", "zone")
    nodes = [node(f"n{i}", 1, clique=f"c{i}", rack=f"r{i // 2}", zone=f"z{i // 4}") for i in range(8)]
    wanted = gang(parts=2, stages=2, replicas=2, gpus=1)
    found = place(wanted, nodes, [Level(key, mode) for key, mode in zip(keys, modes, strict=True)])  # type: ignore[arg-type]
    sizes = {
        "clique": (2, "a tensor group", "c7", 1),
        "rack": (4, "a model replica", "r3", 2),
        "zone": (8, "a gang", "z1", 4),
    }
    required = [key for key, mode in zip(keys, modes, strict=True) if mode == "Required"]
    if not required:
        assert isinstance(found, Placement)
        assert found.relaxed == keys
        return
    size, unit, largest, room = sizes[required[0]]
    text = f"no {required[0]} has room for the {size} pods of {unit}; the largest, {largest}, has room for {room}"
    assert found == Unplaceable("TopologyUnsatisfied", text)


def test_nodes_that_may_not_be_used_are_counted_by_reason() -> None:
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    nodes = [
        NodeCapacity(name="cordoned", free={GPU: 8, "pods": 9}, schedulable=False),
        NodeCapacity(name="tainted", free={GPU: 8, "pods": 9}, taints=(taint,)),
        NodeCapacity(name="full", free={GPU: 8, "pods": 0}),
        node("blamed", 8, pool="a"),
        NodeCapacity(name="kept", free={GPU: 8, "pods": 9}, labels={"pool": "a"}, taints=(taint,)),
        node("other", 8, pool="b"),
    ]
    alone = gang(node_selector={"pool": "a"}, tolerations=())
    found = place(alone, nodes, avoid={"blamed"})
    assert isinstance(found, Unplaceable)
    assert found.line == (
        "WaitingForCapacity: 0 of 1 pods fit on 0 nodes; not used: 1 avoided, 1 not ready or cordoned, "
        "3 outside of nodeSelector, 1 tainted gpu"
    )
    tolerant = gang(tolerations=[{"key": "gpu", "operator": "Exists"}])
    assert place(tolerant, nodes[:3]) == Placement(("tainted",))
    equal = gang(tolerations=[{"key": "gpu", "value": "yes", "effect": "NoSchedule"}])
    assert place(equal, nodes[:3]) == Placement(("tainted",))
    assert isinstance(place(gang(tolerations=[{"key": "gpu", "value": "no"}]), nodes[:3]), Unplaceable)


def raw_node(name: str, gpus: str = "8", **spec: Any) -> dict[str, Any]:
    status = {"allocatable": {GPU: gpus, "cpu": "4", "memory": "16Gi", "pods": "110"}, "conditions": READY}
    return {"metadata": {"name": name, "labels": {"zone": "z"}}, "spec": spec, "status": status}


READY = [{"type": "Ready", "status": "True"}]


def raw_pod(node_name: str | None, requests: Mapping[str, str], phase: str = "Running") -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [{"resources": {"requests": requests}}]}
    return {"spec": {**spec, **({"nodeName": node_name} if node_name else {})}, "status": {"phase": phase}}


def test_capacity_is_what_bound_and_pinned_pods_leave() -> None:
    pinned = raw_pod(None, {GPU: "2"}, "Pending")
    pinned["spec"]["affinity"] = affinity_to("n0")
    pods = [
        raw_pod("n0", {GPU: "3", "cpu": "500m", "memory": "1Gi"}),
        raw_pod("n0", {GPU: "1"}, "Succeeded"),
        raw_pod(None, {GPU: "1"}, "Pending"),
        pinned,
    ]
    uses = [use for pod in pods if (use := pod_use(pod))]
    first, second = remaining(map(empty_node, [raw_node("n1", unschedulable=True), raw_node("n0")]), uses)
    assert first.name == "n0"
    assert first.free == {GPU: 3, "cpu": 3500, "memory": 15 * 2**30, "pods": 108}
    assert first.schedulable
    assert not second.schedulable
    assert first.labels == {"kubernetes.io/hostname": "n0", "zone": "z"}


_AMOUNTS = st.dictionaries(st.sampled_from(("cpu", "memory", "hugepages-2Mi", GPU)), st.integers(0, 9), max_size=4)


@given(_AMOUNTS, _AMOUNTS, _AMOUNTS)
def test_resources_of_the_pod_itself_count_in_place_of_those_of_its_containers(
    container: dict[str, int], requests: dict[str, int], limits: dict[str, int]
) -> None:
    def wire(found: dict[str, int]) -> dict[str, str]:
        return {name: str(amount) for name, amount in found.items()}

    containers = [{"resources": {"requests": wire(container)}}]
    found = pod_requests({"containers": containers, "resources": {"requests": wire(requests), "limits": wire(limits)}})
    for name in {*container, *requests, *limits}:
        scale = 1000 if name == "cpu" else 1
        named = (container,) if name == GPU else (requests, container, limits)
        assert found.get(name, 0) == scale * next((one[name] for one in named if name in one), 0), name


def test_requests_of_a_pod_are_what_the_scheduler_reserves() -> None:
    spec: dict[str, Any] = {
        "initContainers": [
            {"resources": {"requests": {"cpu": "3"}}},
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "250m"}}},
        ],
        "containers": [
            {"resources": {"limits": {GPU: "1", "cpu": "1"}}},
            {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}},
        ],
        "overhead": {"cpu": "100m"},
    }
    assert pod_requests(spec) == {"cpu": 3100, GPU: 1}
    spec["initContainers"].reverse()
    assert pod_requests(spec) == {"cpu": 3350, GPU: 1}, "a sidecar runs beside the init containers after it"


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=4),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_requests_are_the_most_that_containers_take_at_once(first: list[tuple[int, bool]], then: list[int]) -> None:
    def container(gpus: int, **fields: str) -> dict[str, Any]:
        return {"resources": {"limits": {GPU: str(gpus)}}, **fields}

    spec = {
        "initContainers": [container(gpus, **({"restartPolicy": "Always"} if stays else {})) for gpus, stays in first],
        "containers": [container(gpus) for gpus in then],
    }
    stays = [sum(gpus for gpus, stays in first[:index] if stays) for index in range(len(first) + 1)]
    moments = [beside + gpus for beside, (gpus, _) in zip(stays, first, strict=False)] + [stays[-1] + sum(then)]
    assert pod_requests(spec)[GPU] == max(moments)


@pytest.mark.parametrize(
    ("resource", "quantity", "wanted"),
    [
        ("cpu", "500m", 500),
        ("cpu", 2, 2000),
        ("memory", "16Gi", 16 * 2**30),
        ("memory", "1.5G", 1_500_000_000),
        ("memory", "1e3", 1000),
        (GPU, "8", 8),
        ("memory", "100m", 1),
        ("cpu", "1u", 1),
    ],
)
def test_amounts_of_quantities(resource: str, quantity: str | int, wanted: int) -> None:
    assert amount(resource, quantity) == wanted


@pytest.mark.parametrize("quantity", ["", "x", "1Zi", "Gi", "--1"])
def test_no_quantity_is_refused_by_name(quantity: str) -> None:
    with pytest.raises(ValueError, match=r"memory: .* is no quantity"):
        amount("memory", quantity)


def test_a_gang_of_496_pods_on_a_thousand_nodes_keeps_racks_and_zones() -> None:
    nodes = [node(f"n{index}", 8, rack=f"r{index // 16}", zone=f"z{index // 512}") for index in range(1000)]
    wanted = gang(parts=2, stages=4, replicas=62, gpus=8)
    found = place(wanted, nodes, [Level("kubernetes.io/hostname", "Preferred"), Level(RACK), Level(ZONE)])
    assert isinstance(found, Placement)
    assert len(set(found.nodes)) == 496
    for level, key in ((1, RACK), (2, ZONE)):
        labels = {item.name: item.labels.get(key) for item in nodes}
        assert num_broken(wanted, found.nodes, level, labels) == 0


def test_a_pin_is_added_to_every_term_of_the_users_affinity() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    other = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term, other]}}
    own = {"nodeAffinity": {**required, "preferredDuringSchedulingIgnoredDuringExecution": []}, "podAffinity": {"x": 1}}
    pod = {"spec": {"affinity": own}}
    assert pinned_node(pod) is None
    pinned = affinity_to("n7", own)
    assert pinned_node({"spec": {"affinity": pinned}}) == "n7"
    terms = pinned["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [found["matchExpressions"] for found in terms] == [term["matchExpressions"], other["matchExpressions"]]
    assert pinned["podAffinity"] == {"x": 1}
    assert pinned_node({"spec": {"affinity": affinity_to("n1")}}) == "n1"
