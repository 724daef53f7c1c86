"""The autoscaler's eyes: keeps the load of pools from the reports of their engines, and reviews each pool every 5 s.

It decides nothing itself: `domain/autoscaling` does, from plain values. It writes nothing: the deployment's reconcile
gets the decisions with its observation, writes them into the status and is the only writer of `/scale`.

Owned by the loop. Memory only: after a restart the windows fill again, and a pool shrinks no earlier than it would by a
new proof.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from stoker.operator.api.enginepool import EnginePool
from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.metadata import read
from stoker.operator.api.pool import SCALED_BY_STOKER, Pool, flipping_pools
from stoker.operator.domain.autoscaling.decision import MAX_AGE_S, REVIEW_S, Limits, Memory, Others, PoolInput
from stoker.operator.domain.autoscaling.goal_report import read_goals
from stoker.operator.domain.autoscaling.load_report import read_load
from stoker.operator.domain.autoscaling.load_window import LoadWindow, stale
from stoker.operator.domain.autoscaling.pair_review import Member, review_pair, reviewed
from stoker.operator.domain.autoscaling.prediction import EngineShape, Goals
from stoker.operator.domain.autoscaling.record import PoolScaling, first_record
from stoker.operator.domain.autoscaling.role_flip import Reviewed
from stoker.operator.domain.clock import Clock, timestamp
from stoker.operator.domain.labels import DEPLOYMENT_UID, POOL, ROLE, SCHEDULER, PodRole
from stoker.operator.domain.lent_pods import count_borrowed, count_lent, is_lent, served_pool
from stoker.operator.domain.placement.beside import Kind, count_beside
from stoker.operator.domain.placement.gang import Level
from stoker.operator.domain.placement.node_capacity import NodeCapacity, pod_use
from stoker.operator.domain.placement.place import count_placeable
from stoker.operator.domain.placement.replica_gang import gang_of_replica
from stoker.operator.domain.plan import Key, Object, Report
from stoker.operator.domain.pods import (
    created_at,
    ended,
    is_endpoint,
    is_ready,
    num_endpoints,
    replica_name,
    scheduled_at,
    waits_in_queue,
)
from stoker.operator.domain.queue.reading import DeviceNeedsOf, no_devices
from stoker.operator.loop.store import Store, key_of

STARTUP_S = 120.0
"""Assumed while no replica of the pool has become ready."""
STARTUPS = 20

Nodes = Callable[[], tuple[NodeCapacity, ...] | None]


class _Pool:
    """What is remembered of one pool."""

    def __init__(self) -> None:
        self.window = LoadWindow()
        self.memory = Memory()
        self.ready_since: dict[str, float] = {}
        self.startups: deque[float] = deque(maxlen=STARTUPS)
        self.scaling: PoolScaling | None = None
        self.seen: PoolInput | None = None
        self.puts_late_behind = False
        """Whether a class of the deployment's requests has a class for late ones."""

    @property
    def startup_s(self) -> float:
        """P90 from creation until ready."""
        ordered = sorted(self.startups)
        return ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else STARTUP_S

    def take(self, found: Reviewed, time: str) -> bool:
        """Keep a review's memory and record its decision; True when the deployment must look at it."""
        self.memory, self.seen, decision, before = found.memory, found.seen, found.decision, self.scaling
        self.scaling = before.then(decision, time) if before else first_record(decision, time)
        changed = before is None or (before.newest.reason, before.newest.infeasible) != (
            decision.reason, decision.infeasible,
        )  # fmt: skip
        return changed or decision.after != decision.before


class LoadWatch:
    """Loads and decisions of all pools that Stoker scales.

    Args:
        wake: queues a deployment whose decision changed.
        nodes: what the nodes have left; None where the operator cannot see them.
        devices: what a pod of a namespace with a spec takes of the devices of its claims.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        wake: Callable[[Object], None],
        nodes: Nodes,
        devices: DeviceNeedsOf = no_devices,
    ) -> None:
        self.store = store
        self.clock = clock
        self.wake = wake
        self.nodes = nodes
        self.devices = devices
        self._pools: dict[tuple[Key, str], _Pool] = {}
        self._heard_s: dict[str, float] = {}
        """When each router answered last, by uid."""

    async def run(self) -> None:
        """Review every pool for ever."""
        while True:
            await self.clock.sleep(REVIEW_S)
            self.review_all()

    def note(self, pod: Object, report: Report) -> None:
        """Take the answer of an engine's or a router's `/status`."""
        labels = pod["metadata"].get("labels") or {}
        deployment = self.store.by_uid(labels.get(DEPLOYMENT_UID, ""))
        if deployment is None:
            return
        if labels.get(ROLE) == PodRole.ROUTER:
            self._heard_s[pod["metadata"]["uid"]] = self.clock.monotonic()
            self._note_router(pod["metadata"]["uid"], key_of(deployment), report)
        load = read_load(report) if labels.get(ROLE) == PodRole.ENGINE else None
        if load is None:
            return
        found = self._pools.get((key_of(deployment), served_pool(pod)))
        if found is not None:
            found.window.record(self.clock.monotonic(), pod["metadata"]["uid"], load)

    def _note_router(self, uid: str, key: Key, report: Report) -> None:
        """Note what a router keeps back: each pool of the deployment would have a part in it."""
        if (goals := read_goals(report)) is None:
            return
        for (owner, _), kept in self._pools.items():
            if owner == key:
                kept.window.record_router(self.clock.monotonic(), uid, goals)

    def scaling(self, key: Key) -> dict[str, PoolScaling]:
        """The decisions about a deployment's pools, by pool."""
        return {pool: kept.scaling for (owner, pool), kept in self._pools.items() if owner == key and kept.scaling}

    def inputs(self) -> Iterator[tuple[Key, str, PoolInput, PoolScaling]]:
        """The newest review of each pool, for metrics."""
        for (key, pool), kept in sorted(self._pools.items()):
            if kept.seen is not None and kept.scaling is not None:
                yield key, pool, kept.seen, kept.scaling

    def review_all(self) -> None:
        """Review each pool that Stoker scales, and forget the others."""
        scaled = [(found, _scaled(found)) for found in self.store.of_kind("InferenceDeployment")]
        places = [(key_of(deployment), pool.name) for deployment, found in scaled for pool in found.pools]
        self._pools = {place: self._pools.get(place) or _Pool() for place in places}
        self._heard_s = {uid: heard_s for uid, heard_s in self._heard_s.items() if self.store.by_uid(uid) is not None}
        for deployment, found in scaled:
            if self._review(deployment, found):
                self.wake(deployment)

    def _review(self, deployment: Object, scaled: _Scaled) -> bool:
        """Review the pools of a deployment together; True when it must look at a decision."""
        pools = scaled.pools
        live = {pool.name: self._engine_pool(deployment, pool.name) for pool in pools}
        engines = [pod for found in live.values() if found is not None for pod in self._engines(found)]
        routers = [
            pod for pod in self.store.owned_by(deployment["metadata"]["uid"]) if _label(pod, ROLE) == PodRole.ROUTER
        ]
        watched = {pool.name: (self._pools[key_of(deployment), pool.name], pool, live[pool.name]) for pool in pools}
        present = {name: (kept, pool, found) for name, (kept, pool, found) in watched.items() if found is not None}
        for kept, pool, found in present.values():
            kept.puts_late_behind = scaled.puts_late_behind
            self._look(kept, found, pool, engines, routers)
        states = {name: _state(kept.seen) for name, (kept, _, _) in present.items()} | self._fixed(deployment, scaled)
        members = {
            name: self._member(kept, found, pool, engines, _joined(states, name))
            for name, (kept, pool, found) in present.items()
        }
        reviews = self._reviews(pools, members, live, engines)
        time = timestamp(self.clock.now())
        changes = [self._pools[key_of(deployment), name].take(found, time) for name, found in reviews.items()]
        return any(changes)

    def _reviews(
        self, pools: Sequence[Pool], members: Mapping[str, Member], live: Mapping[str, EnginePool | None],
        engines: list[Object],
    ) -> dict[str, Reviewed]:  # fmt: skip
        """Review a prefill and a decode pool together, and others each by itself."""
        now_s, names = self.clock.monotonic(), {pool.role: pool.name for pool in pools if pool.name in members}
        if len(members) != 2 or not {"prefill", "decode"} <= names.keys():
            return {name: reviewed(now_s, found) for name, found in members.items()}
        prefill, decode = names["prefill"], names["decode"]
        pair = members[prefill], members[decode]
        waiting = max(sum(found.seen.replicas for found in pair) - len(_placed(engines)), 0)
        beside = self._beside(live[prefill], live[decode], engines, waiting)
        one, other = review_pair(now_s, *pair, beside, flips=flipping_pools(pools) is not None)
        return {prefill: one, decode: other}

    def _engines(self, live: EnginePool) -> list[Object]:
        """The pods of a pool that answer requests: of a replica one, or one for each of its data-parallel ranks."""
        owned = self.store.owned_by(live.metadata.uid or "")
        return [pod for pod in owned if pod["kind"] == "Pod" and is_endpoint(pod)]

    def _look(self, kept: _Pool, live: EnginePool, pool: Pool, engines: list[Object], routers: list[Object]) -> None:
        """Note what one pool does, by the engines that serve it."""
        serving = [pod for pod in engines if served_pool(pod) == pool.name]
        lent, borrowed = count_lent(engines, pool.name), count_borrowed(engines, pool.name)
        replicas = live.spec.replicas + borrowed - lent
        seen = self._input(kept, live, pool, serving, routers, replicas)
        kept.seen = replace(seen, borrowed=borrowed, lent=lent)

    def _fixed(self, deployment: Object, scaled: _Scaled) -> dict[str, Others]:
        """What pools do that Stoker does not scale: they serve as long as they have replicas."""
        live = {name: self._engine_pool(deployment, name) for name in scaled.fixed}
        return {name: "busy" if found and found.spec.bounded_replicas else "idle" for name, found in live.items()}

    def _member(self, kept: _Pool, live: EnginePool, pool: Pool, engines: list[Object], others: Others) -> Member:
        """One pool before its review, beside what the other ones do."""
        assert kept.seen is not None
        kept.seen = replace(kept.seen, others=others)
        serving = [pod for pod in engines if served_pool(pod) == pool.name]
        limits = replace(_limits(pool, self._room(live, serving)), puts_late_behind=kept.puts_late_behind)
        return Member(limits, kept.seen, kept.memory, pool.gpus_per_pod * pool.pods_per_replica)

    def _input(
        self, kept: _Pool, live: EnginePool, pool: Pool, engines: list[Object], routers: list[Object], replicas: int
    ) -> PoolInput:
        """What a review needs. Engines beyond the replicas (of a canary, or that take the place of others) show
        nothing of what the replicas can do without them."""
        now_s = self.clock.monotonic()
        ready = {pod["metadata"]["uid"]: pod for pod in engines if is_ready(pod) and not ended(pod)}
        heard = [pod for pod in routers if self._age_s(pod) <= MAX_AGE_S]
        kept.window.forget(_uids(engines), _uids(heard))
        for uid, pod in ready.items():
            if uid in kept.ready_since or is_lent(pod):
                continue
            if (startup_s := _startup_s(pod)) is not None:
                kept.startups.append(startup_s)
        kept.ready_since = {uid: kept.ready_since.get(uid, now_s) for uid in ready}
        names = {uid: str(pod["metadata"]["name"]) for uid, pod in ready.items()}
        lines = (stale(kept.window, uid, name, kept.ready_since[uid], now_s) for uid, name in names.items())
        newest = kept.window.newest(ready)
        endpoints = max(map(num_endpoints, engines), default=1)
        return PoolInput(
            replicas=replicas,
            ready=_count_ready(ready.values()),
            copies=pool.parallelism.data,
            unknown=(*(line for line in lines if line is not None), *self._silent(live, routers)),
            demand=kept.window.demand(now_s, kept.startup_s),
            rate=kept.window.rate(now_s),
            curve=kept.window.curve(),
            shape=_shape_of_copy(kept.window.shape, pool),
            measured=kept.window.measured(now_s),
            evidence=kept.window.evidence(now_s, min(len(ready), replicas * endpoints)),
            arrivals=kept.window.arrivals(now_s),
            running=sum(found.running for found in newest),
            waiting=sum(found.waiting for found in newest) + kept.window.waiting_in_routers,
            held=sum(int((self.store.report(pod["metadata"]["uid"]) or {}).get("held") or 0) for pod in heard),
            kv_use=_mean(found.owned_tokens / found.total_tokens for found in newest if found.total_tokens),
            startup_s=kept.startup_s,
        )

    def _age_s(self, router: Object) -> float:
        """Seconds since the router's newest answer, which tells nothing of now when it is old; infinite without one."""
        return self.clock.monotonic() - self._heard_s.get(router["metadata"]["uid"], -math.inf)

    def _silent(self, live: EnginePool, routers: list[Object]) -> Iterator[str]:
        """A line for each router that answers no more, of a pool without replicas: only routers can wake it."""
        for pod in routers if not live.spec.replicas else ():
            if is_ready(pod) and MAX_AGE_S < (age_s := self._age_s(pod)) < math.inf:
                yield f"router {pod['metadata']['name']} has not answered for {age_s:.0f} s"

    def _room(self, live: EnginePool, serving: Sequence[Object]) -> int | None:
        """Replicas for which there is room, with those that have a place; None where nodes are not visible.

        There is none for more while one waits in the queue of its scheduler, whatever nodes have left.
        """
        placed, nodes = len(_placed(serving)), self.nodes()
        if any(map(waits_in_queue, serving)):
            return placed
        if nodes is None:
            return None
        kind = self._kind(live)
        return placed + count_placeable(kind.gang, nodes, kind.levels)

    def _beside(
        self, prefill: EnginePool | None, decode: EnginePool | None, engines: Sequence[Object], waiting: int
    ) -> tuple[int, ...] | None:
        """The decode replicas that have room beside 0, 1 ... further prefill replicas and those that wait for room;
        None where nodes are not visible, or a queue decides."""
        nodes = self.nodes()
        if nodes is None or prefill is None or decode is None or any(map(waits_in_queue, engines)):
            return None
        counts = [count - waiting for count in count_beside(self._kind(prefill), self._kind(decode), nodes)]
        return tuple(count for count in counts if count >= 0) or (max(counts),)

    def _kind(self, live: EnginePool) -> Kind:
        """What a replica of the pool takes of the nodes."""
        template = live.spec.revisions[0].template
        devices = self.devices(live.metadata.namespace, template.pod.get("spec") or {})
        levels = [Level(found.key, found.mode) for found in template.scheduling.topology] if template.scheduling else []
        return Kind(gang_of_replica(template.pod, template.pods_per_replica, template.config, devices), tuple(levels))

    def _engine_pool(self, deployment: Object, name: str) -> EnginePool | None:
        found = self.store.labelled(DEPLOYMENT_UID, deployment["metadata"]["uid"], "EnginePool")
        return next((read(EnginePool, item) for item in found if _label(item, POOL) == name), None)


@dataclass(frozen=True)
class _Scaled:
    """What Stoker scales of a deployment, by the spec in force."""

    pools: tuple[Pool, ...] = ()
    fixed: tuple[str, ...] = ()
    """Names of the others."""
    puts_late_behind: bool = False
    """Whether a class of requests has a class for late ones."""


def _scaled(deployment: Object) -> _Scaled:
    """The pools that Stoker scales; none before a spec was accepted."""
    accepted = (deployment.get("status") or {}).get("acceptedSpec")
    if accepted is None or deployment["metadata"].get("deletionTimestamp"):
        return _Scaled()
    spec = read(InferenceDeployment, {**deployment, "spec": accepted}).spec
    pools = [pool for pool in spec.pools if pool.autoscaling and pool.autoscaling.mode in SCALED_BY_STOKER]
    fixed = [pool.name for pool in spec.pools if pool not in pools]
    return _Scaled(tuple(pools), tuple(fixed), any(one.late_class is not None for one in spec.router.classes))


def _state(seen: PoolInput | None) -> Others:
    """What a pool does by its newest input."""
    return "unknown" if seen is None or seen.unknown else "idle" if seen.idle else "busy"


def _joined(states: Mapping[str, Others], name: str) -> Others:
    """What the pools beside the named one do together."""
    others = [state for other, state in states.items() if other != name]
    return next((state for state in ("busy", "unknown") if state in others), "idle")


def _limits(pool: Pool, room: int | None) -> Limits:
    settings = pool.autoscaling
    assert settings is not None
    limits = Limits(
        min=settings.min,
        max=settings.max,
        mode="load" if settings.mode == "load" else "slo",
        goals=Goals(_seconds(settings.ttft_ms), _seconds(settings.itl_ms)),
        placeable=room,
    )
    wait_s = settings.scale_down_after_seconds
    return limits if wait_s is None else replace(limits, scale_down_after_s=float(wait_s))


def _uids(pods: Iterable[Object]) -> list[str]:
    return [str(pod["metadata"]["uid"]) for pod in pods]


def _placed(pods: Iterable[Object]) -> set[str]:
    """Names of the replicas that have their place on the nodes: what is free is not for them."""
    return {replica_name(pod) for pod in pods if not ended(pod) and (is_ready(pod) or pod_use(pod) is not None)}


def _count_ready(pods: Collection[Object]) -> int:
    """Replicas all of whose endpoints are among these ready pods."""
    found = Counter(map(replica_name, pods))
    wanted = {replica_name(pod): num_endpoints(pod) for pod in pods}
    return sum(found[name] >= count for name, count in wanted.items())


def _shape_of_copy(shape: EngineShape | None, pool: Pool) -> EngineShape | None:
    """The limits of one copy. An endpoint reports the caches of all its copies as one, and the seats of each."""
    copies = max(pool.parallelism.data // pool.pods_per_replica, 1)
    return replace(shape, kv_tokens=shape.kv_tokens // copies) if shape is not None else None


def _startup_s(pod: Object) -> float | None:
    """Seconds from the pod's creation until it was ready; without the time in the queue of another scheduler."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    since = next((found.get("lastTransitionTime") for found in conditions if found["type"] == "Ready"), None)
    began = scheduled_at(pod) if _label(pod, SCHEDULER) else created_at(pod)
    if not since or began is None:
        return None
    return max((datetime.fromisoformat(since) - began).total_seconds(), 0.0)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _seconds(milliseconds: int | None) -> float | None:
    return milliseconds / 1000 if milliseconds is not None else None


def _label(resource: Object, label: str) -> str:
    return str((resource["metadata"].get("labels") or {}).get(label, ""))
