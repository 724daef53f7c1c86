"""Pods of lost nodes: a lost node takes its pods with it; an outage's nodes do not, and the resource reports it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from stoker.operator.api.metadata import Status
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.lost_nodes import NodeLoss, Outage
from stoker.operator.domain.plan import Event, Object, Observed, Plan
from stoker.operator.domain.pods import PodState, pod_state, ref_of
from stoker.operator.domain.recovery import first_failure
from stoker.operator.loop.lost_pods import mark_lost
from stoker.operator.reconcile.outcome import Outcome, derive_plan, with_lost_pods
from stoker.pod.causes import Action

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
LOST = NodeLoss(lost=frozenset("n"))
OUTAGE = NodeLoss(outages={"n": Outage(silent=3, nodes=4)})
TEXT = "no pod counts as lost: 3 of 4 nodes with pods are silent at once"
READY = {
    "type": "Ready",
    "status": "False",
    "reason": "Running",
    "message": "",
    "lastTransitionTime": "2026-01-01T11:00:00Z",
}


def pod(name: str, node_name: str, phase: str = "Running", *, deleting: bool = False, owner: str = "uid-job") -> Object:
    metadata: dict[str, Any] = {"name": name, "namespace": "a", "uid": f"uid-{name}"}
    metadata |= {"labels": {"stoker.dev/node-rank": "0"}, "ownerReferences": [{"uid": owner}]}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T11:59:59Z"
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": node_name}, "status": {"phase": phase}}


def observed(*pods: Object, **status: Any) -> Observed:
    """Return the view of a job whose present generation was observed before."""
    metadata = {"name": "job", "uid": "uid-job", "generation": 2}
    job = {"kind": "TrainingJob", "metadata": metadata, "status": {"observedGeneration": 2, **status}}
    return Observed(job, {"Pod": pods})


def derived(seen: Observed, outcome: Outcome | None = None) -> Plan:
    """Return the plan that a reconciler derives from the outcome."""
    status = Status.model_validate(seen.resource["status"])
    return derive_plan(outcome or Outcome(), seen=seen, status=status, fields={}, now=NOW)


def test_pods_of_a_lost_node_have_failed_by_its_loss_and_no_pod_is_blamed() -> None:
    lost, alive = mark_lost(observed(pod("a", "n"), pod("b", "m")), LOST).of_kind("Pod")
    assert pod_state(lost) is PodState.FAILED
    assert alive == pod("b", "m")
    ending = first_failure([lost])
    assert ending is not None
    assert ending.action is Action.RETRY_FREE
    assert ending.node == "n"
    assert "node n sends no heartbeats any more" in ending.detail


def test_the_pass_comes_again_when_a_node_with_pods_is_lost() -> None:
    seen = mark_lost(observed(pod("a", "n"), pod("b", "o", "Failed")), NodeLoss(left_s={"n": 6, "m": 2, "o": 1}))
    assert seen.lost_pods == ()
    assert with_lost_pods(Plan(requeue_after_s=60), seen).requeue_after_s == 6
    assert with_lost_pods(Plan(requeue_after_s=3), seen).requeue_after_s == 3


def test_an_ended_pod_stays_as_it_ended() -> None:
    before = observed(pod("a", "n", "Succeeded"))
    assert mark_lost(before, LOST) == before


def test_lost_pods_that_are_to_go_or_hang_in_their_deletion_go_by_force() -> None:
    hanging, wanted, other = pod("hanging", "n", deleting=True), pod("wanted", "n"), pod("other", "m")
    seen = mark_lost(observed(hanging, wanted, other), LOST)
    plan = derived(seen, Outcome(plan=Plan(delete=(ref_of(wanted), ref_of(other)))))
    assert set(plan.force_delete) == {ref_of(hanging), ref_of(wanted)}
    assert plan.delete == (ref_of(other),)


def test_a_pod_of_another_owner_stays_until_that_one_has_seen_its_loss() -> None:
    seen = mark_lost(observed(pod("theirs", "n", deleting=True, owner="uid-other")), LOST)
    assert derived(seen).force_delete == ()


def test_without_silent_nodes_nothing_changes() -> None:
    before = observed(pod("a", "n"))
    seen = mark_lost(before, NodeLoss())
    plan = Plan(delete=(ref_of(pod("a", "n")),))
    assert seen is before
    assert derived(seen, Outcome(plan=plan)) == replace(plan)


def test_in_an_outage_no_pod_is_marked_and_none_goes_by_force() -> None:
    seen = mark_lost(observed(pod("a", "n", deleting=True)), OUTAGE)
    plan = derived(seen, Outcome(plan=Plan(delete=(ref_of(pod("a", "n")),))))
    assert (plan.force_delete, plan.delete) == ((), (ref_of(pod("a", "n")),))
    assert pod_state(seen.of_kind("Pod")[0]) is PodState.TERMINATING


def test_the_resource_says_that_an_outage_keeps_its_pods_and_why() -> None:
    seen = mark_lost(observed(pod("a", "n"), message="step 3", conditions=[READY]), OUTAGE)
    plan = derived(seen)
    condition = {
        "type": "NodesSilent",
        "status": "True",
        "reason": "Outage",
        "message": TEXT,
        "observedGeneration": 2,
        "lastTransitionTime": "2026-01-01T12:00:00Z",
    }
    status = {"message": "step 3", "observedGeneration": 2, "conditions": [condition, READY]}
    assert plan == Plan(status=status, events=(Event("Warning", "NodesSilent", TEXT),))

    again = derived(mark_lost(observed(pod("a", "n"), **(plan.status or {})), OUTAGE))
    assert again == Plan(), "one event, and the same status as before, which is not written"

    over = derived(mark_lost(observed(pod("a", "n"), **(plan.status or {})), NodeLoss()))
    assert over == Plan(status={"message": "step 3", "observedGeneration": 2, "conditions": [READY]})


def test_the_plan_of_a_pass_keeps_what_it_says_itself() -> None:
    seen = mark_lost(observed(pod("a", "n"), message="starts"), OUTAGE)
    own = Outcome(health=Health.READY, reason="A", message="step 4", plan=Plan(events=(Event("Normal", "A", "b"),)))
    plan = derived(seen, own)
    assert plan.status is not None
    assert plan.status["message"] == "step 4"
    assert [event.reason for event in plan.events] == ["A", "NodesSilent"]


def test_only_the_owner_of_the_pods_says_so() -> None:
    seen = mark_lost(observed(pod("a", "n", owner="uid-other")), OUTAGE)
    assert derived(seen) == Plan()


def test_a_resource_that_goes_says_nothing_more() -> None:
    seen = mark_lost(observed(pod("a", "n")), OUTAGE)
    seen.resource["metadata"]["deletionTimestamp"] = "2026-01-01T11:59:59Z"
    assert derived(seen) == Plan()
