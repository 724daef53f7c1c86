"""A lost node ends an attempt: it is blamed, and the retry is free, in whatever order the cluster tells of it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.operator.domain.lost_nodes import NodeLoss
from stoker.operator.domain.plan import Object
from stoker.pod.causes import Cause
from testing.operator.simulated_cluster import Crash
from testing.operator.training_world import JOB, Run

LOST = "node-a"
BY_TAINT = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
CONSEQUENCES = (Cause.PEER_LOST, Cause.HANG, Cause.RANK_FAILED)


class LostNode:
    """A running gang without a budget, one pod of which is on the node that is lost."""

    def __init__(self, workers: int, rank: int) -> None:
        self.run = Run(
            workers={"replicas": workers}, training={"totalSteps": 100, "globalBatchSize": 6}, run={"backoffLimit": 0}
        )
        self.run.start()
        self.run.train(10, (self.run.save(10),))
        gang = self.run.gang
        for number, pod in enumerate(gang):
            pod["spec"]["nodeName"] = LOST if number == rank else f"node-{number}"
        self.name = gang[rank]["metadata"]["name"]

    @property
    def pod(self) -> Object | None:
        return next((pod for pod in self.run.cluster.pods("trainer") if pod["metadata"]["name"] == self.name), None)

    def tell(self, event: str, number: int) -> None:
        """Let one thing happen; `number` picks the survivor, its words, or the write that the operator dies after."""
        cluster = self.run.cluster
        if event == "pass":
            with contextlib.suppress(Crash):
                cluster.reconcile(JOB, crash_after=number)
        elif event == "survivor":
            alive = [pod for pod in self.run.gang if pod["status"]["phase"] == "Running" and pod is not self.pod]
            for pod in alive[number % 3 : number % 3 + 1]:
                cluster.end(pod, CONSEQUENCES[number % len(CONSEQUENCES)], detail="connection reset by peer")
        elif event == "silent":
            cluster.losses = NodeLoss(lost=frozenset({LOST}))
        elif event == "tainted" and self.pod is not None:
            self.pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
            self.pod["status"].setdefault("conditions", []).append(BY_TAINT)
        elif event in {"suspend", "go on"}:
            cluster.change_spec(JOB, lambda spec: spec["run"].update(suspend=event == "suspend"))

    def end(self) -> dict[str, Any]:
        """Let the node be lost and every survivor go, and the run begin its next attempt; return its status."""
        self.tell("silent", 0)
        for _ in range(4):
            self.run.cluster.settle_once()
        self.run.cluster.collect()
        self.tell("go on", 0)
        self.run.next_attempt()
        return self.run.status


HISTORIES = st.lists(
    st.tuples(
        st.sampled_from(["pass", "pass", "survivor", "survivor", "silent", "tainted", "suspend", "go on"]),
        st.integers(0, 5),
    ),
    max_size=12,
)


@settings(max_examples=12, deadline=None)
@example((2, 1), [("survivor", 0), ("pass", 9), ("suspend", 0), ("pass", 9), ("silent", 0)])
@given(st.sampled_from([(2, 0), (2, 1), (3, 1)]), HISTORIES)
def test_the_lost_node_is_blamed_for_free_in_any_order_of_events(
    form: tuple[int, int], history: list[tuple[str, int]]
) -> None:
    lost = LostNode(*form)
    for event, number in history:
        lost.tell(event, number)
    status = lost.end()
    assert (status["phase"], status["failuresWithoutProgress"]) == ("Starting", 0)
    [first] = [attempt for attempt in status["attempts"] if attempt["number"] == 0]
    failure, stopped = first.get("failure"), "suspend" in {event for event, _ in history}
    if failure is None:
        assert stopped, "only a stop ends an attempt without a failure"
        return
    nodes = {LOST, None} if stopped else {LOST}
    assert failure["action"] == "RetryFree"
    assert failure.get("node") in nodes, "a stop may remove the lost pod by force before the run goes on"


@pytest.mark.parametrize("removed", ["vanishes", "is being deleted"])
def test_a_pod_that_another_client_removes_ends_the_attempt_before_the_peer_that_misses_it(removed: str) -> None:
    lost = LostNode(2, 1)
    run, pod = lost.run, lost.pod
    assert pod is not None
    if removed == "vanishes":
        run.cluster.vanish(pod)
    else:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
    run.cluster.end(run.gang[0], Cause.PEER_LOST, detail="connection reset by peer")
    run.cluster.settle()
    failure = run.status["lastFailure"]
    expected = ("RankKilled", None) if removed == "vanishes" else ("Interrupted", LOST)
    assert (failure["cause"], failure.get("node"), failure["action"]) == (*expected, "RetryFree")
    assert (failure["pod"], run.status["failuresWithoutProgress"]) == (lost.name, 0)


@pytest.mark.parametrize("reason", ["Unknown", "ContainerStatusUnknown"])
def test_a_node_that_returns_and_knows_nothing_of_its_container_is_blamed_for_free(reason: str) -> None:
    lost = LostNode(2, 1)
    run, pod = lost.run, lost.pod
    assert pod is not None
    run.cluster.end(run.gang[0], Cause.PEER_LOST, detail="connection reset by peer")
    run.cluster.reconcile(JOB)
    assert run.status["lastFailure"]["cause"] == "PeerLost"
    terminated = {"exitCode": 255, "reason": reason, "finishedAt": "2026-01-01T00:01:00Z"}
    pod["status"] = {"phase": "Failed", "containerStatuses": [{"name": "main", "state": {"terminated": terminated}}]}
    run.cluster.settle()
    failure = run.status["lastFailure"]
    assert (failure["cause"], failure["node"], failure["action"]) == ("RankKilled", LOST, "RetryFree")
