"""The autoscaler beside a queue: a replica that waits takes no room, is not broken, and makes no start longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stoker.operator.domain.placement.node_capacity import NodeCapacity
from stoker.operator.domain.plan import Object
from stoker.operator.domain.schedulers import Installed
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.load_watch import LoadWatch
from stoker.operator.loop.store import Store
from testing.operator.engine_load import load
from testing.operator.fakes import FakeClock
from testing.operator.serving_world import CHAT, POOL, Serving, condition_of
from testing.operator.small_kueue import SmallKueue

GOALS: dict[str, Any] = {"min": 1, "max": 6, "ttftMs": 1000, "scaleDownAfterSeconds": 60}
TEAM = {"backend": "kueue", "queueName": "team"}


FULL = NodeCapacity(name="n", free={"cpu": 0, "memory": 0, "pods": 0})
MAIN: dict[str, Any] = {"name": "main", "replicas": 1, "autoscaling": GOALS}
PAIR: tuple[dict[str, Any], ...] = (
    {**MAIN, "name": "prefill", "role": "prefill"},
    {**MAIN, "name": "decode", "role": "decode", "autoscaling": {**GOALS, "itlMs": 100}},
)


class Queued:
    """Pools with goals in a queue of Kueue that has room for `quota` pods."""

    def __init__(
        self, quota: int, size: int = 1, pools: Sequence[dict[str, Any]] = (MAIN,),
        nodes: tuple[NodeCapacity, ...] | None = None,
    ) -> None:  # fmt: skip
        """`nodes`: what the operator sees of them."""
        layout = {"podsPerReplica": size, "parallelism": {"tensor": size}, "scheduling": TEAM}
        self.serving = Serving(model={"uri": "file:///m"}, pools=[{**pool, **layout} for pool in pools])
        self.serving.cluster.settings = Settings(installed=Installed(kueue=True))
        self.kueue = SmallKueue(self.serving.cluster, quota)
        self.store, self.clock = Store(), FakeClock()
        self.watch = LoadWatch(self.store, self.clock, lambda _: None, lambda: nodes)
        self.done: dict[str, float] = {}
        self.follow()

    def follow(self) -> None:
        """Let the operator act on the decisions, Kueue admit and pods get ready."""
        self.serving.cluster.scaling = self.watch.scaling(CHAT)
        for _ in range(6):
            self.serving.cluster.settle_once()
            self.kueue.work()
            self.serving.live()
        self.serving.cluster.settle_once()
        for found in self.serving.cluster.objects.values():
            self.store.put(found)

    def engines(self) -> list[Object]:
        return [
            pod
            for pod in self.serving.engines()
            if pod["status"]["phase"] == "Running" and pod["metadata"]["labels"].get("stoker.dev/node-rank", "0") == "0"
        ]

    def serve(self, seconds: int, rate: float) -> None:
        """Let time pass; the running engines share the requests, more than they can answer in time."""
        for number in range(seconds):
            self.clock.passed_s += 1
            for pod in self.engines():
                name = pod["metadata"]["name"]
                self.done[name] = self.done.get(name, 0.0) + rate / len(self.engines())
                count = round(self.done[name])
                if number % 2 == 0:
                    self.watch.note(pod, {"load": load(count, count, running=1)})
            if number % 5 == 4:
                self.watch.review_all()
                self.follow()


@pytest.mark.parametrize("size", [1, 2])
def test_while_replicas_wait_in_a_queue_no_more_are_asked_for(size: int) -> None:
    queued = Queued(quota=2 * size, size=size)
    queued.serve(60, 200.0)
    asked = queued.serving.cluster.objects[POOL]["spec"]["replicas"]
    assert 2 < asked < GOALS["max"], "more than the quota holds, which only the queue knows"
    queued.serve(120, 200.0)
    assert queued.serving.cluster.objects[POOL]["spec"]["replicas"] == asked
    assert queued.serving.pool_status["queuedReplicas"] == asked - 2
    newest = queued.watch.scaling(CHAT)["main"].newest
    assert (newest.reason, newest.inputs["placeable"]) == ("WaitingForRoom", "2")
    limited = condition_of(queued.serving.status, "AutoscalingLimited")["message"]
    assert limited == "spec.pools[main].autoscaling: Queued: the goals need more replicas than their queue admits"
    assert not queued.serving.pool_status.get("failures")
    queued.kueue.quota = asked * size
    queued.serve(60, 200.0)
    assert len(queued.engines()) == asked
    assert queued.watch.scaling(CHAT)["main"].newest.reason != "WaitingForRoom"


def test_while_a_replica_of_a_pair_waits_in_a_queue_the_nodes_divide_nothing() -> None:
    """What nodes have left is no room: the queue gives it, to both pools."""
    queued = Queued(quota=3, pools=PAIR, nodes=(FULL,))
    queued.serve(120, 300.0)
    newest = {name: found.newest for name, found in queued.watch.scaling(CHAT).items()}
    assert len(queued.serving.engines()) > len(queued.engines()) == 3, "some wait"
    assert {found.reason for found in newest.values()} == {"WaitingForRoom"}
    for name, placed in (("prefill", 2), ("decode", 1)):
        assert newest[name].inputs["besideOther"] == str(GOALS["max"]), "the full nodes leave nothing, and do not count"
        assert f"there is room for {placed} replicas" in newest[name].message


def test_the_time_in_a_queue_is_no_part_of_the_start_up_time() -> None:
    queued = Queued(quota=1)
    for pod in queued.engines():
        pod["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T02:00:00Z"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T02:00:30Z"},
        ]
        queued.serving.cluster._touch(pod)
        queued.store.put(pod)
    queued.watch.review_all()
    (seen,) = [found for _, _, found, _ in queued.watch.inputs()]
    assert seen.startup_s == 30


def test_a_replica_that_finds_no_node_is_none_that_there_is_room_for() -> None:
    """Otherwise each review would ask for one more."""
    serving = Serving(model={"uri": "file:///m"}, pools=[{"name": "main", "replicas": 2, "autoscaling": GOALS}])
    for _ in range(4):
        serving.cluster.settle_once()
    serving.cluster.run(serving.engines()[0])
    store, clock = Store(), FakeClock()
    for found in serving.cluster.objects.values():
        store.put(found)
    watch = LoadWatch(store, clock, lambda _: None, lambda: ())
    watch.review_all()
    assert watch.scaling(CHAT)["main"].newest.inputs["placeable"] == "1"
