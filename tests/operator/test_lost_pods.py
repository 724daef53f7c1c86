"""A lost node takes its pods with it; the nodes of an outage do not, and the resource says so."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from stoker.operator.domain.lost_nodes import Outage, Verdict
from stoker.operator.domain.plan import Event, Object, Observed, Plan
from stoker.operator.domain.pods import PodState, pod_state, ref_of
from stoker.operator.domain.recovery import first_failure
from stoker.operator.loop.lost_pods import Seen, mark_lost, removed_by_force, with_outage
from stoker.pod.causes import Action

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
LOST = Verdict(lost=frozenset("n"))
OUTAGE = Verdict(outages={"n": Outage(silent=3, nodes=4)})
TEXT = "no pod is taken for lost: 3 of 4 nodes with pods are silent at once"


def pod(name: str, node_name: str, phase: str = "Running", *, deleting: bool = False, owner: str = "uid-job") -> Object:
    metadata: dict[str, Any] = {"name": name, "namespace": "a", "uid": f"uid-{name}"}
    metadata |= {"labels": {"stoker.dev/node-rank": "0"}, "ownerReferences": [{"uid": owner}]}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T11:59:59Z"
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": node_name}, "status": {"phase": phase}}


def observed(*pods: Object, **status: Any) -> Observed:
    job = {"kind": "TrainingJob", "metadata": {"name": "job", "uid": "uid-job", "generation": 2}, "status": status}
    return Observed(job, {"Pod": pods})


def test_pods_of_a_lost_node_have_failed_by_its_loss_and_nobody_is_blamed() -> None:
    seen = mark_lost(observed(pod("a", "n"), pod("b", "m")), LOST)
    lost, alive = seen.observed.of_kind("Pod")
    assert pod_state(lost) is PodState.FAILED
    assert alive == pod("b", "m")
    ending = first_failure([lost])
    assert ending is not None
    assert ending.action is Action.RETRY_FREE
    assert ending.node == "n"
    assert "node n is not heard of any more" in ending.detail


def test_the_pass_comes_again_when_a_node_with_pods_is_lost() -> None:
    seen = mark_lost(observed(pod("a", "n"), pod("b", "o", "Failed")), Verdict(left_s={"n": 6, "m": 2, "o": 1}))
    assert seen.lost == ()
    assert removed_by_force(Plan(requeue_after_s=60), seen).requeue_after_s == 6
    assert removed_by_force(Plan(requeue_after_s=3), seen).requeue_after_s == 3


def test_an_ended_pod_stays_as_it_ended() -> None:
    before = observed(pod("a", "n", "Succeeded"))
    assert mark_lost(before, LOST) == Seen(before)


def test_lost_pods_that_are_to_go_or_hang_in_their_deletion_go_by_force() -> None:
    hanging, wanted, other = pod("hanging", "n", deleting=True), pod("wanted", "n"), pod("other", "m")
    seen = mark_lost(observed(hanging, wanted, other), LOST)
    plan = removed_by_force(Plan(delete=(ref_of(wanted), ref_of(other))), seen)
    assert set(plan.force) == {ref_of(hanging), ref_of(wanted)}
    assert plan.delete == (ref_of(other),)


def test_a_pod_of_another_owner_stays_until_that_one_has_seen_its_loss() -> None:
    seen = mark_lost(observed(pod("theirs", "n", deleting=True, owner="uid-other")), LOST)
    assert removed_by_force(Plan(), seen).force == ()


def test_without_silent_nodes_nothing_changes() -> None:
    before = observed(pod("a", "n"))
    seen = mark_lost(before, Verdict())
    plan = Plan(delete=(ref_of(pod("a", "n")),))
    assert seen.observed is before
    assert with_outage(removed_by_force(plan, seen), seen, NOW) == replace(plan)


def test_in_an_outage_no_pod_is_marked_and_none_goes_by_force() -> None:
    seen = mark_lost(observed(pod("a", "n", deleting=True)), OUTAGE)
    plan = removed_by_force(Plan(delete=(ref_of(pod("a", "n")),)), seen)
    assert (plan.force, plan.delete) == ((), (ref_of(pod("a", "n")),))
    assert pod_state(seen.observed.of_kind("Pod")[0]) is PodState.TERMINATING


def test_the_resource_says_that_an_outage_keeps_its_pods_and_why() -> None:
    ready = {"type": "Ready", "status": "False", "reason": "Running", "lastTransitionTime": "t"}
    seen = mark_lost(observed(pod("a", "n"), phase="Running", conditions=[ready]), OUTAGE)
    plan = with_outage(Plan(), seen, NOW)
    condition = {
        "type": "NodesSilent",
        "status": "True",
        "reason": "Outage",
        "message": TEXT,
        "observedGeneration": 2,
        "lastTransitionTime": "2026-01-01T12:00:00Z",
    }
    assert plan == Plan(
        status={"phase": "Running", "conditions": [condition, ready]}, events=(Event("Warning", "NodesSilent", TEXT),)
    )

    again = with_outage(Plan(), mark_lost(observed(pod("a", "n"), **(plan.status or {})), OUTAGE), NOW)
    assert again == Plan(status=plan.status), "one event, and the same status as before, which is not written"

    over = with_outage(Plan(), mark_lost(observed(pod("a", "n"), **(plan.status or {})), Verdict()), NOW)
    assert over == Plan(status={"phase": "Running", "conditions": [ready]})


def test_the_plan_of_a_pass_keeps_what_it_says_itself() -> None:
    seen = mark_lost(observed(pod("a", "n"), phase="Starting"), OUTAGE)
    plan = with_outage(Plan(status={"phase": "Running"}, events=(Event("Normal", "A", "b"),)), seen, NOW)
    assert plan.status is not None
    assert plan.status["phase"] == "Running"
    assert [event.reason for event in plan.events] == ["A", "NodesSilent"]


def test_only_the_owner_of_the_pods_says_so() -> None:
    seen = mark_lost(observed(pod("a", "n", owner="uid-other")), OUTAGE)
    assert with_outage(Plan(), seen, NOW) == Plan()


def test_a_resource_that_goes_says_nothing_more() -> None:
    seen = mark_lost(observed(pod("a", "n")), OUTAGE)
    seen.observed.resource["metadata"]["deletionTimestamp"] = "2026-01-01T11:59:59Z"
    assert with_outage(Plan(), seen, NOW) == Plan()
