"""Gangs that have room when their pods are made: they are made on their nodes, whole, or they wait with gates."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.cluster.interface import Cluster, Forbidden
from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import NodeCapacity, pinned_node, pod_use
from stoker.operator.domain.placement.place import levels_not_kept
from stoker.operator.domain.placement.place_rest import place_rest
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.operator.domain.pods import is_gated, ref_of
from stoker.operator.domain.schedulers import Installed
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.capacity_watch import CapacityWatch
from stoker.operator.loop.operator import Operator
from stoker.operator.loop.store import key_of
from stoker.operator.reconcile.trainingjob.reconcile import reconcile_trainingjob
from stoker.operator.render.keys import keys_object
from testing.operator.fakes import Flaky, embedded, settle
from testing.operator.ready_node import GPU, ready_node
from testing.operator.simulated_cluster import Crash
from testing.operator.training_world import JOB, Run

PLACED = Settings(places_gangs=True)
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "claim", "namespace": "default"},
    "spec": {},
}


def world(*nodes: Object, settings_: Settings = PLACED, **spec: Any) -> Run:
    training = {"totalSteps": 100, "globalBatchSize": 16}
    run = Run(settings_, **{"workers": {"replicas": 2, "gpusPerPod": 4}, "training": training, **spec})
    for node in nodes:
        run.cluster.add(node)
    return run


def made(run: Run) -> list[Object]:
    """The pods of the first attempt as they are made, before any pass sees them."""
    for _ in range(6):
        plan = run.cluster.reconcile(JOB)
        if any(body["kind"] == "Pod" for body in plan.create):
            break
    return run.gang


def taker(node: str, gpus: int, name: str = "other") -> Object:
    """A pod of another user."""
    spec = {"nodeName": node, "containers": [{"name": "main", "resources": {"limits": {GPU: str(gpus)}}}]}
    return {"kind": "Pod", "metadata": {"name": name, "labels": {}}, "spec": spec}


def cut_short(run: Run, pods: int = 1) -> None:
    """Let the operator die when it has made so many pods of the gang."""
    for _ in range(6):
        create = [body for body in run.cluster.plan(JOB).create if body["kind"] == "Pod"]
        with contextlib.suppress(Crash):
            run.cluster.reconcile(JOB, crash_after=pods if create else None)
        if create:
            return


def rest(run: Run, rounds: int = 4) -> None:
    """Let the operator work, and pods go that are deleted."""
    for _ in range(rounds):
        run.cluster.settle()
        run.cluster.collect()
        run.answer_tasks("list", saves=[])
        run.cluster.advance(1)
    run.cluster.settle()


def test_a_gang_with_room_is_made_on_its_nodes_and_never_patched() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4))
    pods = made(run)
    assert sorted(map(str, map(pinned_node, pods))) == ["n0", "n1"]
    assert not any("schedulingGates" in pod["spec"] for pod in pods)
    plans = [run.cluster.reconcile(JOB) for _ in range(4)]
    assert not any(plan.patch for plan in plans)
    assert run.status["attempt"]["placedAt"]


GPUS = {"replicas": 2, "gpusPerPod": 4}


@pytest.mark.parametrize(
    ("given_settings", "spec"),
    [
        (PLACED, {"run": {"elastic": {"minWorkers": 1, "maxWorkers": 2}}}),
        (PLACED, {"workers": {**GPUS, "podTemplate": {"spec": {"schedulingGates": [{"name": "own"}]}}}}),
        (PLACED, {"workers": {**GPUS, "podTemplate": {"spec": {"resourceClaims": [{"name": "x"}]}}}}),
        (Settings(places_gangs=True, installed=Installed(kueue=True)), {}),
        (PLACED, {"workers": {"replicas": 4, "gpusPerPod": 4}}),
    ],
    ids=["elastic", "own gate", "claims", "kueue", "no room"],
)
def test_a_gang_that_more_than_room_decides_about_is_made_with_gates(
    given_settings: Settings, spec: dict[str, Any]
) -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4), settings_=given_settings, **spec)
    pods = made(run)
    assert pods
    assert all(is_gated(pod) and pinned_node(pod) is None for pod in pods)


def test_the_rest_of_a_gang_is_made_around_the_pods_that_have_nodes() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4), ready_node("n2", 4))
    cut_short(run)
    (first,) = run.gang
    held = pinned_node(first)
    others = sorted({"n0", "n1", "n2"} - {held})
    run.cluster.add(taker(others[0], 4))
    rest(run)
    assert [pinned_node(pod) for pod in run.gang] == [held, others[1]]
    assert run.attempt == 0


def test_a_gang_that_cannot_be_made_whole_waits_with_gates_and_costs_nothing() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4))
    cut_short(run)
    held = pinned_node(run.gang[0])
    run.cluster.add(taker(next(name for name in ("n0", "n1") if name != held), 4))
    rest(run)
    assert run.attempt == 1
    assert all(map(is_gated, run.gang))
    assert run.status["lastFailure"]["cause"] == "GangTimeout"
    assert run.status.get("failuresWithoutProgress", 0) == 0
    assert run.status["message"].startswith("WaitingForGPUs: 1 of 2 pods fit")


class Quota(Flaky):
    """A cluster that takes so many pods."""

    def __init__(self, inner: Cluster, pods: int) -> None:
        super().__init__(inner, fail_at=0, after=False)
        self.left, self.made = pods, Counter[str]()

    async def create(self, body: Object) -> Object:
        if body["kind"] == "Pod":
            if not self.left:
                raise Forbidden("exceeded quota: pods")
            self.left -= 1
            self.made["gated" if body["spec"].get("schedulingGates") else "on a node"] += 1
        return await super().create(body)

    async def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
        self.left += ref.kind == "Pod"
        return await super().delete(ref, grace_s=grace_s)


def test_a_gang_that_a_quota_cuts_short_holds_no_room_and_says_why(tmp_path: Path) -> None:
    async def whole() -> None:
        world_ = embedded(tmp_path)
        cluster = Quota(world_.cluster, 2)
        reconcilers = {"TrainingJob": reconcile_trainingjob}
        given_settings = Settings(workers=4, resync_interval_s=600)
        operator = Operator(
            cluster, given_settings, reconcilers, clock=world_.clock, jitter=lambda: 0.5, everything=cluster
        )
        running = asyncio.ensure_future(operator.run())
        await settle()
        try:
            world_.objects.create(keys_object("default", operator.settings))
            world_.objects.create(CLAIM)
            node = world_.objects.create(ready_node("n0", 16))
            world_.objects.update_status(ref_of(node), ready_node("n0", 16)["status"])
            job = world(workers={"replicas": 4}).job
            metadata = {"name": "run", "namespace": "default"}
            world_.objects.create({**{key: job[key] for key in ("apiVersion", "kind", "spec")}, "metadata": metadata})
            await world_.clock.advance(60)
            pods = [pod for pod in world_.objects.of_kind("Pod") if not pod["metadata"].get("deletionTimestamp")]
            assert pods
            assert all(map(is_gated, pods)), cluster.made
            assert cluster.made["on a node"] == 2
            status = world_.objects.get(JOB)["status"]
            assert status["message"] == "exceeded quota: pods"
            assert status["lastFailure"]["detail"] == "2 of 4 pods were made: exceeded quota: pods"
            (free,) = operator.capacity.nodes()
            assert free.free["pods"] == 110
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await world_.kubelet.stop(0)

    asyncio.run(whole())


def test_a_gang_that_is_not_made_in_its_time_gives_its_room_back() -> None:
    run = world(ready_node("n0", 8), scheduling={"gangTimeoutSeconds": 60})
    cut_short(run)
    run.cluster.advance(61)
    run.cluster.reconcile(JOB)
    assert run.status["lastFailure"]["detail"] == "1 of 2 pods were made in 60 s"


def test_gates_that_others_add_to_a_pod_end_the_attempt_and_the_next_one_has_ours() -> None:
    run = world(ready_node("n0", 4), ready_node("n1", 4))
    for pod in made(run):
        pod["spec"]["schedulingGates"] = [{"name": "webhook"}]
    run.cluster.reconcile(JOB)
    run.cluster.collect()
    pods = made(run)
    assert run.attempt == 1
    assert pods
    assert all(map(is_gated, pods))
    assert run.status["attempts"][0]["failure"]["detail"] == "the pods have other scheduling gates: webhook"


def test_preferred_levels_that_do_not_hold_are_told_of_a_gang_without_gates_too() -> None:
    levels = [{"key": "x"}, {"key": "y"}, {"key": "zone", "mode": "Preferred"}]
    nodes = [ready_node("n0", 4, zone="a"), ready_node("n1", 4, zone="b")]
    run = world(*nodes, scheduling={"topology": levels})
    assert not any(map(is_gated, made(run)))
    run.cluster.settle()
    told = {found["type"]: found["message"] for found in run.status["conditions"]}["TopologyRelaxed"]
    assert told == "preferred levels that do not hold for every pod: x, y, zone"


def test_pods_that_were_made_outside_of_a_required_domain_end_the_attempt() -> None:
    """An earlier request, whose answer was lost, has made a pod elsewhere."""
    levels = [{"key": "x"}, {"key": "y"}, {"key": "zone", "mode": "Required"}]
    nodes = [ready_node("n0", 8, zone="a"), ready_node("n1", 8, zone="b")]
    run = world(*nodes, scheduling={"topology": levels})
    terms = made(run)[1]["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    pin = terms["nodeSelectorTerms"][0]["matchFields"][0]
    pin["values"] = [{"n0": "n1", "n1": "n0"}[pin["values"][0]]]
    rest(run)
    assert run.attempt == 1
    assert len({pinned_node(pod) for pod in run.gang}) == 1


EVENTS = st.lists(
    st.tuples(st.sampled_from(["pass", "die", "submit", "take", "leave", "run", "lose", "wait"]), st.integers(0, 5)),
    max_size=12,
)


@settings(max_examples=10, deadline=None)
@given(EVENTS, st.sampled_from([(), ({"key": "zone", "mode": "Required"},)]))
def test_no_room_is_given_twice_and_every_gang_ends_whole(
    events: list[tuple[str, int]], narrowest: tuple[dict[str, str], ...]
) -> None:
    """Jobs come, an operator dies after any write, others take room and leave, nodes go: then all is quiet."""
    topology = [{"key": "x"}, {"key": "y"}, *narrowest] if narrowest else []
    nodes = [ready_node(f"n{index}", 4, zone=f"z{index % 2}") for index in range(4)]
    run = world(*nodes, scheduling={"topology": topology})
    for event, number in events:
        happen(run, event, number)
    for _ in range(3):
        run.cluster.advance(400)
        rest(run, rounds=2)
    held: Counter[str] = Counter()
    for job in run.cluster.of_kind("TrainingJob"):
        gang = [pod for pod in gang_of(run, job) if not pod["metadata"].get("deletionTimestamp")]
        chosen = [node for pod in gang if (node := pinned_node(pod))]
        assert len(chosen) in (0, 2), "all or nothing"
        assert chosen or all(map(is_gated, gang))
        held.update(chosen)
        present = {f"n{index}": f"z{index % 2}" for index in range(4)}
        if narrowest and chosen:
            assert len({present[node] for node in chosen}) == 1
        assert job["status"].get("failuresWithoutProgress", 0) == 0
    assert all(count == 1 for count in held.values()), "a node has room for one pod"


def happen(run: Run, event: str, number: int) -> None:
    cluster = run.cluster
    jobs = [key_of(job) for job in cluster.of_kind("TrainingJob")]
    key = jobs[number % len(jobs)]
    if event == "submit" and len(jobs) < 3:
        name = f"job{len(jobs)}"
        cluster.add({**run.job, "metadata": {"name": name, "namespace": "default"}, "status": {}})
    elif event == "take" and not any(map(pod_on(f"n{number % 4}"), cluster.of_kind("Pod"))):
        cluster.add(taker(f"n{number % 4}", 4, f"other{number % 4}"))
    elif event == "leave":
        cluster.objects.pop(Key("Pod", "default", f"other{number % 4}"), None)
    elif event == "wait":
        cluster.advance(60.0 * number)
    elif event in ("pass", "die", "run", "lose"):
        for _ in range(3):
            with contextlib.suppress(Crash):
                cluster.reconcile(key, crash_after=number if event == "die" else None)
        cluster.collect()


def pod_on(node: str) -> Any:
    def is_there(pod: Object) -> bool:
        use = pod_use(pod)
        return use is not None and use.node == node

    return is_there


def gang_of(run: Run, job: Object) -> list[Object]:
    labels = {
        "stoker.dev/job-uid": job["metadata"]["uid"],
        "stoker.dev/attempt": str(job["status"]["attempt"]["number"]),
    }
    return [pod for pod in run.cluster.pods("trainer") if labels.items() <= pod["metadata"]["labels"].items()]


# The rest of a gang, beside every choice that there is


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.sampled_from(["a", "b"])), min_size=1, max_size=4),
    st.dictionaries(st.integers(0, 2), st.integers(0, 3), max_size=2),
    st.sampled_from(["Required", "Preferred", None]),
)
def test_the_rest_of_a_gang_is_placed_soundly_and_found_where_no_level_is_required(
    free: list[tuple[int, str]], fixed: dict[int, int], mode: Any
) -> None:
    gang = Gang(requests={GPU: 1}, replicas=3)
    nodes = tuple(
        NodeCapacity(name=f"n{index}", free={GPU: room, "pods": 9}, labels={"zone": zone})
        for index, (room, zone) in enumerate(free)
    )
    levels = (Level("x", "Preferred"), Level("y", "Preferred"), *((Level("zone", mode),) if mode else ()))
    held = {number: f"n{index}" for number, index in fixed.items()}
    labels = {node.name: node.labels for node in nodes}

    def sound(chosen: tuple[str, ...]) -> bool:
        taken = Counter(chosen)
        room = all(taken[node.name] <= node.free[GPU] for node in nodes if taken[node.name])
        kept = all(level.mode != "Required" for level in levels_not_kept(gang, chosen, levels, labels))
        return room and kept and all(chosen[number] == node for number, node in held.items())

    every = [chosen for chosen in product([node.name for node in nodes], repeat=3) if sound(chosen)]
    found = place_rest(gang, nodes, held, levels)
    if found is not None:
        assert found.nodes in every
    elif mode != "Required":
        assert not every


# Room that is promised to pods that are being made


def promised_pod(name: str, node: str, gpus: int) -> Object:
    run = world(ready_node(node, 8), workers={"replicas": 1, "gpusPerPod": gpus})
    (pod,) = made(run)
    return {**pod, "metadata": {"name": name, "namespace": "x"}}


def room(watch: CapacityWatch) -> dict[str, int]:
    return {node.name: node.free[GPU] for node in watch.nodes()}


def stored(resource: Object) -> Object:
    name = resource["metadata"]["name"]
    return {**resource, "metadata": {**resource["metadata"], "uid": f"uid-{name}", "resourceVersion": "1"}}


@pytest.mark.parametrize("listed_first", [True, False])
def test_room_is_held_from_the_decision_until_the_pod_is_seen(listed_first: bool) -> None:
    grown: list[int] = []
    watch = CapacityWatch(lambda: grown.append(1))
    watch.put(stored(ready_node("n0", 8)))
    pod, never = promised_pod("p0", "n0", 3), promised_pod("p1", "n0", 2)
    watch.promise(JOB, [pod, never])
    assert room(watch) == {"n0": 3}
    steps = [lambda: watch.put(stored(pod)), lambda: watch.note_made(stored(pod))]
    for step in steps if listed_first else reversed(steps):
        step()
    assert room(watch) == {"n0": 3}, "counted once"
    before = len(grown)
    watch.release(JOB)
    assert (room(watch), len(grown) - before) == ({"n0": 5}, 1), "what was not made is free, and those that wait hear"
    watch.remove(Key("Pod", "x", "p0"), "uid-p0")
    assert room(watch) == {"n0": 8}
