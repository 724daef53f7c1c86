"""Replicas of several pods: made, counted, drained and replaced as wholes, in any order and at any crash point."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.operator.domain.plan import Key, Object
from stoker.operator.reconcile.enginepool.reconcile import reconcile_enginepool
from stoker.pod.causes import Cause
from testing.operator.serving_world import CHAT, POOL, Serving, disturb, label_of
from testing.operator.simulated_cluster import Crash

PODS = 3
WIDE = {"name": "main", "podsPerReplica": PODS, "parallelism": {"tensor": PODS}}


def wide(replicas: int = 2) -> Serving:
    """A deployment at rest."""
    serving = Serving(pools=[{**WIDE, "replicas": replicas}])
    serving.checkpoint(10)
    serving.rest(8)
    return serving


def replicas(serving: Serving) -> dict[str, list[Object]]:
    """Pods by the replica that they name, in the order of their numbers."""
    found: defaultdict[str, list[Object]] = defaultdict(list)
    for pod in serving.engines():
        found[label_of(pod, "replica")].append(pod)
    return {name: sorted(pods, key=lambda pod: label_of(pod, "node-rank")) for name, pods in found.items()}


def uids(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def env_of(pod: Object) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in pod["spec"]["containers"][0]["env"]}


def test_a_replica_of_several_pods_is_made_whole_and_its_leader_alone_gets_traffic() -> None:
    serving = wide()
    assert (serving.status["phase"], serving.status["ready"]) == ("Serving", "2/2")
    assert sorted(map(len, replicas(serving).values())) == [PODS, PODS]
    for name, pods in replicas(serving).items():
        assert [pod["metadata"]["name"] for pod in pods] == [name, f"{name}-1", f"{name}-2"]
        assert [env_of(pod)["STOKER_NODE_RANK"] for pod in pods] == ["0", "1", "2"]
        assert {env_of(pod)["MASTER_ADDR"] for pod in pods} == {f"{name}.chat-main.default.svc"}
        secrets = {v["secret"]["secretName"] for pod in pods for v in pod["spec"]["volumes"] if "secret" in v}
        assert secrets == {secret["metadata"]["name"] for secret in serving.cluster.of_kind("Secret")}
    leaders = {pods[0]["metadata"]["uid"] for pods in replicas(serving).values()}
    assert {backend["pod_uid"] for backend in serving.snapshot()["backends"]} == leaders
    counts = {name: serving.pool_status[name] for name in ("replicas", "readyReplicas", "updatedReplicas")}
    assert counts == {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2}
    assert "stoker.dev/node-rank=0" in serving.pool_status["selector"]
    (budget,) = serving.cluster.of_kind("PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == 2 * PODS - 1
    assert serving.cluster.plan(POOL).empty


@pytest.mark.parametrize(
    ("parallelism", "numbers", "meetings"),
    [
        ({"data": 2}, [0, 1], ["", ""]),
        ({"data": 4}, [0, 1], ["", ""]),
        ({"data": 2, "tensor": 2}, [0, 2], ["", "", "-2", "-2"]),
    ],
    ids=str,
)
def test_every_data_parallel_rank_of_a_replica_is_an_endpoint_and_drains_with_the_others(
    parallelism: dict[str, int], numbers: list[int], meetings: list[str]
) -> None:
    """One in each pod, two in each, and one in two pods, which meet at their first."""
    size = len(meetings)
    pool = {"name": "main", "podsPerReplica": size, "parallelism": parallelism, "replicas": 2}
    serving = Serving(pools=[pool | ({"ranksPerPod": 2} if parallelism["data"] == 4 else {})])
    serving.checkpoint(10)
    serving.rest(8)
    assert (serving.status["phase"], serving.status["ready"]) == ("Serving", "2/2"), "replicas are counted"
    for name, pods in replicas(serving).items():
        addresses = [f"{name}{meeting}.chat-main.default.svc" for meeting in meetings]
        assert [env_of(pod)["MASTER_ADDR"] for pod in pods] == addresses
    endpoints = {pods[number]["metadata"]["uid"] for pods in replicas(serving).values() for number in numbers}
    assert {backend["pod_uid"] for backend in serving.snapshot()["backends"]} == endpoints

    serving.cluster.calls.clear()
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=1))
    serving.rest()
    drained = {name for name, path, _ in serving.cluster.calls if path == "/drain"}
    (left,) = replicas(serving)
    assert len(drained) == len(numbers)
    assert not any(name.startswith(left) for name in drained)
    (pods,) = replicas(serving).values()
    serving.cluster.kill(pods[-1])
    serving.rest()
    assert serving.status["ready"] == "1/1"
    assert not uids(pods) & uids(serving.engines()), "a lost member takes the whole replica with it"


def test_pods_that_start_wait_for_no_secret_that_is_there() -> None:
    """The template has a placeholder for the name of the pool's key."""
    serving = Serving(pools=[{**WIDE, "replicas": 1}], model={"uri": "file:///m"})
    for _ in range(3):
        serving.cluster.settle_once()
    serving.cluster.reconcile(POOL)
    assert len(serving.engines()) == PODS
    assert serving.pool_status["message"] == "0 of 1 replicas are ready: waiting for the pod to start"
    (secret,) = serving.cluster.of_kind("Secret")
    del serving.cluster.objects[Key("Secret", "default", secret["metadata"]["name"])]
    serving.cluster.reconcile(POOL)
    assert f"Secret {secret['metadata']['name']} does not exist" in serving.pool_status["message"]


def test_a_member_that_ends_takes_its_replica_with_it_and_is_named() -> None:
    serving = wide()
    broken, other = sorted(replicas(serving).values(), key=lambda pods: str(pods[0]["metadata"]["name"]))
    serving.cluster.end(broken[0], Cause.RANK_FAILED, detail="rank 2 has ended: its connection is closed")
    serving.cluster.kill(broken[2])
    serving.cluster.end(broken[1], Cause.PEER_LOST, detail="rank 1 lost the leader")
    serving.cluster.reconcile(POOL)
    name = broken[0]["metadata"]["name"]
    assert serving.pool_status["failures"] == 1, "one failure, whatever the number of pods"
    assert f"replica {name}: {name}-2: RankKilled" in serving.pool_status["lastFailure"], "the cause of the others"
    assert not uids(broken) & uids(serving.engines())
    serving.rest()
    assert (serving.status["ready"], serving.pool_status["failures"]) == ("2/2", 0)
    assert uids(other) < uids(serving.engines())


def test_a_member_that_a_full_node_refuses_is_a_failure_so_that_no_replica_is_made_without_a_pause() -> None:
    serving = wide(1)
    (refused,) = replicas(serving).values()
    refused[1]["status"] = {"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "Pod was rejected"}
    serving.cluster.reconcile(POOL)
    assert serving.pool_status["failures"] == 1
    assert "OutOfnvidia.com/gpu: Pod was rejected" in serving.pool_status["lastFailure"]


def test_a_member_that_vanishes_or_is_evicted_takes_its_replica_with_it_and_counts_as_no_failure() -> None:
    serving = wide(1)
    for take in (
        serving.cluster.vanish,
        lambda pod: serving.cluster.delete(Key("Pod", "default", pod["metadata"]["name"])),
    ):
        before = serving.engines()
        take(next(iter(replicas(serving).values()))[1])
        serving.cluster.reconcile(POOL)
        assert all(
            pod["metadata"].get("deletionTimestamp")
            for pod in serving.engines()
            if pod["metadata"]["uid"] in uids(before)
        )
        serving.rest()
        assert (serving.status["ready"], serving.pool_status["failures"]) == ("1/1", 0)
        assert not uids(before) & uids(serving.engines())
    assert serving.cluster.events.count("PodLost") == 1


def test_a_smaller_pool_drains_a_leader_and_then_takes_all_its_pods_away() -> None:
    serving = wide()
    serving.cluster.calls.clear()
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=1))
    serving.rest()
    drained = {name for name, path, _ in serving.cluster.calls if path == "/drain"}
    assert len(drained) == 1
    (left,) = replicas(serving)
    assert left not in drained
    assert len(serving.engines()) == PODS


def test_a_replica_whose_making_was_interrupted_is_completed() -> None:
    for writes in (5, 7, 8):
        serving = Serving(pools=[{**WIDE, "replicas": 1}], model={"uri": "file:///m"})
        serving.cluster.settle_once()
        try:
            serving.cluster.reconcile(POOL, crash_after=writes)
            serving.cluster.reconcile(POOL, crash_after=writes)
        except Crash:
            pass
        serving.rest(8)
        assert [len(pods) for pods in replicas(serving).values()] == [PODS], writes
        assert serving.status["ready"] == "1/1"


def test_a_change_of_the_number_of_pods_rolls_by_whole_replicas() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(WIDE))
    for _ in range(20):
        serving.cluster.settle_once()
        assert len([backend for backend in serving.snapshot()["backends"] if not backend["draining"]]) >= 2
        serving.live()
        serving.cluster.advance(2)
    serving.rest(5)
    assert sorted(map(len, replicas(serving).values())) == [PODS, PODS]
    assert (serving.status["rollout"]["phase"], serving.status["ready"]) == ("Completed", "2/2")


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "pool",
                "pool",
                "deployment",
                "run",
                "snapshots",
                "drain",
                "collect",
                "kill engine",
                "vanish",
                "checkpoint",
                "scale",
                "wait",
            ]
        ),
        st.integers(0, 6),
    ),
    max_size=30,
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_any_order_and_any_crash_point_end_with_whole_replicas(events: list[tuple[str, int]]) -> None:
    serving = Serving(pools=[{**WIDE, "replicas": 2}])
    serving.checkpoint(5)
    for event, number in events:
        disturb(serving, event, number)
        if event == "pool":
            check_limits(serving)
    for _ in range(3):
        serving.cluster.advance(600)
        serving.rest(6)
    wanted = serving.cluster.objects[CHAT]["spec"]["pools"][0]["replicas"]
    assert sorted(map(len, replicas(serving).values())) == wanted * [PODS]
    assert serving.status["ready"] == f"{wanted}/{wanted}"
    assert serving.cluster.plan(POOL).empty


def check_limits(serving: Serving) -> None:
    """No replica has more pods than it should, and no deletion tears a replica apart for longer than one pass."""
    if POOL not in serving.cluster.objects:
        return
    plan = reconcile_of(serving)
    taken = {ref.name for ref in plan.delete}
    for pods in replicas(serving).values():
        assert len(pods) <= PODS
        names = {pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")}
        assert not taken & names or names <= taken, "all pods of a replica go together"
    for pod in plan.create:
        assert int(label_of(pod, "replica-pods")) == PODS


def reconcile_of(serving: Serving) -> Any:
    assert serving.cluster.reconcilers["EnginePool"] is reconcile_enginepool
    return serving.cluster.plan(POOL)
