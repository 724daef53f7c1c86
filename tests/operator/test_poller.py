"""The poller: the pods that it polls, and failed polls, which change nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from stoker.operator.domain.labels import NODE_RANK, ROLE
from stoker.operator.domain.plan import Object
from stoker.operator.loop.poller import Poller, polled_pods
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
