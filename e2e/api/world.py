"""The surroundings of one test: a namespace with fake kubelet and programs, and operators behind fault proxies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.api.access import write_kubeconfig
from e2e.api.api_client import ApiClient, Object
from e2e.api.fake_agents import FakeAgents
from e2e.api.fake_kubelet import FakeKubelet
from e2e.api.fault_proxy import FaultProxy
from e2e.api.faults import FaultPlan
from e2e.api.plane import Plane
from stoker.operator.cluster.kinds import OURS, device_kinds
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access
from stoker.operator.cluster.kube.kube_cluster import KubeCluster
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import Clock, SystemClock
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.operator import Operator
from stoker.operator.loop.store import key_of
from stoker.operator.service.discovery import discover
from stoker.operator.service.program import VIEW
from stoker.operator.service.reconcilers import RECONCILERS
from stoker.pod.control_key import new_private_key
from testing.operator.bad_manifests import JOB, changed

Reached = Callable[[], Awaitable[bool]]


@dataclass
class Running:
    """An operator at work, with the proxy of its requests."""

    operator: Operator
    proxy: FaultProxy
    task: asyncio.Task[None]

    async def crash(self) -> None:
        """End the operator at once, without a last request to the API server."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def rest(self, quiet_s: float = 0.3, within_s: float = 240) -> None:
        """Wait until it has sent no request for a while and its queue is empty."""
        async with asyncio.timeout(within_s):
            for informer in self.operator.informers:
                await informer.synced.wait()
            calls, quiet = -1, 0.0
            while quiet < quiet_s or not self.operator.queue.idle:
                await asyncio.sleep(0.05)
                quiet = quiet + 0.05 if len(self.proxy.calls) == calls else 0.0
                calls = len(self.proxy.calls)

    async def look_again(self) -> None:
        """Run one more pass over everything, to its end."""
        for kind in OURS:
            for resource in self.operator.store.of_kind(kind):
                self.operator.queue.add(key_of(resource))
        await asyncio.sleep(0)
        await self.rest()


@dataclass
class World:
    """The objects and calls that a test can use."""

    plane: Plane
    api: ApiClient
    namespace: str
    folder: Path
    agents: FakeAgents
    kubelet: FakeKubelet
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def add(self, body: Object, **spec: Any) -> Object:
        """Create an object in the test's namespace; keyword arguments `a__b` are paths in its spec."""
        changes = {f"spec.{path.replace('__', '.')}": value for path, value in spec.items()}
        return await self.api.create(changed(body, {"metadata.namespace": self.namespace, **changes}))

    async def get(self, kind: str, name: str) -> Object:
        return await self.api.get(kind, self.namespace, name)

    async def list(self, kind: str) -> list[Object]:
        return await self.api.list(kind, self.namespace)

    async def status(self, kind: str, name: str) -> Object:
        return dict((await self.get(kind, name)).get("status") or {})

    async def phase(self, kind: str, name: str) -> str:
        return str((await self.status(kind, name)).get("phase"))

    @asynccontextmanager
    async def operator(
        self,
        plan: FaultPlan | None = None,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        places_gangs: bool = False,
        devices: bool = False,
    ) -> AsyncIterator[Running]:
        """Start an operator for the test's namespace, behind a proxy of its own.

        `places_gangs`: it sees all nodes and the pods of all namespaces. `devices`: it counts the devices of
        claims, too.
        """
        clock = clock or SystemClock()
        async with FaultProxy(self.plane.access, plan) as proxy:
            file = write_kubeconfig(self.folder / f"{self.namespace}-{next(self._numbers)}.yaml", proxy.url)
            connection = ApiConnection(Access(str(file)), RateLimit(clock, per_second=1000, burst=2000))
            pods = PodHttp(new_private_key(), clock, lambda: str(random.random()))
            cluster = KubeCluster(connection, pods, view=VIEW)
            operator = Operator(
                cluster,
                settings or self.settings(),
                RECONCILERS,
                clock=clock,
                namespaces=(self.namespace,),
                everything=KubeCluster(connection, pods) if places_gangs else None,
            )
            if devices:
                found = (await discover(connection)).devices
                operator.watch_devices(KubeCluster(connection, pods, more_kinds=device_kinds(found)))
            running = Running(operator, proxy, asyncio.create_task(operator.run()))
            try:
                yield running
            finally:
                await running.crash()
                await cluster.close()

    def settings(self, **given: Any) -> Settings:
        """Return settings with short poll periods and the port of the fake programs."""
        port = self.agents.port
        return Settings(
            **{"poll_interval_s": 0.1, "agent_port": port, "engine_port": port, "router_port": port, **given}
        )


Story = Callable[[World], Awaitable[None]]
NewWorld = Callable[[], AbstractAsyncContextManager[World]]


@asynccontextmanager
async def world(plane: Plane, namespace: str, folder: Path) -> AsyncIterator[World]:
    """Open a new namespace; its kubelet and programs run while it is open."""
    async with ApiClient(plane.access) as api, FakeAgents() as agents:
        await api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        async with FakeKubelet(api, namespace, agents) as kubelet:
            yield World(plane, api, namespace, folder, agents, kubelet)


async def eventually(reached: Reached, within_s: float = 240, what: str = "") -> None:
    """Wait until the condition holds.

    Raises:
        AssertionError: it never was.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                if await reached():
                    return
                await asyncio.sleep(0.05)
    raise AssertionError(f"it did not happen in {within_s:g} s: {what}")


def job(name: str = "run", **spec: Any) -> Object:
    """Return a TrainingJob of two pods."""
    changes = {f"spec.{path.replace('__', '.')}": value for path, value in spec.items()}
    return changed(
        JOB, {"metadata.name": name, "spec.workers": {"replicas": 2}, "spec.training.totalSteps": 100, **changes}
    )


async def all_of(one: Callable[[int], Awaitable[None]], numbers: Iterable[int], at_once: int = 6) -> None:
    """Run the same story with every number, some at the same time.

    Raises:
        AssertionError: naming the numbers that failed, from the first failure.
    """
    slots = asyncio.Semaphore(at_once)
    failures: dict[int, Exception] = {}

    async def guarded(number: int) -> None:
        async with slots:
            try:
                await one(number)
            except Exception as failure:  # noqa: BLE001 - reported together below
                failures[number] = failure

    await asyncio.gather(*(guarded(number) for number in numbers))
    if failures:
        raise AssertionError(f"failed with {failures}") from next(iter(failures.values()))


class ScaledClock(SystemClock):
    """A clock whose durations pass `factor` times faster; the date is the machine's."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def monotonic(self) -> float:
        return self.factor * super().monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.factor)
