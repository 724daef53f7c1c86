"""A pool of clocked engines behind a router's policy, of a fixed size or under the autoscaler's rule, on a trace.

A simulation by events in the order of their times: arrivals, ends of steps, reports each 2 s, reviews each 5 s, starts
of replicas. It uses what runs in production: the engine's scheduler and blocks, the router's policies, the autoscaler's
windows and rule, and the router's admission where it has classes. A request without a ready engine is held, as a
router with `holdSeconds` does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from stoker.operator.domain.autoscaling.decision import REVIEW_S, Decision, Limits, Memory, PoolInput
from stoker.operator.domain.autoscaling.goal_report import GoalReport
from stoker.operator.domain.autoscaling.load_window import LoadWindow
from stoker.operator.domain.autoscaling.prediction import Goals
from stoker.operator.domain.autoscaling.rule import review
from stoker.router.admission import LOOK_S
from stoker.router.pairs import Pair, PairPolicy, cheapest
from stoker.router.policy import Policy, policy_named
from stoker.router.request_class import RequestClass
from stoker.router.work import Work
from testing.clocked.admission import ClockedAdmission, Place
from testing.clocked.pod import ClockedPod
from testing.clocked.replica import ClockedReplica, EngineSettings, Served
from testing.clocked.trace import TracedRequest

POLL_S = 2.0
TURNS_S = 600.0
"""Time in which changes of direction are counted."""


@dataclass(frozen=True)
class FleetSettings:
    """A pool and how it is scaled."""

    engine: EngineSettings
    ranks_as_one: int = 1
    """Replicas that are data ranks of one pod whose report does not tell them apart, in a pool of a fixed size."""
    replicas: int = 1
    """At the beginning, ready; for ever without `limits`."""
    limits: Limits | None = None
    startup_s: float = 120.0
    policy: str = "leastPending"
    classes: tuple[RequestClass, ...] = ()
    """Of the router; all requests come in the first one. What is refused gets no first token."""
    orders: tuple[tuple[float, int], ...] = ()
    """Of a pool that follows a plan: (seconds, change of the number of replicas)."""


@dataclass
class FleetResult:
    """The requests with their times, the decisions, and what the pool cost."""

    served: list[Served]
    replica_s: float
    """Seconds of replicas from their creation until they were gone."""
    decisions: list[Decision] = field(default_factory=list)
    """Those that changed the pool."""
    most: int = 0

    def attained(self, goals: Goals) -> float:
        """Share of requests that met both goals: the first token, and their mean gap between tokens."""
        return sum(found.meets(goals) for found in self.served) / len(self.served)

    def most_turns(self) -> int:
        """Most changes of direction in ten minutes."""
        return most_turns(self.decisions)


def most_turns(decisions: Iterable[Decision]) -> int:
    """Most changes of direction of one pool in ten minutes."""
    pairs = itertools.pairwise(decisions)
    turns = [after.at_s for before, after in pairs if (before.after > before.before) != (after.after > after.before)]
    return max((sum(begin <= at < begin + TURNS_S for at in turns) for begin in turns), default=0)


class Fleet:
    """One simulation."""

    def __init__(self, settings: FleetSettings, requests: Sequence[TracedRequest]) -> None:
        self.settings = settings
        self.requests = requests
        self.policy: Policy[Place] = policy_named(settings.policy)
        predicts = isinstance(self.policy, PairPolicy)
        self.admission = ClockedAdmission(settings.classes, predicts) if settings.classes else None
        self._looks = False
        """Whether the requests that wait in the router look again soon."""
        self.window, self.memory = LoadWindow(), Memory()
        self.wanted = settings.replicas
        self.starting: dict[str, float] = {}
        """Name -> when it was made."""
        self.ready: list[ClockedReplica] = []
        self.draining: list[ClockedReplica] = []
        self.held: deque[Served] = deque()
        self.result = FleetResult([], 0.0)
        self.give_up: Callable[[], bool] = lambda: False
        """Asked when requests ended; true ends the simulation."""
        self.gave_up = False
        self._made_s: dict[str, float] = {}
        self._names = itertools.count()
        self._pods: list[ClockedPod] = []
        self._turn = 0
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, Any]] = []

    def run(self) -> FleetResult:
        """Serve the whole trace."""
        for _ in range(self.settings.replicas):
            self._started(0.0, self._make(0.0))
        end_s = self.requests[-1].at_s
        self._at(self.requests[0].at_s, "arrival", 0)
        if self.settings.limits is not None:
            self._at(POLL_S, "poll", None)
            self._at(REVIEW_S, "review", None)
        for at_s, change in self.settings.orders:
            self._at(at_s, "ordered", change)
        acts: dict[str, Callable[[float, Any], None]] = {
            "arrival": self._arrive, "step": self._step, "ended": self._ended, "poll": self._poll,
            "look": self._look, "review": self._review, "started": self._started, "ordered": self._ordered,
        }  # fmt: skip
        now_s = 0.0
        while len(self.result.served) < len(self.requests) and not self.gave_up:
            now_s, _, kind, value = heapq.heappop(self._events)
            acts[kind](now_s, value)
        last_s = max(end_s, now_s)
        for replica in [*self.ready, *self.draining]:
            self._gone(last_s, replica.name)
        for name in list(self.starting):
            self._gone(last_s, name)
        return self.result

    # Requests

    def _arrive(self, now_s: float, place: int) -> None:
        request = self.requests[place]
        if place + 1 < len(self.requests):
            self._at(self.requests[place + 1].at_s, "arrival", place + 1)
        self._route(now_s, Served(request, request.at_s))

    def _route(self, now_s: float, served: Served) -> None:
        if not self.ready:
            self.held.append(served)
            return
        work = Work(served.request.prompt, served.request.chain())
        if self.admission is None:
            self._send(now_s, served, work, self._chosen(now_s, work))
            return
        self.admission.arrive(now_s, served, work, partial(self._chosen, now_s))
        self._admit(now_s)

    def _admit(self, now_s: float) -> None:
        """Send the requests of classes that may go; look again while others wait."""
        assert self.admission is not None
        for served, work, pair in self.admission.going(now_s, partial(self._chosen, now_s)):
            self._send(now_s, served, work, pair)
        self.result.served += self.admission.refused
        self.admission.refused.clear()
        if self.admission.waits and not self._looks:
            self._look_later(now_s)

    def _look_later(self, now_s: float) -> None:
        self._looks = True
        self._at(now_s + LOOK_S, "look", None)

    def _look(self, now_s: float, _: None) -> None:
        self._looks = False
        if self.ready:
            self._admit(now_s)
        else:
            self._look_later(now_s)

    def _send(self, now_s: float, served: Served, work: Work, pair: Pair[Place]) -> None:
        self._turn += 1
        if isinstance(self.policy, PairPolicy):
            self.policy.note(work, pair)
        found = pair.answers.next_rank
        found.add(now_s, served, max(pair.uncached, 0))
        if not found.stepping:
            self._step(now_s, found)

    def _chosen(self, now_s: float, work: Work, soonest: bool = False) -> Pair[Place]:
        """As `Backends` chooses: the replica, and the tokens that it is expected to compute."""
        places = self._places()
        if isinstance(self.policy, PairPolicy) or self.admission is not None:
            for place in places:
                place.tell(now_s)
        if isinstance(self.policy, PairPolicy):
            return self.policy.pair(places, (), self._turn + 1, work)
        turn = self._turn + 1
        own = cheapest(places, work.tokens, turn) if soonest else self.policy(places, turn, work)
        return Pair(own, None, work.tokens)

    def _places(self) -> Sequence[Place]:
        """What the router chooses among."""
        count = self.settings.ranks_as_one
        if count == 1:
            return self.ready
        while len(self._pods) * count < len(self.ready):
            begin = len(self._pods) * count
            self._pods.append(ClockedPod(self.ready[begin : begin + count]))
        return self._pods

    def _step(self, now_s: float, replica: ClockedReplica) -> None:
        replica.stepping = replica.busy
        if replica.busy:
            end_s, ended = replica.step(now_s)
            self._at(end_s, "ended", (replica, ended))
            self._at(end_s, "step", replica)

    def _ended(self, now_s: float, value: tuple[ClockedReplica, list[Served]]) -> None:
        replica, ended = value
        replica.pending -= len(ended)
        self.result.served += ended
        self.gave_up = bool(ended) and self.give_up()
        if replica.draining and not replica.pending and replica in self.draining:
            self.draining.remove(replica)
            self._gone(now_s, replica.name)

    # Replicas

    def _make(self, now_s: float) -> str:
        name = f"r{next(self._names)}"
        self._made_s[name] = now_s
        self.starting[name] = now_s
        return name

    def _started(self, now_s: float, name: str) -> None:
        if self.starting.pop(name, None) is None:
            return
        self.ready.append(ClockedReplica(name, self.settings.engine))
        self.result.most = max(self.result.most, len(self.ready))
        while self.held:
            self._route(now_s, self.held.popleft())

    def _gone(self, now_s: float, name: str) -> None:
        self.starting.pop(name, None)
        self.result.replica_s += now_s - self._made_s.pop(name)

    def _ordered(self, now_s: float, change: int) -> None:
        self._scale(now_s, self.wanted + change)

    def _scale(self, now_s: float, wanted: int) -> None:
        for _ in range(wanted - self.wanted):
            self._at(now_s + self.settings.startup_s, "started", self._make(now_s))
        for _ in range(self.wanted - wanted):
            if self.starting:
                self._gone(now_s, max(self.starting, key=lambda name: self.starting[name]))
                continue
            replica = min(self.ready, key=lambda found: found.pending)
            self.ready.remove(replica)
            replica.draining = True
            self.draining.append(replica)
            self._ended(now_s, (replica, []))
        self.wanted = wanted

    # The autoscaler

    def _poll(self, now_s: float, _: None) -> None:
        for replica in [*self.ready, *self.draining]:
            self.window.record(now_s, replica.name, replica.report())
        if self.admission is not None:
            self.window.record_router(now_s, "router", GoalReport(**self.admission.counts.as_wire()))
        self._at(now_s + POLL_S, "poll", None)

    def _review(self, now_s: float, _: None) -> None:
        assert self.settings.limits is not None
        decision, self.memory = review(now_s, self.settings.limits, self._input(now_s), self.memory)
        if decision.after != decision.before:
            self.result.decisions.append(decision)
            self._scale(now_s, decision.after)
        self._at(now_s + REVIEW_S, "review", None)

    def _input(self, now_s: float) -> PoolInput:
        names = [replica.name for replica in self.ready]
        newest = self.window.newest(names)
        seen = PoolInput(
            replicas=self.wanted,
            ready=len(names),
            demand=self.window.demand(now_s, self.settings.startup_s),
            rate=self.window.rate(now_s),
            curve=self.window.curve(),
            shape=self.window.shape,
            measured=self.window.measured(now_s),
            evidence=self.window.evidence(now_s, len(names)),
            arrivals=self.window.arrivals(now_s),
            running=sum(found.running for found in newest),
            waiting=sum(found.waiting for found in newest) + self.window.waiting_in_routers,
            held=len(self.held),
            startup_s=self.settings.startup_s,
        )
        uses = [found.owned_tokens / found.total_tokens for found in newest]
        return replace(seen, kv_use=sum(uses) / len(uses) if uses else 0.0)

    def _at(self, at_s: float, kind: str, value: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), kind, value))


def simulate(settings: FleetSettings, requests: Sequence[TracedRequest]) -> FleetResult:
    """Serve a trace with a pool."""
    return Fleet(settings, requests).run()


def attains(
    settings: FleetSettings, requests: Sequence[TracedRequest], goals: Goals, share: float
) -> FleetResult | None:
    """The result of a pool that attains the share of the goals; None as soon as it cannot any more."""
    fleet = Fleet(settings, requests)
    allowed = (1 - share) * len(requests)
    missed = 0
    seen = 0

    def hopeless() -> bool:
        nonlocal missed, seen
        for found in fleet.result.served[seen:]:
            missed += not found.meets(goals)
        seen = len(fleet.result.served)
        return missed > allowed

    fleet.give_up = hopeless
    result = fleet.run()
    return None if fleet.gave_up else result


def smallest_static(
    settings: FleetSettings, requests: Sequence[TracedRequest], goals: Goals, share: float, begin: int = 1
) -> tuple[int, FleetResult]:
    """The smallest fleet of a fixed size that attains the share of the goals, and its result; from `begin` upwards."""
    for count in itertools.count(begin):
        result = attains(replace(settings, replicas=count, limits=None), requests, goals, share)
        if result is not None:
            return count, result
    raise AssertionError("counting has no end")
