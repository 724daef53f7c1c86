"""Pods of nodes that are lost, as reconcilers see them. Pure.

A cluster evicts such pods after minutes and cannot end them at all. A gang does not wait for that: pods of a lost node
count as failed by its loss, and the plan removes those that are to go by force. A process on a node that was only cut
off may still write; its folders carry the writer of its own attempt, so two attempts never touch the same files. In an
outage no pod is marked, and a condition of the resource reports the outage.

Called by `observe`.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.operator.domain.lost_nodes import NodeLoss
from stoker.operator.domain.plan import Object, Observed
from stoker.operator.domain.pods import ended, is_owned, ref_of

REASON = "NodeLost"


def mark_lost(seen: Observed, losses: NodeLoss) -> Observed:
    """`seen` in which the pods of lost nodes have failed; an observation without silent nodes stays the same object."""
    pods = seen.of_kind("Pod")
    running = [pod for pod in pods if not ended(pod)]
    lost = tuple(ref_of(pod) for pod in running if _node_of(pod) in losses.lost)
    waits = [losses.left_s[_node_of(pod)] for pod in running if _node_of(pod) in losses.left_s]
    own = [_node_of(pod) for pod in running if is_owned(pod, seen.resource["metadata"]["uid"])]
    outage = next((losses.outages[name] for name in own if name in losses.outages), None)
    if not lost and not waits and outage is None:
        return seen
    uids = {ref.uid for ref in lost}
    marked = tuple(_failed(pod) if pod["metadata"]["uid"] in uids else pod for pod in pods)
    objects = {**seen.objects, "Pod": marked} if lost else seen.objects
    return replace(seen, objects=objects, lost_pods=lost, next_loss_s=min(waits, default=None), outage=outage)


def _node_of(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "")


def _failed(pod: Object) -> Object:
    message = f"node {_node_of(pod)} sends no heartbeats any more"
    return {**pod, "status": {**pod.get("status", {}), "phase": "Failed", "reason": REASON, "message": message}}
