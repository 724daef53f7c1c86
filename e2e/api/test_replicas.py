"""Replicas of the whole program on one Lease: one works, another takes over, none writes without the Lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from e2e.api.access import write_kubeconfig
from e2e.api.fault_proxy import FaultProxy
from e2e.api.faults import UNAVAILABLE, FaultPlan, Hang, Rule, Script
from e2e.api.training_story import assert_once, begin, finish, has_saved, to_the_end, trains
from e2e.api.world import Story, World, eventually
from stoker.operator.domain.settings import Settings
from stoker.operator.service.config import ApiConfig, LeaseConfig, OperatorConfig, PollConfig, ProbeListenConfig
from stoker.operator.service.program import OperatorProgram

LEASE = LeaseConfig(duration_s=3, renew_deadline_s=2, retry_s=0.4)
LONG_LEASE = LeaseConfig(duration_s=200, renew_deadline_s=150, retry_s=0.4)
"""No replica loses it by a busy machine."""


class ReplicaConfig(OperatorConfig):
    """The settings as in a file, apart from the port of the fake programs."""

    agent_port: int

    def settings(self) -> Settings:
        return replace(super().settings(), agent_port=self.agent_port)


@dataclass
class Replica:
    """One operator process, behind a proxy of its own."""

    program: OperatorProgram
    proxy: FaultProxy
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def leads(self) -> bool:
        return self.program.elector.leading

    async def end(self) -> None:
        """Stop the replica as SIGTERM does."""
        self.stop.set()
        await self.task

    async def crash(self) -> None:
        """Stop the replica as SIGKILL does: the Lease is not released."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def writes(self) -> int:
        """Return the writes, without those to the Lease."""
        return self.proxy.writes


@asynccontextmanager
async def replica(
    world: World, name: str, plan: FaultPlan | None = None, *, lease: LeaseConfig = LEASE, wake_ups: bool = False
) -> AsyncIterator[Replica]:
    async with FaultProxy(world.plane.access, plan) as proxy:
        file = write_kubeconfig(world.folder / f"{name}.yaml", proxy.url)
        config = ReplicaConfig(
            namespace=world.namespace,
            namespaces=(world.namespace,),
            identity=name,
            api=ApiConfig(kubeconfig=str(file)),
            listen=ProbeListenConfig(host="127.0.0.1", port=0),
            lease=lease,
            poll=PollConfig(interval_s=0.1),
            wake_ups=("TrainingJob",) if wake_ups else (),
            agent_port=world.agents.port,
        )
        stop = asyncio.Event()
        program = OperatorProgram(config)
        found = Replica(program, proxy, stop, asyncio.create_task(program.run(stop)))
        try:
            yield found
        finally:
            with suppress(asyncio.CancelledError):
                await found.crash()


async def until(reached: Callable[[], bool], what: str) -> float:
    """Wait until the condition holds and return the seconds that it took."""

    async def asked() -> bool:
        return reached()

    begin = time.monotonic()
    await eventually(asked, what=what)
    return time.monotonic() - begin


def test_of_two_replicas_one_works(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        options: Any = {"lease": LONG_LEASE, "wake_ups": True}
        async with replica(world, "a", **options) as a, replica(world, "b", **options) as b:
            await until(lambda: a.leads or b.leads, "one leads")
            leader, other = (a, b) if a.leads else (b, a)
            await begin(world)
            await to_the_end(world)
            await assert_once(world)
            assert not other.leads
            assert other.writes() == 0
            assert other.proxy.counts["update", "leases"] == 0
            assert leader.writes() > 10

    run(story)


def test_a_leader_that_ends_hands_over_at_once(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with replica(world, "a", lease=LONG_LEASE) as a:
            await until(lambda: a.leads, "a leads")
            async with replica(world, "b", lease=LONG_LEASE) as b:
                await begin(world)
                await eventually(lambda: trains(world), what="the job trains")
                await a.end()
                assert await until(lambda: b.leads, "b leads") < LONG_LEASE.duration_s / 2
                await eventually(lambda: has_saved(world), what="its save is verified")
                await finish(world)
                await eventually(lambda: is_completed(world), what="the job is Completed")
                await assert_once(world)

    run(story)


def test_a_leader_that_dies_is_replaced_when_its_lease_is_over(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with replica(world, "a") as a:
            await until(lambda: a.leads, "a leads")
            async with replica(world, "b") as b:
                await begin(world)
                await eventually(lambda: trains(world), what="the job trains")
                await a.crash()
                await until(lambda: b.leads, "b leads")
                await eventually(lambda: has_saved(world), what="its save is verified")
                await finish(world)
                await eventually(lambda: is_completed(world), what="the job is Completed")
                await assert_once(world)

    run(story)


def test_a_leader_that_cannot_renew_stops_before_another_begins(run: Callable[[Story], None]) -> None:
    """Its other requests would still arrive; it must not send them."""

    async def story(world: World) -> None:
        async with replica(world, "a") as a:
            await until(lambda: a.leads, "a leads")
            async with replica(world, "b") as b:
                await begin(world)
                await eventually(lambda: trains(world), what="the job trains")
                a.proxy.plan = Script(
                    (
                        Rule(Hang(after=False), "update", "leases", count=1000),
                        Rule(UNAVAILABLE, "get", "leases", count=1000),
                    )
                )
                led: list[int] = []

                def b_leads_alone() -> bool:
                    assert not (a.leads and b.leads)
                    if not a.leads:
                        led.append(a.writes())
                    return b.leads

                await until(b_leads_alone, "b leads")
                await eventually(lambda: has_saved(world), what="its save is verified")
                await finish(world)
                await eventually(lambda: is_completed(world), what="the job is Completed")
                assert a.writes() == led[0]
                await assert_once(world)

    run(story)


async def is_completed(world: World) -> bool:
    return await world.phase("TrainingJob", "run") == "Completed"
