"""Pods of nodes that nobody hears of any more, as reconcilers get to see them. Pure.

A cluster evicts such pods after minutes and cannot end them at all. A gang waits for none of that: pods of a lost node count as failed by
its loss, and those that are to go are removed by force. What a process on a node that was only cut off still writes carries the writer of
its own attempt, so two attempts never touch the same files. In an outage nothing of that happens, and the resource's condition says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from stoker.operator.domain.conditions import Condition, is_true, merge
from stoker.operator.domain.lost_nodes import Outage, Verdict
from stoker.operator.domain.plan import Event, Object, Observed, Plan, Ref
from stoker.operator.domain.pods import ended, ref_of

REASON = "NodeLost"
OUTAGE = "NodesSilent"
"""Condition while pods of the resource are on nodes of an outage."""


@dataclass(frozen=True)
class Seen:
    """The observation as reconcilers get it, and what follows from silent nodes."""

    observed: Observed
    lost: tuple[Ref, ...] = ()
    """Pods that were running on lost nodes."""
    look_again_s: float | None = None
    """When the next silent node counts as lost."""
    outage: Outage | None = None
    """What keeps pods of the resource itself from being lost."""


def mark_lost(seen: Observed, verdict: Verdict) -> Seen:
    """`seen` with the pods of lost nodes as failed."""
    pods = seen.of_kind("Pod")
    running = [pod for pod in pods if not ended(pod)]
    lost = tuple(ref_of(pod) for pod in running if _node_of(pod) in verdict.lost)
    gone = {ref.uid for ref in lost}
    marked = tuple(_failed(pod) if pod["metadata"]["uid"] in gone else pod for pod in pods)
    observed = replace(seen, objects={**seen.objects, "Pod": marked}) if lost else seen
    waits = [verdict.left_s[_node_of(pod)] for pod in running if _node_of(pod) in verdict.left_s]
    own = [_node_of(pod) for pod in running if _owns(seen.resource, pod)]
    outage = next((verdict.outages[name] for name in own if name in verdict.outages), None)
    return Seen(observed, lost, min(waits, default=None), outage)


def removed_by_force(plan: Plan, seen: Seen) -> Plan:
    """`plan` with the lost pods that it deletes, or that are its resource's and are being deleted already, among those removed by force.

    A pod that another resource only looks at stays until its owner has seen how it was lost.
    """
    deleted = set(plan.delete)
    own = [pod for pod in seen.observed.of_kind("Pod") if _owns(seen.observed.resource, pod)]
    being = {pod["metadata"]["uid"] for pod in own if pod["metadata"].get("deletionTimestamp")}
    force = tuple(ref for ref in seen.lost if ref in deleted or ref.uid in being)
    waits = [seconds for seconds in (plan.requeue_after_s, seen.look_again_s) if seconds is not None]
    return replace(
        plan,
        delete=tuple(ref for ref in plan.delete if ref not in force),
        force=force,
        requeue_after_s=min(waits, default=None),
    )


def with_outage(plan: Plan, seen: Seen, now: datetime) -> Plan:
    """`plan` whose status says that pods are not taken for lost, and why; an Event when that begins."""
    resource = seen.observed.resource
    status = plan.status if plan.status is not None else (resource.get("status") or {})
    said = is_true(status.get("conditions") or (), OUTAGE)
    if resource["metadata"].get("deletionTimestamp") or (seen.outage is None and not said):
        return plan
    text = f"no pod is taken for lost: {seen.outage.text}" if seen.outage else ""
    condition = Condition(OUTAGE, True if seen.outage else None, "Outage", text)
    generation = int(resource["metadata"].get("generation", 1))
    conditions = merge(status.get("conditions") or (), (condition,), now, generation)
    events = plan.events if said else (*plan.events, Event("Warning", OUTAGE, text))
    return replace(plan, status={**status, "conditions": conditions}, events=events)


def _node_of(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "")


def _owns(resource: Object, pod: Object) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == resource["metadata"].get("uid") for owner in owners)


def _failed(pod: Object) -> Object:
    message = f"node {_node_of(pod)} is not heard of any more"
    return {**pod, "status": {**pod.get("status", {}), "phase": "Failed", "reason": REASON, "message": message}}
