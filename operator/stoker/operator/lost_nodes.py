"""Pods of nodes that nobody hears of any more. Pure.

A cluster evicts such pods after minutes and cannot end them at all. A gang waits for none of that: once the node has been silent
for long enough its pods count as failed by the loss of their node, and those that are to go are removed by force. What a process
on a node that was only cut off still writes carries the writer of its own attempt, so two attempts never touch the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from stoker.operator.plan import Object, Observed, Plan, Ref
from stoker.operator.pods import ended, ref_of

REASON = "NodeLost"


@dataclass(frozen=True)
class Seen:
    """The observation as reconcilers get it, and what follows from lost nodes."""

    observed: Observed
    lost: tuple[Ref, ...] = ()
    """Pods that were running on lost nodes."""
    look_again_s: float | None = None
    """When the next silent node counts as lost."""


def mark_lost(seen: Observed, now: datetime, after_s: float) -> Seen:
    """`seen` with the pods of lost nodes as failed."""
    silent = {node["metadata"]["name"]: since for node in seen.of_kind("Node") if (since := _silent_since(node))}
    if not silent:
        return Seen(seen)
    due = {name: since + timedelta(seconds=after_s) for name, since in silent.items()}
    gone = {name for name, at in due.items() if at <= now}
    waits = [(at - now).total_seconds() for name, at in due.items() if name not in gone]
    pods = seen.of_kind("Pod")
    lost = {pod["metadata"]["uid"] for pod in pods if _node_of(pod) in gone and not ended(pod)}
    marked = tuple(_failed(pod) if pod["metadata"]["uid"] in lost else pod for pod in pods)
    observed = replace(seen, objects={**seen.objects, "Pod": marked})
    refs = tuple(ref_of(pod) for pod in pods if pod["metadata"]["uid"] in lost)
    return Seen(observed, refs, min(waits, default=None))


def removed_by_force(plan: Plan, seen: Seen) -> Plan:
    """`plan` with the lost pods that it deletes, or that are being deleted already, among those removed by force."""
    deleted = set(plan.delete)
    being = {pod["metadata"]["uid"] for pod in seen.observed.of_kind("Pod") if pod["metadata"].get("deletionTimestamp")}
    force = tuple(ref for ref in seen.lost if ref in deleted or ref.uid in being)
    waits = [seconds for seconds in (plan.requeue_after_s, seen.look_again_s) if seconds is not None]
    return replace(
        plan,
        delete=tuple(ref for ref in plan.delete if ref not in force),
        force=force,
        requeue_after_s=min(waits, default=None),
    )


def _silent_since(node: Mapping[str, Any]) -> datetime | None:
    """Since when the cluster has not heard of the node; None for one that answers, well or not."""
    for condition in node["status"]["conditions"]:
        if condition["type"] == "Ready" and condition["status"] == "Unknown":
            return datetime.fromisoformat(condition["lastTransitionTime"])
    return None


def _node_of(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "")


def _failed(pod: Object) -> Object:
    message = f"node {_node_of(pod)} is not heard of any more"
    return {**pod, "status": {**pod.get("status", {}), "phase": "Failed", "reason": REASON, "message": message}}
