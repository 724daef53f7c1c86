"""A simulated deployment whose pool is scaled by its load while a canary goes on: engines and routers report both."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import ended, is_ready
from stoker.operator.loop.load_watch import LoadWatch
from stoker.operator.reconcile.enginepool.replica import draining, leaving
from testing.operator.canary_world import CanaryServing
from testing.operator.engine_load import load
from testing.operator.fakes import FakeClock
from testing.operator.serving_world import CHAT, POOL, label_of

ROUND_S = 2
ROUNDS_TO_REVIEW = 3


class ScaledCanary(CanaryServing):
    """`rate` requests come in each second; a replica answers at most `capacity`, what is more waits in its queue."""

    def __init__(self, autoscaling: dict[str, Any], *, replicas: int = 2, surge: int = 1, **rollout: Any) -> None:
        super().__init__(replicas=replicas, **rollout)
        pool = {"name": "main", "replicas": replicas, "maxSurge": surge, "maxUnavailable": 1 - min(surge, 1)}
        spec = {"pools": [{**pool, "autoscaling": autoscaling}], "router": {"holdSeconds": 60}}
        self.cluster.change_spec(CHAT, lambda found: found.update(spec))
        self.clock = FakeClock()
        self.watch = LoadWatch(self.cluster._store(), self.clock, lambda _: None, lambda: None)
        self.arriving, self.capacity = 0.0, 5.0
        self.held = 0.0
        """Requests that routers hold because no engine is ready."""
        self.done: defaultdict[str, float] = defaultdict(float)
        self.sizes: list[int] = []
        """Replicas of the pool after each round."""

    def offer(self, rate: float) -> None:
        """Let this many requests arrive each second from now on."""
        self.arriving, self.rate = rate, round(rate * ROUND_S)

    @property
    def replicas(self) -> int:
        """What `/scale` has."""
        return int(self.cluster.objects[POOL]["spec"]["replicas"])

    def serving_engines(self, revision: str | None = None) -> list[Object]:
        """Engines that are not draining, ready or not."""
        return [pod for pod in self.engines(revision) if not (ended(pod) or draining(pod) or leaving(pod))]

    def round(self) -> None:
        """Run one pass over everything and two seconds of the world, with a review now and then."""
        super().round()
        self.clock.passed_s += ROUND_S
        self._answer()
        self.watch.store = self.cluster._store()
        if len(self.sizes) % ROUNDS_TO_REVIEW == 0:
            self.watch.review_all()
        self.cluster.scaling = self.watch.scaling(CHAT)
        self.sizes.append(self.replicas)

    def _answer(self) -> None:
        """Give the requests of the round to ready engines by the shares; hold them where there is none."""
        ready = [pod for pod in self.serving_engines() if is_ready(pod)]
        offered = self.arriving * ROUND_S + self.held
        self.held = 0.0 if ready else offered
        weights = {pod["metadata"]["name"]: self._part(pod, ready) for pod in ready}
        whole = sum(weights.values()) or 1.0
        for pod in ready:
            name = pod["metadata"]["name"]
            rate = offered * weights[name] / whole / ROUND_S
            self.done[name] += min(rate, self.capacity) * ROUND_S
            count, busy = round(self.done[name]), min(rate / self.capacity, 1.0)
            waiting = max(round((rate - self.capacity) * ROUND_S), 0)
            figures = load(count, count, running=round(64 * busy), waiting=waiting)
            self.watch.note(pod, {"load": figures})
        for pod in self.cluster.pods("router"):
            if pod["status"]["phase"] == "Running":
                report = {**self.cluster.reports.get(pod["metadata"]["uid"], {}), "held": round(self.held)}
                self.cluster.report(pod, report)
                self.watch.note(pod, report)

    def _part(self, pod: Object, ready: list[Object]) -> float:
        """The part of the traffic that an engine gets: that of its revision, over the revision's ready engines."""
        shares, mine = self.shares, label_of(pod, "revision")
        alike = sum(label_of(other, "revision") == mine for other in ready)
        return (shares.get(mine, 0) if shares else 100 * alike / len(ready)) / alike
