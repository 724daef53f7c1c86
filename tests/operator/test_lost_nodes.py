"""A node that is silent for long enough takes its pods with it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from stoker.operator.lost_nodes import mark_lost, removed_by_force
from stoker.operator.plan import Object, Observed, Plan
from stoker.operator.pods import PodState, pod_state, ref_of
from stoker.operator.recovery import Action, first_failure

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def node(name: str, ready: str = "True", silent_s: float = 0.0) -> Object:
    since = (NOW - timedelta(seconds=silent_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": since}
    return {"kind": "Node", "metadata": {"name": name}, "status": {"conditions": [condition]}}


def pod(name: str, node_name: str, phase: str = "Running", *, deleting: bool = False) -> Object:
    metadata = {"name": name, "namespace": "a", "uid": f"uid-{name}", "labels": {"stoker.dev/node-rank": "0"}}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T11:59:59Z"
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": node_name}, "status": {"phase": phase}}


def observed(*found: Object) -> Observed:
    kinds = {kind: tuple(item for item in found if item["kind"] == kind) for kind in ("Node", "Pod")}
    return Observed({"kind": "TrainingJob"}, kinds)


def test_pods_of_a_silent_node_have_failed_by_its_loss_and_nobody_is_blamed() -> None:
    seen = mark_lost(observed(node("n", "Unknown", 30), node("m"), pod("a", "n"), pod("b", "m")), NOW, 10)
    lost, alive = seen.observed.of_kind("Pod")
    assert pod_state(lost) is PodState.FAILED
    assert alive == pod("b", "m")
    ending = first_failure([lost])
    assert ending is not None
    assert ending.action is Action.RETRY_FREE
    assert ending.node == "n"
    assert "node n is not heard of any more" in ending.detail


def test_a_node_is_given_its_time() -> None:
    seen = mark_lost(observed(node("n", "Unknown", 4), pod("a", "n")), NOW, 10)
    assert seen.lost == ()
    assert seen.look_again_s == 6
    assert removed_by_force(Plan(requeue_after_s=60), seen).requeue_after_s == 6
    assert removed_by_force(Plan(requeue_after_s=3), seen).requeue_after_s == 3


def test_a_node_that_answers_badly_keeps_its_pods() -> None:
    before = observed(node("n", "False", 500), pod("a", "n"))
    assert mark_lost(before, NOW, 10).observed == before


def test_an_ended_pod_stays_as_it_ended() -> None:
    seen = mark_lost(observed(node("n", "Unknown", 30), pod("a", "n", "Succeeded")), NOW, 10)
    assert seen.lost == ()
    assert pod_state(seen.observed.of_kind("Pod")[0]) is PodState.SUCCEEDED


def test_lost_pods_that_are_to_go_or_hang_in_their_deletion_go_by_force() -> None:
    hanging, wanted, other = pod("hanging", "n", deleting=True), pod("wanted", "n"), pod("other", "m")
    seen = mark_lost(observed(node("n", "Unknown", 30), node("m"), hanging, wanted, other), NOW, 10)
    plan = removed_by_force(Plan(delete=(ref_of(wanted), ref_of(other))), seen)
    assert set(plan.force) == {ref_of(hanging), ref_of(wanted)}
    assert plan.delete == (ref_of(other),)


def test_without_a_view_of_nodes_nothing_changes() -> None:
    before = observed(pod("a", "n"))
    seen = mark_lost(before, NOW, 10)
    plan = Plan(delete=(ref_of(pod("a", "n")),))
    assert seen.observed is before
    assert removed_by_force(plan, seen) == replace(plan)
