"""Gates and nodes of a gang: all of its pods get their nodes at once, or the job says what is missing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.cluster.interface import Cluster
from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import (
    NodeCapacity,
    affinity_to,
    empty_node,
    pinned_node,
    pod_use,
    remaining,
)
from stoker.operator.domain.placement.place import Placement, place
from stoker.operator.domain.plan import Key, Object, Patch, Ref
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.capacity_watch import CapacityWatch
from stoker.operator.loop.operator import Operator
from stoker.operator.loop.store import key_of
from stoker.operator.reconcile.trainingjob.reconcile import reconcile_trainingjob
from stoker.operator.render.keys import keys_object
from stoker.pod.causes import Cause
from testing.operator.fakes import FakePods, Flaky, embedded, settle
from testing.operator.ready_node import GPU, ready_node
from testing.operator.simulated_cluster import Crash
from testing.operator.training_world import JOB, Run

PLACED = Settings(places_gangs=True)
READY = [{"type": "Ready", "status": "True"}]


def world(*nodes: Object, **spec: Any) -> Run:
    run = Run(
        PLACED,
        **{"workers": {"replicas": 2, "gpusPerPod": 4}, "training": {"totalSteps": 100, "globalBatchSize": 8}, **spec},
    )
    for node in nodes:
        run.cluster.add(node)
    return run


def places(run: Run) -> list[str | None]:
    return [pinned_node(pod) for pod in run.gang]


def test_a_gang_gets_all_its_nodes_and_a_second_pass_is_empty() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4))
    run.cluster.settle()
    assert sorted(map(str, places(run))) == ["n0", "n1"]
    assert not any(pod["spec"].get("schedulingGates") for pod in run.gang)
    assert run.status["attempt"]["placedAt"]
    assert run.cluster.plan(JOB).empty
    run.start()
    assert [pod["spec"]["nodeName"] for pod in run.gang] == places(run)
    assert run.status["phase"] == "Running"


def test_the_time_of_a_gang_counts_anew_where_the_operator_ended_before_it_wrote_the_placement() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4), scheduling={"gangTimeoutSeconds": 60})
    run.cluster.settle()
    status = run.status
    attempt = {name: value for name, value in status["attempt"].items() if name not in ("placedAt", "phase")}
    run.cluster.objects[JOB] = {**run.job, "status": {**status, "phase": "Starting", "attempt": attempt}}
    run.cluster.settle()
    assert run.status["attempt"]["placedAt"]
    assert run.status["phase"] == "Pending"
    run.cluster.advance(61)
    run.cluster.settle()
    assert run.status["lastFailure"]["cause"] == "GangTimeout"


def test_a_gang_without_room_keeps_every_gate_and_names_what_is_missing() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 2))
    run.cluster.settle()
    assert places(run) == [None, None]
    assert all(pod["spec"]["schedulingGates"] == [{"name": "stoker.dev/placement"}] for pod in run.gang)
    assert run.status["message"] == "WaitingForGPUs: 1 of 2 pods fit on 2 nodes, nvidia.com/gpu: 6 free, 8 needed"
    assert run.status["phase"] == "Pending"
    run.cluster.add(ready_node("n2", 4))
    run.cluster.settle()
    assert sorted(map(str, places(run))) == ["n0", "n2"]
    assert run.attempt == 0


def test_an_edit_of_the_topology_takes_effect_while_the_gang_waits() -> None:
    levels = [{"key": "kubernetes.io/hostname"}, {"key": "rack"}, {"key": "zone", "mode": "Required"}]
    nodes = [ready_node(f"n{index}", 4, rack=f"r{index}", zone=f"z{index}") for index in range(2)]
    run = world(*nodes, scheduling={"topology": levels})
    run.cluster.settle()
    assert run.status["message"] == (
        "TopologyUnsatisfied: no zone has room for the 2 pods of a gang; the largest, z1, has room for 1"
    )
    run.cluster.change_spec(JOB, lambda spec: spec["scheduling"]["topology"][2].update(mode="Preferred"))
    run.cluster.settle()
    assert sorted(map(str, places(run))) == ["n0", "n1"]
    conditions = {found["type"]: found["message"] for found in run.status["conditions"]}
    assert conditions["TopologyRelaxed"] == "preferred levels that do not hold for every pod: zone"
    assert "EditPending" not in conditions


def test_an_edit_of_a_gang_that_waits_acts_at_once_and_needs_no_task() -> None:
    """It waits for what the edit repairs: too many workers, a label that no node has."""
    run = world(ready_node("n0", 4), workers={"replicas": 2, "gpusPerPod": 4, "nodeSelector": {"pool": "b"}})
    run.cluster.settle()
    assert "2 of 2" not in run.status["message"]
    run.cluster.change_spec(JOB, lambda spec: spec["workers"].update(replicas=1, nodeSelector={}))
    for _ in range(3):
        run.cluster.settle()
        run.cluster.collect()
    assert places(run) == ["n0"]
    assert run.status.get("failuresWithoutProgress", 0) == 0
    assert run.cluster.pods("task") == [], "nothing has run, so nothing was saved"
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec["workers"].update(replicas=2))
    run.cluster.settle()
    assert len(run.gang) == 1, "what runs is left alone"
    assert run.condition(run.job, "EditPending") == "True"


def test_a_gang_that_waits_is_suspended_without_a_task_and_waits_again() -> None:
    run = world(ready_node("n0", 4))
    run.cluster.settle()
    for suspend, phase in ((True, "Suspended"), (False, "Pending"), (True, "Suspended"), (False, "Pending")):
        run.cluster.change_spec(JOB, partial(dict.update, run={"suspend": suspend}))
        for _ in range(3):
            run.cluster.settle()
            run.cluster.collect()
            run.cluster.advance(5)
        run.cluster.settle()
        assert run.status["phase"] == phase
        assert run.cluster.pods("task") == []
        assert len(run.cluster.pods("trainer")) == (0 if suspend else 2)
    run.cluster.add(ready_node("n1", 4))
    run.cluster.settle()
    assert sorted(map(str, places(run))) == ["n0", "n1"]


def test_a_job_that_is_deleted_while_it_waits_leaves_its_name_to_the_next_one_at_once() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 2))
    run.cluster.settle()
    body = {**run.job, "metadata": {"name": "run"}, "status": {}}
    old = [pod["metadata"]["name"] for pod in run.gang]
    run.cluster.delete(JOB)
    run.cluster.add({**body, "spec": {**body["spec"], "workers": {"replicas": 1, "gpusPerPod": 4}}})
    run.cluster.settle()
    mine = [pod for pod in run.gang if pod["metadata"]["name"] not in old]
    assert [pinned_node(pod) for pod in mine] == ["n0"], "pods of the old one are no part of it, and hold no room"
    run.cluster.collect()
    assert not {pod["metadata"]["name"] for pod in run.cluster.pods("trainer")} & {*old}
    run.start()
    assert run.status["phase"] == "Running"


def test_a_gang_that_is_not_scheduled_in_time_is_placed_anew_for_free() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4), scheduling={"gangTimeoutSeconds": 30})
    run.cluster.settle()
    run.cluster.run(run.gang[0])
    assert run.cluster.plan(JOB).requeue_after_s == 30
    run.cluster.advance(31)
    run.cluster.settle()
    name = run.gang[1]["metadata"]["name"]
    assert run.status["lastFailure"]["cause"] == "GangTimeout"
    assert run.status["lastFailure"]["detail"].startswith(f"{name} was not scheduled in 30 s")
    for _ in range(3):
        run.cluster.collect()
        run.cluster.settle()
        run.answer_tasks("list", saves=[])
    assert run.attempt == 1
    assert sorted(map(str, places(run))) == ["n0", "n1"]
    assert run.status.get("failuresWithoutProgress", 0) == 0


def test_a_gang_that_was_scheduled_has_no_time_limit() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4))
    run.start()
    run.cluster.advance(1000)
    run.cluster.settle()
    assert run.attempt == 0
    assert run.status["phase"] == "Running"


def test_gated_pods_start_where_the_operator_lost_its_view_of_nodes() -> None:
    run = world()
    run.cluster.settle()
    assert "WaitingForCapacity" in run.status["message"]
    run.cluster.settings = Settings()
    run.cluster.settle()
    assert places(run) == [None, None]
    assert not any(pod["spec"].get("schedulingGates") for pod in run.gang)
    assert any(found["type"] == "PlacementLimited" for found in run.status["conditions"])


def test_a_single_pod_is_left_to_the_scheduler_unless_it_has_gpus_or_wishes() -> None:
    plain = world(workers={"replicas": 1})
    plain.cluster.settle()
    assert "schedulingGates" not in plain.gang[0]["spec"]
    scarce = world(ready_node("n0", 2), ready_node("n1", 4), workers={"replicas": 1, "gpusPerPod": 4})
    scarce.cluster.settle()
    assert places(scarce) == ["n1"]
    wish = world(
        ready_node("n0", 4),
        ready_node("n1", 4, rack="r"),
        workers={"replicas": 1, "gpusPerPod": 4},
        scheduling={"topology": [{"key": "rack", "mode": "Required"}]},
    )
    wish.cluster.settle()
    assert places(wish) == ["n1"]


def test_the_users_affinity_is_kept_and_a_gang_is_placed_when_their_gates_are_gone() -> None:
    term = {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}
    node_affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    template = {"spec": {"affinity": {"nodeAffinity": node_affinity}, "schedulingGates": [{"name": "own"}]}}
    nodes = [ready_node("n0", 8, pool="b"), ready_node("n1", 8, pool="a")]
    run = world(*nodes, workers={"replicas": 2, "gpusPerPod": 4, "podTemplate": template})
    run.cluster.settle()
    assert places(run) == [None, None]
    assert run.status["message"] == "placed when the pods' other scheduling gates are gone: own"
    run.cluster.advance(1000)
    for pod in run.gang:
        gates = run.cluster.objects[key_of(pod)]["spec"]["schedulingGates"]
        gates.remove({"name": "own"})
    run.cluster.settle()
    assert places(run) == ["n1", "n1"]
    for pod in run.gang:
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert required["nodeSelectorTerms"][0]["matchExpressions"] == term["matchExpressions"]
    assert run.attempt == 0


def test_a_topology_without_a_view_of_nodes_is_affinity_between_pods_and_told() -> None:
    levels = [{"key": "clique"}, {"key": "rack"}, {"key": "zone", "mode": "Required"}]
    run = Run(workers={"replicas": 2}, scheduling={"topology": levels})
    run.cluster.settle()
    conditions = {found["type"]: found["message"] for found in run.status["conditions"]}
    assert conditions["PlacementLimited"] == (
        "the operator has no view of nodes: scheduling.topology is affinity between pods, kept one pod at a time: some "
        "may start while others find no room"
    )
    of_attempt = {"stoker.dev/job-uid": run.job["metadata"]["uid"], "stoker.dev/attempt": str(run.attempt)}
    zone = {"labelSelector": {"matchLabels": of_attempt}, "topologyKey": "zone"}
    labelled = [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
    for pod in run.gang:
        assert pod["spec"]["affinity"] == {
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [zone]},
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": labelled}},
        }, "tensor groups and model replicas of one pod need no others"
        assert of_attempt.items() <= pod["metadata"]["labels"].items()
    run.cluster.settings = PLACED
    run.cluster.settle()
    assert "PlacementLimited" not in {found["type"] for found in run.status["conditions"]}


def test_devices_by_claim_are_passed_on_and_told_to_be_uncounted_where_none_can_be_seen() -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    containers = [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}]
    template = {"spec": {"resourceClaims": claims, "containers": containers}}
    run = world(ready_node("n0", 4), ready_node("n1", 4), workers={"replicas": 2, "podTemplate": template})
    run.cluster.settle()
    for pod in run.gang:
        assert pod["spec"]["resourceClaims"] == claims
        assert pod["spec"]["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    found = {item["type"]: item for item in run.status["conditions"]}["PlacementLimited"]
    assert (found["status"], found["reason"]) == ("True", "ResourceClaims")
    assert "nodeSelector" in found["message"]


def test_retention_goes_on_while_a_gang_waits() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4), run={"backoffLimit": 20})
    run.start()
    run.train(30, saves=tuple(map(run.save, (10, 20, 30))))
    run.cluster.objects.pop(Key("Node", "", "n1"))
    run.cluster.end(run.gang[0], Cause.PEER_LOST)
    for _ in range(6):
        run.cluster.settle()
        run.cluster.collect()
        run.cluster.advance(60)
    assert (run.attempt, places(run)) == (1, [None, None])
    assert sorted(found["status"]["step"] for found in run.cluster.of_kind("Checkpoint")) == [10, 20, 30]
    run.cluster.change_spec(JOB, lambda spec: spec["checkpoint"].update(maxToKeep=1))
    run.cluster.settle()
    expired = [
        found["status"]["step"]
        for found in run.cluster.of_kind("Checkpoint")
        if "stoker.dev/expired" in found["metadata"].get("labels", {})
    ]
    assert (places(run), expired) == ([None, None], [10])


@pytest.mark.parametrize("writes", range(14))
def test_an_operator_that_dies_after_any_write_places_the_same_gang(writes: int) -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4))
    left = writes
    with contextlib.suppress(Crash):
        for _ in range(10):
            before = run.cluster.writes
            run.cluster.reconcile(JOB, crash_after=left)
            left -= run.cluster.writes - before
    run.cluster.settle()
    assert sorted(map(str, places(run))) == ["n0", "n1"]
    assert run.attempt == 0


def fail(run: Run, rank: int, cause: Cause = Cause.HANG) -> str:
    """End the running attempt on the node of one pod, and start the next; return the node."""
    for pod in run.gang:
        run.cluster.run(pod)
    run.train(run.attempt)
    node = str(run.gang[rank]["spec"]["nodeName"])
    run.cluster.end(run.gang[rank], cause)
    number = run.attempt
    for _ in range(8):
        run.cluster.settle()
        run.cluster.collect()
        run.answer_tasks("list", saves=[])
        if run.attempt > number:
            return node
        run.cluster.advance(20)
    raise AssertionError(f"no attempt after {number}: {run.status}")


def test_a_node_that_two_attempts_failed_on_is_avoided_while_others_have_room() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4), run={"backoffLimit": 20})
    run.cluster.settle()
    first = fail(run, 0)
    assert not run.status.get("avoidedNodes")
    assert fail(run, places(run).index(first)) == first
    run.cluster.settle()
    assert run.status["avoidedNodes"] == [first]
    conditions = {found["type"]: found["message"] for found in run.status["conditions"]}
    assert conditions["BlamedNodesUsed"] == f"attempts failed on {first} before, and no other nodes have room"
    run.cluster.add(ready_node("n2", 4))
    fail(run, 0, Cause.PEER_LOST)
    run.cluster.settle()
    assert sorted(map(str, places(run))) == sorted({"n0", "n1", "n2"} - {first})
    assert "BlamedNodesUsed" not in {found["type"] for found in run.status["conditions"]}


def test_a_single_pod_is_placed_when_it_has_a_node_to_avoid() -> None:
    run = world(
        ready_node("n0", 4), ready_node("n1", 4), workers={"replicas": 1, "gpusPerPod": 4}, run={"backoffLimit": 20}
    )
    run.cluster.settle()
    for _ in range(2):
        run.cluster.objects[key_of(run.gang[0])]["spec"]["nodeName"] = "n0"
        for pod in run.gang:
            pod["status"] = {"phase": "Running"}
        fail(run, 0)
    run.cluster.settle()
    assert (run.status["avoidedNodes"], places(run)) == (["n0"], ["n1"])


@pytest.mark.parametrize("cause", [Cause.OUT_OF_MEMORY, Cause.STORAGE_ERROR, Cause.PEER_LOST])
def test_causes_that_no_node_is_to_blame_for_avoid_none(cause: Cause) -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4), run={"backoffLimit": 20})
    run.cluster.settle()
    for _ in range(3):
        fail(run, 0, cause)
    assert not run.status.get("avoidedNodes")


# What the operator keeps of nodes and pods


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Object | None, str]]:
    """Events of nodes and pods: (name, object or None where it is gone, kind)."""
    events: list[tuple[str, Object | None, str]] = []
    for _ in range(draw(st.integers(1, 25))):
        if draw(st.booleans()):
            name = draw(st.sampled_from(["n0", "n1"]))
            node = ready_node(name, draw(st.integers(0, 8))) if draw(st.integers(0, 4)) else None
            events.append((name, node, "Node"))
        else:
            name = draw(st.sampled_from(["p0", "p1", "p2"]))
            where = draw(st.sampled_from([None, "n0", "n1"]))
            phase = draw(st.sampled_from(["Pending", "Running", "Succeeded"]))
            gone = draw(st.integers(0, 4)) == 0
            events.append((name, None if gone else raw_pod(name, where, phase), "Pod"))
    return events


def raw_pod(name: str, node: str | None, phase: str = "Running", gpus: int = 1) -> Object:
    spec: dict[str, Any] = {"containers": [{"resources": {"limits": {GPU: str(gpus)}}}]}
    if node:
        spec["nodeName"] = node
    return {"kind": "Pod", "metadata": {"name": name, "namespace": "x"}, "spec": spec, "status": {"phase": phase}}


def stored(resource: Object, version: int) -> Object:
    metadata = {**resource["metadata"], "uid": f"uid-{resource['metadata']['name']}", "resourceVersion": str(version)}
    return {**resource, "metadata": metadata}


@settings(max_examples=100, deadline=None)
@given(histories(), st.booleans(), st.sets(st.integers(1, 25)))
def test_the_room_equals_a_count_from_scratch(
    history: list[tuple[str, Object | None, str]], listed: bool, read: set[int]
) -> None:
    """The room is kept up to date with every event; it is read after some of them."""
    watch = CapacityWatch(lambda: None)
    now: dict[tuple[str, str], Object] = {}
    for version, (name, found, kind) in enumerate(history, 1):
        if found is None:
            watch.remove(Key(kind, "", name), f"uid-{name}", version)
            now.pop((kind, name), None)
        else:
            now[kind, name] = found
            watch.put(watch.pruned(stored(found, version)) if listed else stored(found, version))
        if version in read:
            assert watch.nodes() == counted(now)
    if listed:
        for kind in ("Node", "Pod"):
            items = [watch.pruned(stored(found, 99)) for (of, _), found in now.items() if of == kind]
            watch.forget_unlisted(kind, items, 99)
            for item in items:
                watch.put(item)
    assert watch.nodes() == counted(now)
    for name in ("p0", "p1", "p2"):
        others = {key: found for key, found in now.items() if key != ("Pod", name)}
        assert watch.nodes(without={f"uid-{name}"}) == counted(others)
    assert watch.nodes() == counted(now)


def counted(now: Mapping[tuple[str, str], Object]) -> tuple[NodeCapacity, ...]:
    """What nodes have left, with every pod counted anew."""
    nodes = [empty_node(found) for (kind, _), found in now.items() if kind == "Node"]
    return remaining(nodes, [use for (kind, _), found in now.items() if kind == "Pod" and (use := pod_use(found))])


def room(watch: CapacityWatch, **given_: Any) -> dict[str, int]:
    return {node.name: node.free[GPU] for node in watch.nodes(**given_)}


def test_a_placement_counts_from_the_moment_it_was_decided_until_its_pod_is_seen_or_gone() -> None:
    grown: list[int] = []
    watch = CapacityWatch(lambda: grown.append(1))
    watch.put(stored(ready_node("n0", 8), 1))
    body = {"spec": {"affinity": affinity_to("n0")}}
    watch.assume([Patch(Ref("Pod", "x", "p0", "uid-p0"), body, {GPU: 3})])
    assert room(watch) == {"n0": 5}
    assert room(watch, without={"uid-p0"}) == {"n0": 8}
    watch.put(stored(raw_pod("p0", "n0", gpus=2), 2))
    assert room(watch) == {"n0": 6}
    assert len(grown) == 1, "only the node made room"
    watch.put(stored(raw_pod("p0", "n0", gpus=1), 3))
    assert room(watch) == {"n0": 7}
    assert len(grown) == 2, "the pod takes less"
    watch.remove(Key("Pod", "x", "p0"), "uid-p0")
    assert room(watch) == {"n0": 8}
    assert len(grown) == 3


def test_a_list_without_a_pod_ends_what_was_assumed_for_it() -> None:
    watch = CapacityWatch(lambda: None)
    watch.put(stored(ready_node("n0", 8), 1))
    body = {"spec": {"affinity": affinity_to("n0")}}
    watch.assume([Patch(Ref("Pod", "x", name, f"uid-{name}"), body, {GPU: 3}) for name in ("p0", "p1")])
    assert room(watch) == {"n0": 2}
    watch.forget_unlisted("Pod", [watch.pruned(stored(raw_pod("p1", None), 2))], 2)
    assert room(watch) == {"n0": 5}


@pytest.mark.parametrize("key", ["feature.node.kubernetes.io/rdma.capable", "beta.kubernetes.io/instance-type", "zone"])
def test_a_gang_is_placed_by_any_label_of_a_node(key: str) -> None:
    watch = CapacityWatch(lambda: None)
    for name, value in {"n0": "no", "n1": "yes"}.items():
        watch.put(stored(ready_node(name, 8, **{key: value}), 1))
    affinity = [{"matchExpressions": [{"key": key, "operator": "In", "values": ["yes"]}]}]
    requests = {"nvidia.com/gpu": 1}
    for gang in (
        Gang(requests=requests, replicas=2, node_selector={key: "yes"}),
        Gang(requests=requests, replicas=2, affinity_terms=affinity),
    ):
        assert place(gang, watch.nodes(), [Level(key)]) == Placement(("n1", "n1"))


def test_two_jobs_never_get_the_same_room_and_the_second_starts_when_the_first_is_gone(tmp_path: Path) -> None:
    async def whole() -> None:
        world_ = embedded(tmp_path, pods=FakePods())
        given_settings = Settings(workers=4, resync_interval_s=600)
        operator = Operator(
            world_.cluster,
            given_settings,
            {"TrainingJob": reconcile_trainingjob},
            clock=world_.clock,
            jitter=lambda: 0.5,
            everything=world_.cluster,
        )
        assert operator.settings.places_gangs
        running = asyncio.ensure_future(operator.run())
        await settle()
        try:
            world_.objects.create(keys_object("default", operator.settings))
            world_.objects.create(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "claim", "namespace": "default"},
                    "spec": {},
                }
            )
            node = world_.objects.create(ready_node("n0", 4))
            world_.objects.update_status(ref(node), ready_node("n0", 4)["status"])
            jobs = [world_.objects.create(job_body(name)) for name in ("a", "b")]
            await world_.clock.advance(5)
            assert sorted(pinned(world_.objects.of_kind("Pod"))) == [("a", "n0"), ("a", "n0")]
            message = world_.objects.get(Key("TrainingJob", "default", "b"))["status"]["message"]
            assert message.startswith("WaitingForGPUs: 0 of 2 pods fit on 1 nodes")
            assert node["kind"] == "Node"
            world_.objects.delete(ref(jobs[0]))
            await world_.clock.advance(10)
            assert ("b", "n0") in pinned(world_.objects.of_kind("Pod"))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await world_.kubelet.stop(0)

    asyncio.run(whole())


def ref(found: Object) -> Ref:
    metadata = found["metadata"]
    return Ref(found["kind"], metadata["namespace"], metadata["name"], metadata["uid"])


def pinned(pods: list[Object]) -> list[tuple[str, str]]:
    return [(pod["metadata"]["labels"]["stoker.dev/job"], node) for pod in pods if (node := pinned_node(pod))]


def job_body(name: str) -> Object:
    job = Run(workers={"replicas": 2, "gpusPerPod": 2}, training={"totalSteps": 5, "globalBatchSize": 4}).job
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": job["spec"],
    }


class Counted(Flaky):
    """A cluster that counts requests about single objects by method and kind, and never fails."""

    def __init__(self, inner: Cluster) -> None:
        super().__init__(inner, fail_at=0, after=False)
        self.asked: Counter[tuple[str, str]] = Counter()

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        self.asked["get", kind] += 1
        return await super().get(kind, namespace, name)

    async def create(self, body: Object) -> Object:
        self.asked["create", body["kind"]] += 1
        return await super().create(body)

    async def apply(self, body: Object, *, manager: str) -> Object:
        self.asked["apply", body["kind"]] += 1
        return await super().apply(body, manager=manager)

    async def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        self.asked["patch", ref.kind] += 1
        return await super().patch(ref, body)

    async def update_status(self, ref: Ref, status: Object, *, resource_version: str | None = None) -> Object:
        self.asked["status", ref.kind] += 1
        return await super().update_status(ref, status, resource_version=resource_version)


def test_a_gang_costs_this_many_requests_from_its_creation_until_it_runs(tmp_path: Path) -> None:
    """One request for each child: pods are made on their nodes, and nothing is read."""

    async def whole() -> None:
        pods = FakePods()
        world_ = embedded(tmp_path, pods=pods)
        cluster = Counted(world_.cluster)
        operator = Operator(
            cluster,
            Settings(workers=4, resync_interval_s=600),
            {"TrainingJob": reconcile_trainingjob},
            clock=world_.clock,
            jitter=lambda: 0.5,
            everything=cluster,
        )
        running = asyncio.ensure_future(operator.run())
        await settle()
        try:
            world_.objects.create(keys_object("default", operator.settings))
            claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "claim"}, "spec": {}}
            world_.objects.create({**claim, "metadata": {"name": "claim", "namespace": "default"}})
            node = world_.objects.create(ready_node("n0", 4))
            world_.objects.update_status(ref(node), ready_node("n0", 4)["status"])
            world_.objects.create(plain_job("a", 4))
            await world_.clock.advance(5)
            for pod in world_.objects.of_kind("Pod"):
                pods.answers[pod["metadata"]["uid"]] = {
                    "program": "trainer",
                    "attempt": 0,
                    "phase": "Training",
                    "step": 1,
                }
            await world_.clock.advance(10)
            status = world_.objects.get(Key("TrainingJob", "default", "a"))["status"]
            assert status["phase"] == "Running", status.get("message")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await world_.kubelet.stop(0)
        statuses = cluster.asked.pop(("status", "TrainingJob"))
        assert statuses <= 3, "attempt, pods that start for seconds, first report"
        assert dict(cluster.asked) == {
            ("apply", "Service"): 1,
            ("apply", "ConfigMap"): 2,  # of the attempt, and the public keys of the namespace
            ("create", "Event"): 1,
            ("create", "Pod"): 4,
        }

    asyncio.run(whole())


def plain_job(name: str, pods: int) -> Object:
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": Run(workers={"replicas": pods}, training={"totalSteps": 5, "globalBatchSize": 4}).job["spec"],
    }
