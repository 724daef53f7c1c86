"""The poller: the pods that it polls, and failed polls, which change nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from stoker.operator.domain.labels import JOB_UID, NODE_RANK, ROLE
from stoker.operator.domain.plan import Object
from stoker.operator.loop.poller import STEADY_POLLS_PER_S, Poller, polled_pods
from stoker.operator.loop.store import Store
from testing.operator.fakes import FakeClock, FakePods, embedded


def pod(name: str, role: str, phase: str = "Running", node_rank: str = "0") -> Object:
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": {ROLE: role, NODE_RANK: node_rank},
        },
        "status": {"phase": phase},
    }


def test_pod_0_of_a_gang_engines_and_routers_are_polled_while_they_run() -> None:
    store = Store()
    for found in (
        pod("t0", "trainer"),
        pod("t1", "trainer", node_rank="1"),
        pod("pending", "trainer", "Pending"),
        pod("e", "engine"),
        pod("ended", "engine", "Succeeded"),
        pod("r", "router"),
        pod("task", "task"),
    ):
        store.put(found)
    assert [found["metadata"]["name"] for found in polled_pods(store)] == ["e", "r", "t0"]


def test_answers_reach_the_store_and_only_news_wakes(tmp_path: Path) -> None:
    async def story() -> None:
        pods = FakePods()
        cluster = embedded(tmp_path, pods=pods).cluster
        store, clock, woken = Store(), FakeClock(), list[str]()
        store.put(pod("e", "engine"))
        poller = Poller(cluster, store, clock, lambda found: woken.append(found["metadata"]["name"]), interval_s=2)
        await poller.poll_once()
        assert store.report("uid-e") is None
        pods.answers["uid-e"] = {"phase": "Loading"}
        await poller.poll_once()
        await clock.advance(3)
        await poller.poll_once()
        assert woken == ["e"]
        del pods.answers["uid-e"]
        await clock.advance(4)
        await poller.poll_once()
        assert store.report("uid-e") == {"phase": "Loading"}

    asyncio.run(story())


def test_a_slow_pod_delays_no_other_and_is_not_asked_twice_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        store, clock = Store(), FakeClock()
        store.put(pod("slow", "engine"))
        store.put(pod("quick", "engine"))
        asked: list[str] = []

        class Cluster:
            async def poll(self, ref: Any) -> dict[str, Any]:
                asked.append(ref.name)
                if ref.name == "slow":
                    await asyncio.get_running_loop().create_future()
                return {"asked": len(asked)}

        poller = Poller(Cluster(), store, clock, lambda _: None, interval_s=1)  # type: ignore[arg-type]
        running = asyncio.ensure_future(poller.run())
        await clock.advance(3.5)
        assert asked.count("slow") == 1
        assert asked.count("quick") == 4
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())


def leader(number: int) -> Object:
    found = pod(f"t{number:03}", "trainer")
    found["metadata"]["labels"][JOB_UID] = f"job-{number}"
    return found


def job(number: int, phase: str) -> Object:
    metadata = {"name": f"j{number:03}", "namespace": "default", "uid": f"job-{number}", "resourceVersion": "1"}
    return {"kind": "TrainingJob", "metadata": metadata, "spec": {}, "status": {"phase": phase}}


def test_undisturbed_jobs_share_a_rate_in_turn_and_all_others_are_asked_in_every_round() -> None:
    share, store, rounds = int(STEADY_POLLS_PER_S), Store(), list[set[str]]()
    running, stopping = range(share + 50), range(900, 903)
    for numbers, phase in ((running, "Running"), (stopping, "Suspending")):
        for number in numbers:
            store.put(job(number, phase))
            store.put(leader(number))
    store.put(pod("e", "engine"))

    class Cluster:
        async def poll(self, ref: Any) -> dict[str, Any]:
            rounds[-1].add(ref.name)
            return {"phase": "Training"}

    async def story() -> None:
        poller = Poller(Cluster(), store, FakeClock(), lambda _: None, interval_s=1)  # type: ignore[arg-type]
        for _ in range(4):
            rounds.append(set())
            await poller.poll_once()

    asyncio.run(story())
    always = {"e", *(f"t{number}" for number in stopping)}
    assert len(rounds[0]) == share + 50 + len(always), "nothing is known of them yet"
    assert all(always <= asked and len(asked) == share + len(always) for asked in rounds[1:])
    assert rounds[1] | rounds[2] == rounds[0], "each has its turn"
    assert len(rounds[1] & rounds[3]) < share, "and another one after that"


def test_few_jobs_are_asked_in_every_round() -> None:
    store, asked = Store(), list[str]()
    for number in range(3):
        store.put(job(number, "Running"))
        store.put(leader(number))

    class Cluster:
        async def poll(self, ref: Any) -> dict[str, Any]:
            asked.append(ref.name)
            return {"phase": "Training"}

    async def story() -> None:
        poller = Poller(Cluster(), store, FakeClock(), lambda _: None, interval_s=1)  # type: ignore[arg-type]
        for _ in range(3):
            await poller.poll_once()

    asyncio.run(story())
    assert asked == ["t000", "t001", "t002"] * 3
