"""Looks at the nodes that carry our pods, keeps their silence from one look to the next, and tells whom it concerns when an outage begins or ends."""

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
"""Between two looks while a node is silent."""


@dataclass(frozen=True)
class NodeCounts:
    """For Prometheus."""

    silent: int
    """Silent nodes that carry our pods."""
    in_outage: int
    outages: int
    """Outages that began since this operator leads."""


class NodeWatch:
    """`hears` says whether news of nodes can arrive; `wake` gets every node that an outage begins or ceases to hold."""

    def __init__(
        self, store: Store, clock: Clock, limits: NodeLimits, hears: Callable[[], bool], wake: Callable[[Object], None]
    ) -> None:
        self.store = store
        self.clock = clock
        self.limits = limits
        self.hears = hears
        self.wake = wake
        self._silent: set[str] = set()
        self._known = NodeSilence()
        self._due_at = float("-inf")
        self._began = 0
        store.listeners.append(self._on_change)

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self.look()
            await self.clock.sleep(LOOK_S)

    def look(self) -> None:
        """Take note of how things are at this moment."""
        before, now_s = self._known, self.clock.monotonic()
        self._due_at = now_s + LOOK_S
        if not self._silent and not before.since_s:
            return
        self._known = note_silence(before, self._carriers(), now_s, self.limits, heard=self.hears())
        self._tell_of_outages(before.outages, self._known.outages)

    def losses(self) -> NodeLoss:
        """What holds now. A node that fell silent or spoke since the last look is looked at first."""
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
        """Nodes on which a pod of ours has not ended."""
        pods = self.store.of_kind("Pod")
        names = sorted({str(pod["spec"].get("nodeName") or "") for pod in pods if not ended(pod)})
        nodes = {name: self.store.get(Key("Node", "", name)) for name in names}
        return {name: Carrier(name in self._silent, _zone(node)) for name, node in nodes.items() if node is not None}

    def _tell_of_outages(self, before: Mapping[str, Outage], now: Mapping[str, Outage]) -> None:
        for name in sorted(before.keys() ^ now.keys()):
            node = self.store.get(Key("Node", "", name))
            if node is not None:
                self.wake(node)
        zones = {outage.zone: outage for outage in now.values()}
        past = {outage.zone for outage in before.values()}
        for zone in sorted(zones.keys() - past):
            self._began += 1
            log.warning("no pod is taken for lost: %s", zones[zone].text)
        for zone in sorted(past - zones.keys()):
            log.info("the outage of %s is over", f"zone {zone}" if zone else "nodes")


def is_silent(node: Object) -> bool:
    """Whether the cluster does not hear of the node; one that answers badly is not silent."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(found["type"] == "Ready" and found["status"] == "Unknown" for found in conditions)


def _zone(node: Object) -> str:
    return str((node["metadata"].get("labels") or {}).get(ZONE, ""))
