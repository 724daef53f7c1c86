"""Doubles at the interfaces of the operator: a clock, processes and a cluster that tests control."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from stoker.operator.api.metadata import Status
from stoker.operator.cluster.interface import Cluster, Keep, PodUnreachable, ServerError, WatchEvent
from stoker.operator.cluster.local.addresses import Addresses
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.gpus import Gpus
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.node import Node
from stoker.operator.cluster.local.object_storage import ObjectStorage
from stoker.operator.cluster.local.objects import Admit, ObjectStore
from stoker.operator.cluster.local.process import Command, Process, ProcessExit
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.plan import ControlCall, Object, Observed, Plan, Ref
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.outcome import Outcome, derive_plan
from stoker.operator.service.local.kubelet import Kubelet
from stoker.pod.control_key import new_private_key

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)
CAPACITY = {"cpu": "64", "memory": "1Ti"}
"""Of the machine of an embedded cluster."""


class FakeClock:
    """A clock that stands still until `advance`."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now(self) -> datetime:
        return START + timedelta(seconds=self.passed_s)

    def monotonic(self) -> float:
        return self.passed_s

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.passed_s + seconds, next(self._numbers), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Advance the time; every sleeper wakes up at its own time on the way."""
        end = self.passed_s + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, future = heapq.heappop(self._sleepers)
            self.passed_s = max(self.passed_s, due)
            if not future.done():
                future.set_result(None)
                await settle()
        self.passed_s = end
        await settle()


async def settle(rounds: int = 30) -> None:
    """Let every task run until nothing moves without time or input/output."""
    for _ in range(rounds):
        await asyncio.sleep(0)


class FakeProcess:
    """A process that lives until the test (or SIGTERM, unless `stubborn`) ends it."""

    def __init__(self, command: Command, number: int) -> None:
        self.command = command
        self.pid = number
        self.stubborn = False
        self.signals: list[str] = []
        self._end: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._end.done()

    def terminate(self) -> None:
        self.signals.append("TERM")
        if not self.stubborn:
            self.end(143, 15)

    def kill(self) -> None:
        self.signals.append("KILL")
        self.end(137, 9)

    def end(self, code: int, signal: int | None = None) -> None:
        if not self._end.done():
            self._end.set_result(ProcessExit(code, signal))

    async def wait(self) -> ProcessExit:
        return await self._end


class FakeRunner:
    """A runner that starts nothing; `processes` holds the fakes in order of their start."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []

    async def start(self, command: Command) -> Process:
        process = FakeProcess(command, 1000 + len(self.processes))
        self.processes.append(process)
        return process


@dataclass
class FakePods:
    """Answers of pods without a network.

    `answers` maps pod uids to polls; `on_call` answers recorded calls.
    """

    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    calls: list[ControlCall] = field(default_factory=list)
    on_call: Callable[[ControlCall], Mapping[str, Any]] = lambda _: {}


@dataclass
class Embedded:
    """A LocalCluster in memory, with its kubelet on fake processes."""

    clock: FakeClock
    objects: ObjectStore
    cluster: Cluster
    kubelet: Kubelet
    runner: FakeRunner
    ready: dict[tuple[str, int], bool]
    """(address, port) -> answer of every HTTP probe; absent means yes."""


class _PolledCluster(LocalCluster):
    """A LocalCluster whose pods answer from a table."""

    def __init__(self, pods: FakePods, *given: Any) -> None:
        super().__init__(*given)
        self.fake_pods = pods

    async def call(self, call: ControlCall) -> Mapping[str, Any]:
        self.fake_pods.calls.append(call)
        return self.fake_pods.on_call(call)

    async def poll(self, pod: Ref) -> Mapping[str, Any]:
        if pod.uid not in self.fake_pods.answers:
            raise PodUnreachable(pod.name)
        return self.fake_pods.answers[pod.uid]


def embedded(
    folder: Path,
    *,
    gpus: tuple[str, ...] = (),
    admit: Admit | None = None,
    pods: FakePods | None = None,
    keeper: ObjectStorage | None = None,
) -> Embedded:
    """Create an embedded cluster within a running event loop.

    `pods` answers polls and calls; with a `keeper`, objects outlive the cluster.
    """
    clock = FakeClock()
    numbers = itertools.count(1)
    objects = ObjectStore(now=clock.now, new_uid=lambda: f"uid-{next(numbers):04}", admit=admit, storage=keeper)
    addresses = Addresses("loopback", lambda _: True)
    ready: dict[tuple[str, int], bool] = {}

    async def ask(address: str, port: int, _path: str, _timeout_s: float) -> bool:
        return ready.get((address, port), True)

    runner = FakeRunner()
    folders = StateFolders(folder)
    node = Node(
        objects, runner, ask, addresses, folders, clock, Gpus(gpus), CAPACITY, {"PATH": "/bin"}, "/usr/bin/python3"
    )
    kubelet = Kubelet(node)
    tokens = map(str, itertools.count())
    real = (objects, addresses, PodHttp(new_private_key(), clock, lambda: next(tokens)), clock)
    cluster = _PolledCluster(pods, *real) if pods is not None else LocalCluster(*real)
    kubelet.start()
    return Embedded(clock, objects, cluster, kubelet, runner, ready)


class Flaky:
    """A cluster that raises once, before or after the n-th write (1 is the first), as a crash would."""

    def __init__(self, inner: Cluster, *, fail_at: int, after: bool) -> None:
        self.inner = inner
        self.fail_at = fail_at
        self.after = after
        self.writes = 0

    def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        keep: Keep | None = None,
    ) -> Any:
        return self.inner.list(kind, namespace=namespace, labels=labels, keep=keep)

    def watch(self, kind: str, resource_version: str, *, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        return self.inner.watch(kind, resource_version, namespace=namespace)

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return await self.inner.get(kind, namespace, name)

    async def create(self, body: Object) -> Object:
        return await self._write(self.inner.create, body)

    async def apply(self, body: Object, *, manager: str) -> Object:
        return await self._write(lambda: self.inner.apply(body, manager=manager))

    async def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        return await self._write(self.inner.patch, ref, body)

    async def update_status(self, ref: Ref, status: Object, *, resource_version: str | None = None) -> Object:
        return await self._write(lambda: self.inner.update_status(ref, status, resource_version=resource_version))

    async def scale(self, ref: Ref, replicas: int) -> None:
        await self._write(self.inner.scale, ref, replicas)

    async def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
        return await self._write(lambda: self.inner.delete(ref, grace_s=grace_s))

    async def call(self, call: ControlCall) -> Mapping[str, Any]:
        return await self._write(self.inner.call, call)

    async def poll(self, pod: Ref) -> Mapping[str, Any]:
        return await self.inner.poll(pod)

    async def _write(self, write: Callable[..., Awaitable[T]], *given: Any) -> T:
        self.writes += 1
        failing = self.writes == self.fail_at
        if failing and not self.after:
            raise ServerError(f"write {self.writes} was lost")
        answer = await write(*given)
        if failing:
            raise ServerError(f"the answer of write {self.writes} was lost")
        return answer


def reconcile_nothing(seen: Observed, _settings: Settings, now: datetime, plan: Plan | None = None) -> Plan:
    """Return `plan`, and the part of a status that every kind derives alike."""
    status = Status.model_validate(seen.resource.get("status") or {})
    return derive_plan(Outcome(plan=plan or Plan()), seen=seen, status=status, fields={}, now=now)
