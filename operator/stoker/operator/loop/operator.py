"""The loop: informers fill the store, changes queue keys, workers observe, reconcile and execute.

`Operator.work` is one pass over one key. The reconcilers decide; the executor acts.

Made by `service/program` and by the supervisor. Owns store, queue and informers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from stoker.operator.cluster.interface import (
    Cluster,
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NameTaken,
    NotFound,
    TooManyRequests,
)
from stoker.operator.cluster.kinds import KINDS, OURS
from stoker.operator.domain.backoff import Jitter
from stoker.operator.domain.clock import Clock, SystemClock
from stoker.operator.domain.elastic import may_grow
from stoker.operator.domain.goodput import read_ledger, totals
from stoker.operator.domain.labels import REPLICA, ROLE, PodRole
from stoker.operator.domain.placement.device_catalog import specs_of
from stoker.operator.domain.placement.node_capacity import NodeCapacity
from stoker.operator.domain.plan import Event, Key, Object, Observed, Plan
from stoker.operator.domain.pods import is_gated, is_owned, label
from stoker.operator.domain.queue.reading import makes_gang
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.capacity_watch import CapacityWatch
from stoker.operator.loop.device_watch import DEVICE_KINDS
from stoker.operator.loop.execute import PlanExecutor
from stoker.operator.loop.informer import Informer
from stoker.operator.loop.load_watch import LoadWatch
from stoker.operator.loop.metrics import OperatorMetrics, OperatorState
from stoker.operator.loop.node_watch import NodeWatch
from stoker.operator.loop.observe import interested, observe, only_heartbeat, only_progress
from stoker.operator.loop.poller import Poller
from stoker.operator.loop.public_keys import PublicKeys
from stoker.operator.loop.room_queue import RoomQueue
from stoker.operator.loop.settling import SettlingStatuses
from stoker.operator.loop.shared_watch import SharedWatch
from stoker.operator.loop.store import Change, Store, key_of
from stoker.operator.loop.waiting_gangs import WaitingGangs
from stoker.operator.loop.work_queue import WorkQueue
from stoker.operator.render.keys import keys_object

log = logging.getLogger(__name__)

Reconciler = Callable[[Observed, Settings, datetime], Plan]

REST, LONGEST_REST_S = 2.0, 1.0
"""Rest of a key after a pass, in multiples of the time that the pass took, and at most.

A thousand pods that change one after the other then cause a few passes, not a thousand.
"""

FIRST_LIST_S = 10.0
"""Longest wait for the first list of devices; without it gangs are placed, and their claims are not counted."""
ROOM_S = 1.0
"""Shortest time between two offers of room to gangs that wait for it."""

SHARED = ("Node", "Pod")
"""Kinds with one watch for store and capacity, where all nodes and pods are in view."""
WATCHED = tuple(kind for kind in KINDS if kind != "Event")


class Operator:
    """The loop of one cluster; with several replicas only the holder of the lease runs it."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        reconcilers: Mapping[str, Reconciler],
        *,
        clock: Clock | None = None,
        jitter: Jitter = random.random,
        namespaces: Sequence[str] = (),
        kinds: Sequence[str] = WATCHED,
        metrics: OperatorMetrics | None = None,
        everything: Cluster | None = None,
    ) -> None:
        """`everything`: the cluster with the nodes and pods of all users in view; gangs are placed with it."""
        self.settings = replace(settings, places_gangs=everything is not None)
        self.metrics = metrics or OperatorMetrics()
        self.reconcilers = reconcilers
        self.clock = clock or SystemClock()
        self.jitter = jitter
        self.store = Store()
        self.store.listeners.append(self._on_change)
        self.queue = WorkQueue(self.clock, jitter)
        self.settling = SettlingStatuses(self.clock)
        self.executor = PlanExecutor(cluster, self.store, self.clock, max_requests=settings.max_requests)
        self.keys = PublicKeys(self.store, self.executor, lambda namespace: keys_object(namespace, self.settings))
        self.loads = LoadWatch(self.store, self.clock, self.wake, self._free_nodes, self._device_needs)
        self.poller = Poller(
            cluster, self.store, self.clock, self.wake, interval_s=settings.poll_interval_s, note=self.loads.note
        )
        self.nodes = NodeWatch(self.store, self.clock, settings.node_limits, self._nodes_are_watched, self.wake)
        self.informers = [
            Informer(cluster, kind, self.store, self.clock, jitter, namespace=namespace)
            for kind in kinds
            if everything is None or kind not in SHARED
            for namespace in (namespaces if namespaces and KINDS[kind].namespaced else (None,))
        ]
        self.capacity = CapacityWatch(self._note_room)
        self.waiting = WaitingGangs(self.store, self.capacity.use_of, self.clock)
        self._room_grew = asyncio.Event()
        self.rooms = RoomQueue(self.store, self.capacity, self.clock, self._note_room)
        self._waiting_for_room: set[Key] = set()
        self._device_informers: list[Informer] = []
        self._devices_found = asyncio.Event()
        if everything is not None:
            shared = SharedWatch(self.store, self.capacity, namespaces)
            self.informers += [Informer(everything, kind, shared, self.clock, jitter) for kind in SHARED]

    async def run(self) -> None:
        """Work until cancelled. No pass begins before every kind was listed once."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_devices())
            informers = [found for found in self.informers if found not in self._device_informers]
            for informer in informers:
                tasks.create_task(informer.run())
            for informer in informers:
                await informer.synced.wait()
            await self._until_devices_are_listed()
            await self.keys.remove_unused()
            tasks.create_task(self.nodes.run())
            tasks.create_task(self.poller.run())
            tasks.create_task(self.loads.run())
            tasks.create_task(self._resync())
            tasks.create_task(self._offer_room())
            tasks.create_task(self.queue.keep_time())
            for _ in range(self.settings.workers):
                tasks.create_task(self._serve())

    def watch_devices(self, cluster: Cluster) -> None:
        """Count devices that pods claim, from now on; `cluster` has the kinds of `resource.k8s.io` in view."""
        if self._devices_found.is_set() or not self.settings.places_gangs:
            return
        self._device_informers = [
            Informer(cluster, kind, self.capacity.devices, self.clock, self.jitter) for kind in DEVICE_KINDS
        ]
        self.capacity.devices.seen = lambda: all(found.synced.is_set() for found in self._device_informers)
        self.informers += self._device_informers
        self._devices_found.set()

    async def _follow_devices(self) -> None:
        await self._devices_found.wait()
        async with asyncio.TaskGroup() as tasks:
            for informer in self._device_informers:
                tasks.create_task(informer.run())

    async def _until_devices_are_listed(self) -> None:
        """Wait for the first list of devices where they are known to exist, but not for one that is refused."""
        listing = asyncio.gather(*(found.synced.wait() for found in self._device_informers))
        waits = (listing, asyncio.ensure_future(self.clock.sleep(FIRST_LIST_S if self._device_informers else 0.0)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def work(self, key: Key) -> None:
        """One pass over one resource."""
        seen = self._observe(key)
        stored = self.store.get(key)
        if seen is None or stored is None:
            self.settling.forget(key)
            await self.keys.remove_if_unused(key.namespace)
            return
        plan = self.reconcilers[key.kind](seen, self.settings, self.clock.now())
        self.capacity.assume(plan.patch)  # before anything else runs, so that no other pass uses the same room
        self.capacity.promise(key, plan.create)
        if self.settings.places_gangs:
            plan = self.settling.settled(key, stored, plan)
        await self.executor.execute(stored, plan)
        if plan.requeue_after_s is not None:
            self.queue.add_after(key, plan.requeue_after_s)

    def wake(self, changed: Object) -> None:
        """Queue every resource that observes `changed`."""
        for key in sorted(interested(self.store, changed)):
            if key.kind in self.reconcilers:
                self.queue.add(key)

    def _observe(self, key: Key) -> Observed | None:
        keys = self.settings.control_keys_config_map
        seen = observe(self.store, key, self.clock.monotonic(), keys_config_map=keys, losses=self.nodes.losses())
        self._waiting_for_room.discard(key)
        self.capacity.release(key)
        if seen is not None:
            seen = replace(seen, resource=self.settling.shown(key, seen.resource))
        if seen is not None and self.settings.places_gangs:
            seen = self._with_devices(key, seen)
        if seen is not None and key.kind == "InferenceDeployment":
            seen = replace(seen, scaling=self.loads.scaling(key))
        if seen is None or not self.settings.places_gangs:
            return seen
        if key.kind == "EnginePool":
            return self._with_pool_room(key, seen)
        if key.kind != "TrainingJob":
            return seen
        uid = seen.resource["metadata"]["uid"]
        own = [pod for pod in seen.of_kind("Pod") if label(pod, ROLE) == PodRole.TRAINER and is_owned(pod, uid)]
        gated, making = any(map(is_gated, own)), makes_gang(seen.resource)
        if not gated and not making and not may_grow(seen.resource):
            return seen
        if gated or not making:
            self._waiting_for_room.add(key)
        nodes = self.capacity.nodes(without={pod["metadata"]["uid"] for pod in own})
        if any(self.capacity.use_of(pod) is not None for pod in own):
            # Its turn has come, and the last pass was cut short; or it runs, and may grow where no other waits.
            return replace(seen, nodes=nodes if gated or making or not self.rooms.waiting else None)
        if gated:
            seen = self.rooms.observed(key, seen, nodes)
            if (left_s := self.rooms.left_s()) is not None:
                self.queue.add_after(key, left_s)
            return seen
        return replace(seen, nodes=nodes) if making and not self.waiting.others_wait(key) else seen

    def _with_devices(self, key: Key, seen: Observed) -> Observed:
        """The devices that pods may claim; those of its own pods are counted from now on."""
        for spec in specs_of(seen.resource):
            self.capacity.needs(key.namespace, spec)
        return replace(seen, devices=self.capacity.devices.catalog)

    def _with_pool_room(self, key: Key, seen: Observed) -> Observed:
        """A pool with replicas that wait for nodes, and what these have left beside the pods of those replicas."""
        pods = seen.of_kind("Pod")
        waiting = {label(pod, REPLICA) or pod["metadata"]["name"] for pod in pods if is_gated(pod)}
        if not waiting:
            return seen
        self._waiting_for_room.add(key)
        own = {pod["metadata"]["uid"] for pod in pods if (label(pod, REPLICA) or pod["metadata"]["name"]) in waiting}
        return replace(seen, nodes=self.capacity.nodes(without=own))

    def _free_nodes(self) -> tuple[NodeCapacity, ...] | None:
        return self.capacity.nodes() if self.settings.places_gangs else None

    def _device_needs(self, namespace: str, spec: Mapping[str, Any]) -> Mapping[str, int]:
        return self.capacity.needs(namespace, spec)

    def _note_room(self) -> None:
        self._room_grew.set()

    async def _offer_room(self) -> None:
        """Queue what waits for room when there may be more, in its order; not more often than once a second."""
        while True:
            await self._room_grew.wait()
            self._room_grew.clear()
            for key in self.rooms.next_passes(self._waiting_for_room):
                self.queue.add(key)
            await self.clock.sleep(ROOM_S)

    @property
    def synced(self) -> bool:
        """Whether every kind was listed."""
        return all(found.synced.is_set() for found in self.informers if found not in self._device_informers)

    def stuck_s(self) -> float:
        """Longest time without a sign of life of an informer, for the operator's liveness."""
        return max(informer.stuck_s() for informer in self.informers)

    def _nodes_are_watched(self) -> bool:
        """Whether news of nodes can arrive: the last answer to each of their informers was not a failure."""
        return all(informer.silent_s() <= informer.stuck_s() for informer in self.informers if informer.kind == "Node")

    def state(self) -> OperatorState:
        """State of this moment, for Prometheus."""
        silence: dict[str, float] = {}
        for informer in self.informers:
            silence[informer.kind] = max(informer.silent_s(), silence.get(informer.kind, 0.0))
        return OperatorState(
            queue=len(self.queue),
            delayed=self.queue.delayed,
            polls=self.poller.running,
            objects=self.store.counts(),
            silence_s=silence,
            nodes=self.nodes.counts,
            jobs=self._job_seconds(),
            starts=self._starts(),
            engine_starts=self._engine_starts(),
            stragglers=self._stragglers(),
            pools=tuple(self.loads.inputs()),
        )

    def _job_seconds(self) -> dict[Key, dict[str, int]]:
        now = self.clock.now()
        ledgers = {key: status.get("goodput") for key, status in self._job_statuses().items()}
        return {key: totals(read_ledger(found), now) for key, found in ledgers.items() if found}

    def _starts(self) -> dict[Key, dict[str, int]]:
        attempts = {key: status.get("attempt") or {} for key, status in self._job_statuses().items()}
        return {key: attempt["startup"] for key, attempt in attempts.items() if attempt.get("startup")}

    def _engine_starts(self) -> dict[Key, dict[str, int]]:
        starts = {
            key_of(pool): (pool.get("status") or {}).get("lastStart") for pool in self.store.of_kind("EnginePool")
        }
        return {key: start["parts"] for key, start in starts.items() if start}

    def _stragglers(self) -> dict[Key, int]:
        return {key: len(late) for key, status in self._job_statuses().items() if (late := status.get("stragglers"))}

    def _job_statuses(self) -> dict[Key, Object]:
        return {key_of(job): job.get("status") or {} for job in self.store.of_kind("TrainingJob")}

    async def _serve(self) -> None:
        while True:
            key = await self.queue.get()
            began = self.clock.monotonic()
            try:
                await self._attempt(key)
            finally:
                self.queue.done(key, rest_s=min(REST * (self.clock.monotonic() - began), LONGEST_REST_S))
            await asyncio.sleep(0)  # passes that wait for nothing must not keep lease, probes and watches waiting

    async def _attempt(self, key: Key) -> None:
        """Run a pass; one that fails in any way is tried again, and stops no other resource."""
        began = self.clock.monotonic()
        problem: Exception | None = None
        try:
            await self.work(key)
        except Exception as error:  # noqa: BLE001  the queue goes on
            problem = error
        self.metrics.reconciled(key.kind, self.clock.monotonic() - began, type(problem).__name__ if problem else None)
        if problem is None:
            self.queue.forget(key)
            if self.store.put_refusal(key, None):
                self.queue.add(key)  # its status says that it is refused until the next pass
            return
        await self._report_failure(key, problem)
        self.queue.retry(key, (problem.retry_after_s or 0.0) if isinstance(problem, TooManyRequests) else 0.0)

    async def _report_failure(self, key: Key, problem: Exception) -> None:
        """Log a failed pass; remember a refusal for the status of the resource, and record it as an Event."""
        where = "/".join(key)
        if isinstance(problem, Invalid | Forbidden | NameTaken):
            log.warning("%s: the cluster refused an object: %s", where, problem)
            self.store.put_refusal(key, str(problem))
            await self._record(key, Event("Warning", "Refused", str(problem)))
        elif isinstance(problem, Conflict | NotFound):
            log.debug("%s changed meanwhile: %s", where, problem)
        elif isinstance(problem, ClusterError):
            log.warning("%s: %s", where, problem)
        else:
            log.error("the reconcile of %s failed", where, exc_info=problem)

    async def _record(self, key: Key, event: Event) -> None:
        resource = self.store.get(key)
        if resource is not None:
            await self.executor.record(resource, event)

    async def _resync(self) -> None:
        """Queue every resource now and then, spread over a tenth of the interval.

        A lost wake-up then costs time, but nothing is missed.
        """
        while True:
            await self.clock.sleep(self.settings.resync_interval_s)
            for kind in OURS:
                for resource in self.store.of_kind(kind):
                    self.queue.add_after(key_of(resource), self.jitter() * self.settings.resync_interval_s / 10)

    def _on_change(self, change: Change) -> None:
        if change.old and change.new and only_progress(change.old, change.new):
            self.queue.add(key_of(change.new))
            return
        if change.old and change.new and only_heartbeat(change.old, change.new):
            return
        if change.old is None and change.object["kind"] == "Pod":
            self.capacity.note_made(change.object)
        for version in (change.old, change.new):
            if version is not None:
                self.wake(version)
