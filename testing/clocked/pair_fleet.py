"""A prefill and a decode pool of clocked engines behind the router's choice of pairs, under the autoscaler, on a trace.

As `fleet`, with two pools: the policy `cacheAware` splits requests by predicted seconds, blocks travel, and both pools
are reviewed together, with flips of roles. All GPUs are alike and a replica has one: what is not free stays pending.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stoker.operator.domain.autoscaling.decision import REVIEW_S, Decision, Limits, Memory, Others, PoolInput
from stoker.operator.domain.autoscaling.load_window import LoadWindow
from stoker.operator.domain.autoscaling.pair_review import Member, review_pair
from stoker.operator.domain.autoscaling.prediction import Goals
from stoker.router.cache_aware import CacheAware
from stoker.router.pairs import Pair, exposed_s
from stoker.router.standing import TOKENS_PER_S
from stoker.router.work import Work
from testing.clocked.fleet import POLL_S, most_turns
from testing.clocked.pair_replica import HANDOVER_S, PEER, PairReplica
from testing.clocked.replica import EngineSettings, Served
from testing.clocked.trace import TracedRequest

RETRY_S = 0.05
"""Until an answer that has no room at its decode engine is tried again; the prefill engine goes on."""
PoolRole = Literal["prefill", "decode"]
ROLES: tuple[PoolRole, PoolRole] = ("prefill", "decode")


@dataclass(frozen=True)
class PairSettings:
    """Two pools and how they are scaled."""

    engine: EngineSettings
    replicas: tuple[int, int]
    """Of the prefill and of the decode pool at the beginning, ready; for ever without `limits`."""
    limits: tuple[Limits, Limits] | None = None
    gpus: int | None = None
    """Of the nodes, for both pools; None: as many as are asked for."""
    flips: bool = True
    startup_s: float = 120.0


@dataclass
class PairResult:
    """The requests with their times, what changed the pools, and what they cost."""

    served: list[Served] = field(default_factory=list)
    replica_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROLES, 0.0))
    """Seconds of replicas by the role that they had."""
    decisions: list[tuple[PoolRole, Decision]] = field(default_factory=list)
    splits: int = 0

    def attained(self, goals: Goals) -> float:
        """Share of requests that met both goals."""
        return sum(found.meets(goals) for found in self.served) / len(self.served)

    def most_turns(self, role: PoolRole) -> int:
        """Most changes of a pool's direction in ten minutes."""
        return most_turns(found for pool, found in self.decisions if pool == role)


class _Pool:
    """What the autoscaler remembers of one pool."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.window, self.memory = LoadWindow(), Memory()


class PairFleet:
    """One simulation."""

    def __init__(self, settings: PairSettings, requests: Sequence[TracedRequest]) -> None:
        self.settings, self.requests = settings, requests
        self.policy = CacheAware()
        self.pools = {role: _Pool(count) for role, count in zip(ROLES, settings.replicas, strict=True)}
        self.ready: list[PairReplica] = []
        self.draining: list[PairReplica] = []
        self.starting: dict[str, PoolRole] = {}
        self.pending: list[PoolRole] = []
        """Replicas without a GPU."""
        self.held: list[Served] = []
        self.result = PairResult()
        self._turn, self._paid_s = 0, 0.0
        self._names, self._order = itertools.count(), itertools.count()
        self._events: list[tuple[float, int, str, Any]] = []

    def run(self) -> PairResult:
        """Serve the whole trace."""
        for role, pool in self.pools.items():
            self.ready += [self._made(role) for _ in range(pool.wanted)]
        self._at(self.requests[0].at_s, "arrival", 0)
        if self.settings.limits is not None:
            self._at(POLL_S, "poll", None)
            self._at(REVIEW_S, "review", None)
        acts: dict[str, Callable[[float, Any], None]] = {
            "arrival": self._arrive, "step": self._step, "ended": self._ended, "taken": self._take_over,
            "poll": self._poll, "review": self._review, "started": self._started,
        }  # fmt: skip
        now_s = 0.0
        while len(self.result.served) < len(self.requests):
            now_s, _, kind, value = heapq.heappop(self._events)
            self._pay(now_s)
            acts[kind](now_s, value)
        return self.result

    def _pay(self, now_s: float) -> None:
        """Count the time of all replicas that have a GPU."""
        roles = [one.role for one in (*self.ready, *self.draining)] + list(self.starting.values())
        for role in roles:
            self.result.replica_s[role] += now_s - self._paid_s
        self._paid_s = now_s

    # Requests

    def _arrive(self, now_s: float, place: int) -> None:
        if place + 1 < len(self.requests):
            self._at(self.requests[place + 1].at_s, "arrival", place + 1)
        self._route(now_s, Served(self.requests[place], now_s))

    def _route(self, now_s: float, served: Served) -> None:
        if not self.ready:
            self.held.append(served)
            return
        for one in self.ready:
            one.tell(now_s)
        work = Work(served.request.prompt, served.request.chain())
        self._turn += 1
        pair: Pair[PairReplica] = self.policy.pair(self.ready, self.ready, self._turn, work)
        self.policy.note(work, pair)
        uncached = max(pair.uncached, 0)
        if pair.helper is None:
            pair.answers.add(now_s, served, uncached)
        else:
            self.result.splits += 1
            pair.answers.expect(served)
            pair.helper.help(now_s, served, pair.answers, uncached)
        self._go_on(now_s, pair.computes)

    def _go_on(self, now_s: float, replica: PairReplica) -> None:
        if not replica.stepping:
            self._step(now_s, replica)

    def _step(self, now_s: float, replica: PairReplica) -> None:
        replica.stepping = replica.busy
        if replica.busy:
            end_s, ended = replica.step(now_s)
            self._at(end_s, "ended", (replica, ended))
            for served, owner in replica.begun:
                self._at(end_s + _travel_s(replica, served), "taken", (served, replica, owner))
            replica.begun.clear()
            self._at(end_s, "step", replica)

    def _ended(self, now_s: float, value: tuple[PairReplica, list[Served]]) -> None:
        replica, ended = value
        self.result.served += ended
        replica.pending -= len(ended)
        self._drained(now_s)

    def _take_over(self, now_s: float, value: tuple[Served, PairReplica, PairReplica]) -> None:
        """Let the decode engine go on; a help that has ended was the whole answer."""
        served, helper, owner = value
        if not helper.helps(served):
            return
        if owner.take_over(now_s, served):
            helper.relieve(served)
            self._go_on(now_s, owner)
            self._drained(now_s)
        else:
            self._at(now_s + RETRY_S, "taken", value)

    # Replicas

    def _made(self, role: PoolRole) -> PairReplica:
        return PairReplica(f"r{next(self._names)}", self.settings.engine, role)

    def _started(self, now_s: float, name: str) -> None:
        role = self.starting.pop(name, None)
        if role is not None:
            self.ready.append(self._made(role))
            held, self.held = self.held, []
            for served in held:
                self._route(now_s, served)

    @property
    def _free(self) -> int:
        used = len(self.ready) + len(self.draining) + len(self.starting)
        return (self.settings.gpus if self.settings.gpus is not None else 1 << 20) - used

    def _drained(self, now_s: float) -> None:
        self.draining = [one for one in self.draining if one.pending]
        while self.pending and self._free > 0:
            self._begin(now_s, self.pending.pop(0))

    def _begin(self, now_s: float, role: PoolRole) -> None:
        name = f"s{next(self._names)}"
        self.starting[name] = role
        self._at(now_s + self.settings.startup_s, "started", name)

    def _scale(self, now_s: float, role: PoolRole, change: int) -> None:
        """Start or drain replicas of a role."""
        for _ in range(change):
            self.pending.append(role)
        for _ in range(-change):
            starting = [name for name, found in self.starting.items() if found == role]
            if role in self.pending:
                self.pending.remove(role)
            elif starting:
                del self.starting[starting[-1]]
            else:
                one = min(self._of(role), key=lambda found: found.pending)
                self.ready.remove(one)
                self.draining.append(one)
        self._drained(now_s)

    def _of(self, role: PoolRole) -> list[PairReplica]:
        return [one for one in self.ready if one.role == role]

    # The autoscaler

    def _poll(self, now_s: float, _: None) -> None:
        for one in [*self.ready, *self.draining]:
            self.pools[_role(one)].window.record(now_s, one.name, one.report())
        self._at(now_s + POLL_S, "poll", None)

    def _review(self, now_s: float, _: None) -> None:
        seen = {role: self._input(now_s, role) for role in ROLES}
        members = [self._member(place, role, seen) for place, role in enumerate(ROLES)]
        free = self._free - len(self.pending)
        beside = None if self.settings.gpus is None else tuple(range(free, -1, -1)) or (free,)
        reviews = review_pair(now_s, members[0], members[1], beside, flips=self.settings.flips)
        for role, found in zip(ROLES, reviews, strict=True):
            self.pools[role].memory = found.memory
            self._follow(now_s, role, found.decision)
        self._at(now_s + REVIEW_S, "review", None)

    def _member(self, place: int, role: PoolRole, seen: dict[PoolRole, PoolInput]) -> Member:
        assert self.settings.limits is not None
        other = seen[ROLES[1 - place]]
        others: Others = "idle" if other.idle else "busy"
        placed = self.pools[role].wanted - self.pending.count(role)
        room = None if self.settings.gpus is None else placed + self._free
        limits = replace(self.settings.limits[place], placeable=room)
        return Member(limits, replace(seen[role], others=others), self.pools[role].memory)

    def _follow(self, now_s: float, role: PoolRole, decision: Decision) -> None:
        """Let replicas change their role; start and drain what is left of the change."""
        if decision.after != decision.before:
            self.result.decisions.append((role, decision))
        for _ in range(decision.flips):
            givers = self._of(ROLES[1 - ROLES.index(role)])
            one = min(givers, key=lambda found: (found.home != role, found.pending))
            one.role = role
        self.pools[role].wanted = decision.after
        self._scale(now_s, role, decision.after - decision.before - decision.flips)

    def _input(self, now_s: float, role: PoolRole) -> PoolInput:
        window, pool = self.pools[role].window, self.pools[role]
        own = self._of(role)
        names = [one.name for one in own]
        window.forget([one.name for one in (*self.ready, *self.draining) if one.role == role])
        newest = window.newest(names)
        uses = [found.owned_tokens / found.total_tokens for found in newest]
        return PoolInput(
            replicas=pool.wanted,
            ready=len(names),
            demand=window.demand(now_s, self.settings.startup_s),
            rate=window.rate(now_s),
            curve=window.curve(),
            shape=window.shape,
            measured=window.measured(now_s),
            evidence=window.evidence(now_s, len(names)),
            arrivals=window.arrivals(now_s),
            running=sum(found.running for found in newest),
            waiting=sum(found.waiting for found in newest),
            held=len(self.held),
            kv_use=sum(uses) / len(uses) if uses else 0.0,
            startup_s=self.settings.startup_s,
            borrowed=sum(one.role == role != one.home for one in self.ready),
            lent=sum(one.home == role != one.role for one in self.ready),
        )

    def _at(self, at_s: float, kind: str, value: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), kind, value))


def _role(one: PairReplica) -> PoolRole:
    return "prefill" if one.role == "prefill" else "decode"


def _travel_s(helper: PairReplica, served: Served) -> float:
    """Time until the blocks of a prompt have travelled, after its first token."""
    rate = (helper.load.prefill_tokens_per_s if helper.load else None) or TOKENS_PER_S
    return exposed_s(PEER, PEER, served.request.prompt, served.uncached / rate) or HANDOVER_S


def simulate_pair(settings: PairSettings, requests: Sequence[TracedRequest]) -> PairResult:
    """Serve a trace with two pools."""
    return PairFleet(settings, requests).run()
