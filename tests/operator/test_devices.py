"""Devices of claims: counted against every assignment, and said to be uncounted where they are not understood."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.placement.device_catalog import NOT_SEEN, needs_of
from stoker.operator.domain.placement.device_claim import requests_of_template
from stoker.operator.domain.placement.device_selector import DeviceSelectors
from stoker.operator.domain.placement.gang import Gang
from stoker.operator.domain.placement.node_capacity import NodeCapacity, PodUse, affinity_to, empty_node, remaining
from stoker.operator.domain.placement.place import Placement, place
from stoker.operator.domain.placement.unplaceable import Unplaceable
from stoker.operator.domain.plan import Key, Object, Patch, Ref
from stoker.operator.loop.capacity_watch import CapacityWatch
from stoker.pod.resources.device import DeviceId, read_slice, usable_devices
from testing.operator.devices import DRIVER, cel, claim, device, device_class, request, resource_slice, template

READY = [{"type": "Ready", "status": "True"}]
ANY = f"device.driver == '{DRIVER}'"
BIG, FAST = (f"device.attributes['{DRIVER}'].{name}" for name in ("big", "fast"))


def node(name: str, pods: int = 100) -> Object:
    status = {"allocatable": {"pods": str(pods), "cpu": "64"}, "conditions": READY}
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1"}
    return {"kind": "Node", "metadata": metadata, "spec": {}, "status": status}


def pod_spec(*templates: str, claims: Sequence[str] = ()) -> dict[str, Any]:
    entries = [{"name": f"c{number}", "resourceClaimTemplateName": name} for number, name in enumerate(templates)]
    named = [{"name": f"n{number}", "resourceClaimName": name} for number, name in enumerate(claims)]
    return {"containers": [], "resourceClaims": [*entries, *named]}


def pod(name: str, spec: Mapping[str, Any], where: str | None = None) -> Object:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "1"}
    placed = {"nodeName": where} if where else {}
    return {"kind": "Pod", "metadata": metadata, "spec": {**spec, **placed}, "status": {"phase": "Pending"}}


def watch_of(*objects: Object) -> CapacityWatch:
    watch = CapacityWatch(lambda: None)
    watch.devices.seen = lambda: True
    for found in objects:
        (watch if found["kind"] in ("Node", "Pod") else watch.devices).put(found)
    return watch


def gang_of(watch: CapacityWatch, spec: Mapping[str, Any], size: int = 1) -> Gang:
    return Gang(requests=watch.needs("default", spec), replicas=size)


def slots(watch: CapacityWatch, spec: Mapping[str, Any]) -> dict[str, int]:
    gang = gang_of(watch, spec)
    return {found.name: found.slots(gang) for found in watch.nodes()}


# How many fit, against every assignment

GPUS = [
    device_class("any", ANY),
    device_class("big", ANY, BIG),
    device_class("fast", ANY, FAST),
]


def assignments(free: Sequence[frozenset[str]], pods: int, wanted: Sequence[tuple[str, int]]) -> bool:
    """Whether every request of every pod gets its devices; `free` are the classes of each free device."""
    needs = [class_name for _ in range(pods) for class_name, count in wanted for _ in range(count)]
    return len(needs) <= len(free) and any(
        all(need in classes for need, classes in zip(needs, chosen, strict=True))
        for chosen in itertools.permutations(free, len(needs))
    )


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=5),
    st.lists(st.tuples(st.sampled_from(["any", "big", "fast"]), st.integers(1, 2)), min_size=1, max_size=3),
    st.booleans(),
)
def test_as_many_pods_fit_as_some_assignment_of_devices_allows(
    drawn: list[tuple[bool, bool, bool]], wanted: list[tuple[str, int]], split: bool
) -> None:
    devices = [device(f"d{index}", big=big, fast=fast) for index, (big, fast, _) in enumerate(drawn)]
    taken = [("n0", f"d{index}") for index, (_, _, held) in enumerate(drawn) if held]
    requests = [request(f"r{index}", class_name, count) for index, (class_name, count) in enumerate(wanted)]
    templates = (
        [template(f"t{index}", one) for index, one in enumerate(requests)] if split else [template("t0", *requests)]
    )
    watch = watch_of(node("n0"), resource_slice("n0", devices), *GPUS, *templates, claim("held", taken))
    spec = pod_spec(*(found["metadata"]["name"] for found in templates))
    free = [
        frozenset({"any", *(["big"] if big else []), *(["fast"] if fast else [])})
        for big, fast, held in drawn
        if not held
    ]
    most = next(pods for pods in itertools.count() if not assignments(free, pods + 1, wanted))
    assert slots(watch, spec) == {"n0": most}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_after_any_events_the_room_is_that_of_a_watch_that_saw_only_the_end(data: st.DataObject) -> None:
    """Slices, templates, claims and pods come, change and go; placements are assumed in between."""
    watch = watch_of(node("n0"), node("n1"), *GPUS)
    now: dict[tuple[str, str], Object] = {}
    for _ in range(data.draw(st.integers(1, 14))):
        found = data.draw(things())
        key = (found["kind"], found["metadata"]["name"])
        sink: Any = watch if found["kind"] == "Pod" else watch.devices
        if key in now and data.draw(st.booleans()):
            sink.remove(Key(key[0], found["metadata"].get("namespace", ""), key[1]), found["metadata"]["uid"])
            now.pop(key)
        else:
            sink.put(found if data.draw(st.booleans()) else sink.pruned(found))
            now[key] = found
        watch.nodes()
    fresh = watch_of(node("n0"), node("n1"), *GPUS, *now.values())
    for spec in (pod_spec("one"), pod_spec("two"), pod_spec("one", "two")):
        assert slots(watch, spec) == slots(fresh, spec)
    free = {one.name: dict(one.free) for one in watch.nodes()}
    assert free == {one.name: dict(one.free) for one in fresh.nodes()}
    assert free == {one.name: dict(one.free) for one in counted_anew(watch, now.values())}


def counted_anew(watch: CapacityWatch, now: Iterable[Object]) -> tuple[NodeCapacity, ...]:
    """The slow twin: all nodes with their devices, less what each pod and each other claim takes."""
    catalog = watch.devices.catalog
    assert catalog is not None
    pods = [found for found in now if found["kind"] == "Pod" and watch.use_of(found) is not None]
    uses = [use for found in pods if (use := watch.use_of(found)) is not None]
    for held in watch.devices.claims_of_others({found["metadata"]["uid"] for found in pods}):
        uses += [PodUse(where, taken, pods=0) for where, taken in catalog.taken_by_claim(held).items()]
    empty = [empty_node(node(name)) for name in ("n0", "n1")]
    return remaining([replace(one, free={**one.free, **catalog.amounts_of(one.name)}) for one in empty], uses)


GPU = "nvidia.com/gpu"


def asking(name: str, count: int, where: str | None = None) -> Object:
    """A pod that requests GPUs as an extended resource."""
    return pod(name, {"containers": [{"resources": {"limits": {GPU: str(count)}}}]}, where)


def free_gpus(watch: CapacityWatch, **without: set[str]) -> dict[str, int]:
    return {one.name: one.free.get(GPU, 0) for one in watch.nodes(**without)}


def extended_watch(*objects: Object) -> CapacityWatch:
    """Two nodes of four devices each, which stand for `nvidia.com/gpu`, and one with a device plugin's GPUs."""
    devices = [device(f"d{index}") for index in range(4)]
    plugin = node("n2")
    plugin["status"]["allocatable"][GPU] = "8"
    slices = [resource_slice(name, devices) for name in ("n0", "n1", "n2")]
    named = device_class("gpu", ANY, extended=GPU)
    return watch_of(node("n0"), node("n1"), plugin, *slices, named, device_class("later", ANY, extended=GPU), *objects)


def test_devices_that_stand_for_an_extended_resource_are_room_for_its_requests() -> None:
    """KEP-5004: the scheduler satisfies requests of `nvidia.com/gpu` with devices where no plugin offers any."""
    watch = extended_watch()
    assert free_gpus(watch) == {"n0": 4, "n1": 4, "n2": 8}
    found = place(Gang(requests={GPU: 4}, replicas=2), [one for one in watch.nodes() if one.name != "n2"])
    assert isinstance(found, Placement)
    watch.put(asking("p0", 3, "n0"))
    assert free_gpus(watch) == {"n0": 1, "n1": 4, "n2": 8}, "it is bound, and its claim is not seen yet"
    watch.devices.put(claim("p0-extended", [("n0", "d0"), ("n0", "d1"), ("n0", "d2")], pod="uid-p0", entry=""))
    assert free_gpus(watch) == {"n0": 1, "n1": 4, "n2": 8}, "the claim that the scheduler made counts once"
    assert free_gpus(watch, without={"uid-p0"}) == {"n0": 4, "n1": 4, "n2": 8}
    watch.put(asking("p2", 3, "n2"))
    assert free_gpus(watch) == {"n0": 1, "n1": 4, "n2": 5}
    watch.assume([Patch(Ref("Pod", "default", "p1", "uid-p1"), {"spec": {"affinity": affinity_to("n1")}}, {GPU: 2})])
    pinned = {**asking("p3", 1), "kind": "Pod"}
    pinned["spec"]["affinity"] = affinity_to("n1")
    watch.promise(Key("TrainingJob", "default", "run"), [pinned])
    assert free_gpus(watch) == {"n0": 1, "n1": 1, "n2": 5}


def test_claims_and_requests_of_an_extended_resource_share_the_devices() -> None:
    watch = extended_watch(
        template("one", request("r", "gpu")), pod("p0", pod_spec("one"), "n0"), asking("p1", 2, "n0")
    )
    assert free_gpus(watch)["n0"] == 1
    watch.devices.put(claim("p0-x", [("n0", "d0")], pod="uid-p0", entry="c0"))
    watch.devices.put(claim("p1-extended", [("n0", "d1"), ("n0", "d2")], pod="uid-p1", entry=""))
    watch.devices.put(claim("shared", [("n1", "d3")]))
    assert free_gpus(watch) == {"n0": 1, "n1": 3, "n2": 8}
    assert slots(watch, pod_spec("one")) == {"n0": 1, "n1": 3, "n2": 4}


def test_devices_that_no_pod_claims_cost_no_reading_of_other_nodes() -> None:
    """Nearly every cluster has DeviceClasses, and few pods claim devices."""
    devices = (*GPUS, resource_slice("n0", [device("d0", big=True, fast=False)]), template("one", request("r", "any")))
    watch = watch_of(node("n0"), node("n1"), *devices, pod("p0", {"containers": []}, "n0"))
    before = watch.nodes()
    watch.put(pod("p1", {"containers": []}, "n1"))
    after = watch.nodes()
    assert (after[0] is before[0], after[1].free["pods"]) == (True, 99)
    assert slots(watch, pod_spec("one")) == {"n0": 1, "n1": 0}, "the devices are counted once a pod claims some"


def test_a_pod_that_is_seen_with_other_claims_takes_those() -> None:
    devices = [device("d0", big=True, fast=False)]
    templates = [template("one", request("r", "any")), template("two", request("r", "big"), request("s", "any"))]
    watch = watch_of(node("n0"), resource_slice("n0", devices), *GPUS, *templates, pod("p", pod_spec("two"), "n0"))
    assert watch.nodes()[0].free["devices of any"] == -1
    watch.put(pod("p", pod_spec("one"), "n0"))
    assert watch.nodes()[0].free["devices of any"] == 0


@st.composite
def things(draw: st.DrawFn) -> Object:
    where, number = draw(st.sampled_from(["n0", "n1"])), draw(st.integers(0, 2))
    spec = pod_spec(draw(st.sampled_from(["one", "two"])))
    return draw(
        st.sampled_from(
            [
                resource_slice(where, [device(f"d{index}", big=index == 0, fast=False) for index in range(number + 1)]),
                template("one", request("r", "any", number + 1)),
                template("two", request("r", "big"), request("s", "any", number + 1)),
                claim(f"p{number}-c0", [(where, f"d{number}")], pod=f"uid-p{number}", entry="c0"),
                claim("shared", [(where, "d0")]),
                pod(f"p{number}", spec),
                pod(f"p{number}", spec, where),
            ]
        )
    )


# From the decision to the allocation


def test_a_pod_takes_its_devices_from_the_decision_on_and_those_it_got_afterwards() -> None:
    devices = [device(f"d{index}", big=index < 2, fast=False) for index in range(4)]
    watch = watch_of(
        node("n0"), resource_slice("n0", devices), *GPUS, template("two", request("r", "any", 2)),
        template("big", request("r", "big")), pod("p0", pod_spec("two")),
    )  # fmt: skip
    two, big = pod_spec("two"), pod_spec("big")
    assert (slots(watch, two), slots(watch, big)) == ({"n0": 2}, {"n0": 2})
    watch.assume([Patch(Ref("Pod", "default", "p0", "uid-p0"), {"spec": {"affinity": affinity_to("n0")}}, {})])
    assert (slots(watch, two), slots(watch, big)) == ({"n0": 1}, {"n0": 0}), "it may get both big ones"
    watch.put(pod("p0", two, "n0"))
    assert (slots(watch, two), slots(watch, big)) == ({"n0": 1}, {"n0": 0})
    watch.devices.put(claim("p0-x", [("n0", "d1"), ("n0", "d2")], pod="uid-p0", entry="c0"))
    assert (slots(watch, two), slots(watch, big)) == ({"n0": 1}, {"n0": 1}), "it got one of them"
    assert watch.use_of(pod("p0", two)) == PodUse("n0", {"devices of any": 2, "devices of big": 1})
    without = {one.name: one.slots(gang_of(watch, two)) for one in watch.nodes(without={"uid-p0"})}
    assert without == {"n0": 2}, "a pod's own devices are free for it"
    watch.remove(Key("Pod", "default", "p0"), "uid-p0")
    assert slots(watch, two) == {"n0": 1}, "its claim still holds them"
    watch.devices.remove(Key("ResourceClaim", "default", "p0-x"), "uid-x")
    assert slots(watch, two) == {"n0": 2}


def test_room_for_more_is_told_when_devices_come_or_are_given_back() -> None:
    grown: list[int] = []
    watch = CapacityWatch(lambda: grown.append(1))
    watch.devices.put(resource_slice("n0", [device("d0")]))
    held = claim("held", [("n0", "d0")])
    watch.devices.put(held)
    before = len(grown)
    assert not watch.devices.put(held), "nothing changed"
    assert len(grown) == before
    watch.devices.forget_unlisted("ResourceClaim", [], 1)
    assert len(grown) == before + 1


def test_a_gang_is_placed_where_its_devices_are_or_says_how_many_are_missing() -> None:
    devices = [device(f"d{index}", big=True, fast=False) for index in range(3)]
    watch = watch_of(
        node("n0"), node("n1"), node("n2"), resource_slice("n0", devices[:1]), resource_slice("n1", devices), *GPUS,
        template("one", request("r", "big")),
    )  # fmt: skip
    spec = pod_spec("one")
    four, five = gang_of(watch, spec, 4), gang_of(watch, spec, 5)
    found = place(four, watch.nodes())
    assert isinstance(found, Placement)
    assert sorted(found.nodes) == ["n0", "n1", "n1", "n1"]
    assert place(five, watch.nodes()) == Unplaceable(
        "WaitingForDevices", "4 of 5 pods fit on 3 nodes, devices of big: 4 free, 5 needed"
    )


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (pod_spec("none"), "0 of 2 pods fit on 1 nodes, ResourceClaimTemplate none (there is none): 0 free, 2 needed"),
        (pod_spec("odd"), "0 of 2 pods fit on 1 nodes, DeviceClass odd (there is none): 0 free, 2 needed"),
    ],
)
def test_templates_and_classes_that_are_missing_are_named(spec: Mapping[str, Any], line: str) -> None:
    watch = watch_of(node("n0"), resource_slice("n0", [device("d0")]), template("odd", request("r", "odd")))
    found = place(gang_of(watch, spec, 2), watch.nodes())
    assert isinstance(found, Unplaceable)
    assert (found.reason, found.message) == ("WaitingForDevices", line)


# What is not understood


def doubts(*objects: Object, spec: Mapping[str, Any] | None = None) -> str:
    devices = [device("d0", big=True, fast=False), device("d1", big=False, fast=False)]
    watch = watch_of(node("n0"), resource_slice("n0", devices), *GPUS, *objects)
    chosen = spec or pod_spec("t")
    assert slots(watch, chosen)["n0"] >= 1, "what is not understood holds nothing back"
    return "; ".join(needs_of(watch.devices.catalog, "default", chosen).doubts)


@pytest.mark.parametrize(
    ("objects", "spec", "told"),
    [
        ([template("t", request("r", "any", selectors=[cel("device.nonsense(")]))], None, "a selector cannot be"),
        ([template("t", request("r", "any", selectors=[cel(f"{BIG} == semver('1.0.0')")]))], None, "a selector"),
        ([template("t", request("r", "any", selectors=[cel("device.attributes['x'].y == 'z'")]))], None, "a selector"),
        ([template("t", request("r", "any"), constraints=[{"matchAttribute": "x/y"}])], None, "matchAttribute"),
        ([template("t", request("r", "any", 9, allocationMode="All"))], None, "allocationMode All"),
        ([template("t", {"name": "r", "firstAvailable": [
            {"name": "a", "deviceClassName": "big", "count": 2}, {"name": "b", "deviceClassName": "fast"},
        ]})], None, "firstAvailable"),
        ([], pod_spec(claims=["mine"]), "ResourceClaim mine is not counted"),
        ([template("t", request("r", "any")), resource_slice("n9", [device("net")]) | {"spec": {
            "driver": DRIVER, "allNodes": True, "devices": [device("net")],
            "pool": {"name": "net", "generation": 1, "resourceSliceCount": 1},
        }}], None, "devices that several nodes reach"),
    ],
    ids=["syntax", "semver", "no such attribute", "constraint", "all", "alternatives", "named", "network"],
)  # fmt: skip
def test_what_is_not_understood_is_told_and_holds_nothing_back(
    objects: list[Object], spec: Mapping[str, Any] | None, told: str
) -> None:
    assert told in doubts(*objects, spec=spec)


def test_what_is_understood_is_not_doubted() -> None:
    assert doubts(template("t", request("r", "big"))) == ""
    assert doubts(template("t", request("r", "any"), request("x", "big", 9, adminAccess=True))) == ""
    assert needs_of(None, "default", pod_spec("t")).doubts == (NOT_SEEN,)
    assert needs_of(None, "default", {"containers": []}).doubts == ()


# Reading


DEVICE = read_slice(resource_slice("n0", [device("d0", big=True, fast=False, model="H200", lanes=16)])).devices[0]


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        ("true", True),
        (ANY, True),
        ("device.driver == 'other'", False),
        (f"device.attributes['{DRIVER}'].model in ['H100', 'H200']", True),
        (f'device.attributes["{DRIVER}"].lanes >= 32', False),
        (f"'{DRIVER}' in device.attributes && 'model' in device.attributes['{DRIVER}']", True),
        ("has(device.attributes['other.example.com'].x)", False),
        (f"device.capacity['{DRIVER}'].memory.compareTo(quantity('40Gi')) >= 0", True),
        (f"device.capacity['{DRIVER}'].memory.compareTo(quantity('80Gi')) > 0", False),
        (f"device.capacity['{DRIVER}'].memory.compareTo(quantity('80Gi')) == 0", True),
        (f"device.capacity['{DRIVER}'].memory.compareTo(quantity('much')) == 0", None),
        (f"device.capacity['{DRIVER}'].memory.compareTo(quantity('40Gi')) == 1", None),
        ("device.attributes['other.example.com'].x == 1", None),
        ("device.driver", None),
    ],
)
def test_selectors(expression: str, verdict: bool | None) -> None:
    selectors = DeviceSelectors()
    assert selectors.matches(expression, DEVICE) is verdict
    assert selectors.matches(expression, DEVICE) is verdict, "from memory"


def test_only_whole_pools_of_the_newest_generation_count() -> None:
    old = resource_slice("n0", [device("old")], generation=1)
    half = [
        resource_slice("n0", [device(f"d{part}")], generation=2, resourceSliceCount=2, part=part) for part in (0, 1)
    ]

    def names(*slices: Object) -> list[str]:
        return [found.id.device for found in usable_devices(map(read_slice, slices)).get("n0", ())]

    assert names(old) == ["old"]
    assert names(old, half[0]) == []
    assert names(old, *half) == ["d0", "d1"]


def test_taints_of_devices_are_kept_unless_tolerated() -> None:
    taint = {"key": "broken", "effect": "NoSchedule"}
    devices = [device("d0"), device("d1") | {"taints": [taint]}]
    tolerant = request("r", "any", tolerations=[{"key": "broken", "operator": "Exists"}])
    watch = watch_of(
        node("n0"),
        resource_slice("n0", devices),
        *GPUS,
        template("one", request("r", "any")),
        template("all", tolerant),
    )
    assert (slots(watch, pod_spec("one")), slots(watch, pod_spec("all"))) == ({"n0": 1}, {"n0": 2})


REST = {key: value for key, value in device("d0", big=True).items() if key != "name"}
SHAPES = [
    (device("d0", big=True), request("r", "any", 2)),
    ({"name": "d0", "basic": REST}, {"name": "r", "deviceClassName": "any", "count": 2}),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["v1", "v1beta1"])
def test_each_version_reads_alike(shape: tuple[dict[str, Any], dict[str, Any]]) -> None:
    (found,) = read_slice(resource_slice("n0", [shape[0]])).devices
    assert (found.id, found.node) == (DeviceId(DRIVER, "n0", "d0"), "n0")
    assert (found.attributes, found.capacity) == ({DRIVER: {"big": True}}, {DRIVER: {"memory": 80 * 2**30}})
    ((one, count),) = requests_of_template(template("t", shape[1])).counts
    assert (one.text, count) == ("devices of any", 2)
