"""One watch of nodes and pods for store and capacity: each sees what it would see with a watch of its own."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.labels import MANAGED_BY
from stoker.operator.domain.plan import Object
from stoker.operator.loop.capacity_watch import CapacityWatch
from stoker.operator.loop.shared_watch import SharedWatch
from stoker.operator.loop.store import Store, key_of

Event = tuple[str, Object]


def pod(name: str, version: int, *, ours: bool, node: str = "", life: int = 0) -> Object:
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "b" if name == "p1" else "a",
        "uid": f"uid-{name}-{life}",
        "resourceVersion": str(version),
    }
    if ours:
        metadata["labels"] = {**MANAGED_BY}
    spec = {
        "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}],
        **({"nodeName": node} if node else {}),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def node(name: str, version: int, cpu: int) -> Object:
    conditions = [{"type": "Ready", "status": "True"}]
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    status = {"conditions": conditions, "allocatable": {"cpu": str(cpu), "pods": "9"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """What a watch shows: objects that come, change (also their label) and go, in the order of their versions."""
    there: dict[str, Object] = {}
    events: list[Event] = []
    for version in range(1, draw(st.integers(1, 20))):
        name = draw(st.sampled_from(["n0", "p0", "p1"]))
        if name in there and draw(st.booleans()):
            metadata = {**there[name]["metadata"], "resourceVersion": str(version)}
            events.append(("DELETED", {**there.pop(name), "metadata": metadata}))
            continue
        if name == "n0":
            found = node(name, version, draw(st.integers(1, 4)))
        else:
            life = int(there[name]["metadata"]["uid"][-1]) if name in there else version % 10
            where = draw(st.sampled_from(["", "n0"]))
            found = pod(name, version, ours=draw(st.booleans()), node=where, life=life)
        events.append(("MODIFIED" if name in there else "ADDED", found))
        there[name] = found
    return events


def is_ours(found: Object, namespaces: tuple[str, ...] = ()) -> bool:
    metadata = found["metadata"]
    return found["kind"] == "Node" or ("labels" in metadata and (not namespaces or metadata["namespace"] in namespaces))


def take(sink: Any, event: Event, *, listed: bool) -> None:
    change, found = event
    if change == "DELETED":
        sink.remove(key_of(found), found["metadata"]["uid"], int(found["metadata"]["resourceVersion"]), last=found)
    else:
        sink.put(sink.pruned(found) if listed else found)


def selected(events: list[Event], namespaces: tuple[str, ...] = ()) -> list[Event]:
    """The same history as a watch of these namespaces with our label as its selector shows it."""
    shown: dict[str, Object] = {}
    found: list[Event] = []
    for change, one in events:
        name = one["metadata"]["name"]
        if change != "DELETED" and is_ours(one, namespaces):
            found.append((change, one))
            shown[name] = one
        elif name in shown:
            found.append(("DELETED", one))
            shown.pop(name)
    return found


def content(store: Store) -> dict[Any, Object]:
    return {key_of(one): one for kind in ("Node", "Pod") for one in store.of_kind(kind)}


@settings(max_examples=200, deadline=None)
@given(histories(), st.booleans(), st.sampled_from([(), ("a",)]))
def test_store_and_capacity_are_those_of_two_watches(
    events: list[Event], listed: bool, namespaces: tuple[str, ...]
) -> None:
    store, capacity = Store(), CapacityWatch(lambda: None)
    shared = SharedWatch(store, capacity, namespaces)
    alone, counted = Store(), CapacityWatch(lambda: None)
    for event in events:
        take(shared, event, listed=listed)
        take(counted, event, listed=listed)
    for event in selected(events, namespaces):
        take(alone, event, listed=listed)
    assert content(store) == content(alone)
    assert capacity.nodes() == counted.nodes()


def test_a_list_forgets_what_it_lacks_in_both_and_foreign_pods_leave_no_trace() -> None:
    store, capacity = Store(), CapacityWatch(lambda: None)
    shared = SharedWatch(store, capacity)
    for found in (
        node("n0", 1, 4),
        pod("ours", 2, ours=True, node="n0"),
        pod("foreign", 3, ours=False, node="n0"),
        pod("kept", 4, ours=True, node="n0"),
    ):
        shared.put(found)
    assert store.counts() == {"Node": 1, "Pod": 2}
    assert capacity.nodes()[0].free["pods"] == 6
    items = [shared.pruned(pod("kept", 4, ours=True, node="n0"))]
    shared.forget_unlisted("Pod", items, 9, None)
    assert [found["metadata"]["name"] for found in store.of_kind("Pod")] == ["kept"]
    assert capacity.nodes()[0].free["pods"] == 8
    shared.put(items[0])
    assert store.counts() == {"Node": 1, "Pod": 1}


def test_a_pod_of_ours_whose_label_goes_is_gone_and_comes_back_with_it() -> None:
    store = Store()
    shared = SharedWatch(store, CapacityWatch(lambda: None))
    for version, ours in enumerate((True, False, True), 1):
        shared.put(pod("p", version, ours=ours))
        assert bool(store.of_kind("Pod")) == ours
