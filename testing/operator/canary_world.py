"""A simulated deployment under traffic: routers count answers of each revision by the shares that they were given."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.pod.histogram import Histogram
from testing.operator.serving_world import Serving

STEPS = [
    {"percent": 10, "holdSeconds": 20, "minRequests": 20},
    {"percent": 50, "holdSeconds": 20, "minRequests": 20},
    {"percent": 100, "holdSeconds": 20},
]
GATES = [
    {"metric": "errorRate", "max": "0.02"},
    {"metric": "ttftP95Ms", "maxRatio": "1.2"},
    {"metric": "queueP95Ms", "max": "50"},
]


@dataclass(frozen=True)
class Quality:
    """How a revision answers."""

    error_percent: int = 0
    first_token_s: float = 0.1
    queue_s: float = 0.01
    failed_split_percent: int = 0
    """Of its requests, each of which another engine is to compute."""


class CanaryServing(Serving):
    """A deployment of type canary on the simulated cluster; every round brings `rate` requests."""

    def __init__(
        self, *, replicas: int = 4, rate: int = 300, pools: Sequence[dict[str, Any]] = (), **rollout: Any
    ) -> None:
        canary = {"steps": STEPS, "metricGates": GATES, **rollout.pop("canary", {})}
        layout: dict[str, Any] = {"pools": list(pools)} if pools else {}
        super().__init__(replicas=replicas, rollout={"type": "canary", "canary": canary, **rollout}, **layout)
        self.rate = rate
        self.quality: defaultdict[str, Quality] = defaultdict(Quality)
        self.answered: defaultdict[str, int] = defaultdict(int)
        """Requests that a revision was given, since the start."""
        self._windows: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {}

    @property
    def rollout(self) -> dict[str, Any]:
        return dict(self.status.get("rollout") or {})

    @property
    def canary(self) -> dict[str, Any]:
        return dict(self.rollout.get("canary") or {})

    @property
    def shares(self) -> dict[str, int]:
        """Percent of the traffic by revision, as the routers were told."""
        return {share["revision"]: share["percent"] for share in self.snapshot().get("shares", ())}

    def take_snapshots(self, *, healthy: bool = True) -> None:
        super().take_snapshots(healthy=healthy)
        stored = [c for c in self.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith("-backends")]
        if not stored:
            return
        snapshot = json.loads(stored[0]["data"]["backends.json"])
        for pod in self.cluster.pods("router"):
            uid = pod["metadata"]["uid"]
            if uid in self.cluster.reports:
                self.cluster.report(pod, {**self.cluster.reports[uid], "window": self._count(uid, snapshot)})

    def _count(self, uid: str, snapshot: dict[str, Any]) -> dict[str, Any]:
        name = snapshot.get("window", "")
        if self._windows.get(uid, ("", {}))[0] != name:
            self._windows.pop(uid, None)
        _, counts = self._windows.setdefault(uid, (name, {}))
        live = {found["revision"] for found in snapshot["backends"] if not found["draining"]}
        shares = {found["revision"]: found["percent"] for found in snapshot.get("shares", ())}
        for revision in sorted(live):
            self._add(counts, revision, self.rate * shares.get(revision, 0 if shares else 100) // 100)
        return {"id": name, "seconds": 0, "revisions": [{"revision": key, **value} for key, value in counts.items()]}

    def _add(self, counts: dict[str, dict[str, Any]], revision: str, number: int) -> None:
        quality = self.quality[revision]
        self.answered[revision] += number
        empty: dict[str, Any] = {"requests": 0, "errors": 0, "first_token_s": {}, "token_gap_s": {}, "queue_s": {}}
        old = counts.get(revision, empty)
        first, queue = Histogram.from_wire(old["first_token_s"]), Histogram.from_wire(old["queue_s"])
        if number:
            first.add(quality.first_token_s, number)
            queue.add(quality.queue_s, number)
        counts[revision] = {
            "requests": old["requests"] + number,
            "errors": old["errors"] + number * quality.error_percent // 100,
            "first_token_s": first.to_wire(),
            "token_gap_s": first.to_wire(),
            "queue_s": queue.to_wire(),
            "splits": old.get("splits", 0) + number,
            "failed_splits": old.get("failed_splits", 0) + number * quality.failed_split_percent // 100,
        }

    def started(self) -> str:
        """Serve the first checkpoint, then offer a second; return the revision that serves."""
        self.checkpoint(10)
        self.rest(8)
        assert self.status["phase"] == "Serving", self.status
        current = str(self.status["currentRevision"])
        self.checkpoint(20)
        return current

    def round(self) -> None:
        """Run one pass over everything and two seconds of the world."""
        self.cluster.settle_once()
        self.live()
        self.cluster.advance(2)
