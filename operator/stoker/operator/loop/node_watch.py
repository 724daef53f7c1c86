"""Watch over the nodes that carry our pods: their silence from one look to the next, and outages.

When an outage begins or ends, the resources with pods on its nodes are woken.

Owned by the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stoker.operator.domain.clock import Clock
from stoker.operator.domain.labels import ZONE
from stoker.operator.domain.lost_nodes import Carrier, NodeLimits, NodeLoss, NodeSilence, Outage, classify, note_silence
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.pods import ended
from stoker.operator.loop.store import Change, Store

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks while a node is silent."""


@dataclass(frozen=True)
class NodeCounts:
    """Counts for Prometheus."""

    silent: int
    """Silent nodes that carry our pods."""
    in_outage: int
    outages: int
    """Outages that began since this operator began to lead."""


class NodeWatch:
    """Silent and lost nodes.

    Args:
        watched: whether news of nodes can arrive.
        wake: called with every node that joins or leaves an outage.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        limits: NodeLimits,
        watched: Callable[[], bool],
        wake: Callable[[Object], None],
    ) -> None:
        self.store = store
        self.clock = clock
        self.limits = limits
        self.watched = watched
        self.wake = wake
        self._silent: set[str] = set()
        self._known = NodeSilence()
        self._due_at = float("-inf")
        self._began = 0
        store.listeners.append(self._on_change)

    async def run(self) -> None:
        """Look at the nodes for ever."""
        while True:
            self.look()
            await self.clock.sleep(LOOK_S)

    def look(self) -> None:
        """Take note of the silent nodes of this moment."""
        before, now_s = self._known, self.clock.monotonic()
        self._due_at = now_s + LOOK_S
        if not self._silent and not before.since_s:
            return
        self._known = note_silence(before, self._carriers(), now_s, self.limits, watched=self.watched())
        self._report_outages(before.outages, self._known.outages)

    def losses(self) -> NodeLoss:
        """Lost and silent nodes now; looks first where a node fell silent or came back since the last look."""
        if self.clock.monotonic() >= self._due_at:
            self.look()
        return classify(self._known, self.clock.monotonic(), self.limits)

    @property
    def counts(self) -> NodeCounts:
        return NodeCounts(len(self._known.since_s), len(self._known.outages), self._began)

    def _on_change(self, change: Change) -> None:
        if change.object["kind"] != "Node":
            return
        name = change.object["metadata"]["name"]
        silent = change.new is not None and is_silent(change.new)
        if silent == (name in self._silent):
            return
        self._silent ^= {name}
        self._due_at = float("-inf")

    def _carriers(self) -> dict[str, Carrier]:
        """Nodes with a pod of ours that has not ended."""
        pods = self.store.of_kind("Pod")
        names = sorted({str(pod["spec"].get("nodeName") or "") for pod in pods if not ended(pod)})
        nodes = {name: self.store.get(Key("Node", "", name)) for name in names}
        return {name: Carrier(name in self._silent, _zone(node)) for name, node in nodes.items() if node is not None}

    def _report_outages(self, before: Mapping[str, Outage], now: Mapping[str, Outage]) -> None:
        for name in sorted(before.keys() ^ now.keys()):
            node = self.store.get(Key("Node", "", name))
            if node is not None:
                self.wake(node)
        zones = {outage.zone: outage for outage in now.values()}
        past = {outage.zone for outage in before.values()}
        for zone in sorted(zones.keys() - past):
            self._began += 1
            log.warning("no pod counts as lost: %s", zones[zone].text)
        for zone in sorted(past - zones.keys()):
            log.info("the outage of %s is over", f"zone {zone}" if zone else "nodes")


def is_silent(node: Object) -> bool:
    """Whether the node's heartbeats stay away; a node that reports a problem is not silent."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(found["type"] == "Ready" and found["status"] == "Unknown" for found in conditions)


def _zone(node: Object) -> str:
    return str((node["metadata"].get("labels") or {}).get(ZONE, ""))
