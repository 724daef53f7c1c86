"""The whole loop on an embedded cluster with fake processes; its reconciler keeps one pod per EnginePool replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.operator.cluster.interface import Forbidden, TooManyRequests
from stoker.operator.domain.plan import Key, Object, Observed, Plan
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.operator import Operator
from stoker.operator.render.keys import keys_object
from testing.operator.cluster_contract import config_map, owned, pool, ref_of
from testing.operator.fakes import Embedded, FakePods, Flaky, embedded, reconcile_nothing, settle

SETTINGS = Settings(workers=2, resync_interval_s=600)
KEY = Key("EnginePool", "default", "pool")


def pod(name: str, owner: Object) -> Object:
    body: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"stoker.dev/role": "engine"}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "command": ["python", "-c", "pass"]}]},
    }
    return owned(body, owner)


def reconcile_pods(seen: Observed, _settings: Settings, _now: datetime) -> Plan:
    """Keep as many live pods as replicas: ended pods are replaced, the status counts the running ones."""
    resource = seen.resource
    wanted = [f"{resource['metadata']['name']}-{number}" for number in range(resource["spec"]["replicas"])]
    found = {p["metadata"]["name"]: p for p in seen.of_kind("Pod")}
    ended = [p for p in found.values() if (p.get("status") or {}).get("phase") in ("Succeeded", "Failed")]
    running = sum((p.get("status") or {}).get("phase") == "Running" for p in found.values())
    reported = sorted(str(report.get("phase")) for report in seen.reports.values())
    status = {"replicas": running, "reported": reported}
    surplus = [p for name, p in found.items() if name not in wanted]
    return Plan(
        status=None if resource.get("status") == status else status,
        create=tuple(pod(name, resource) for name in wanted if name not in found),
        delete=tuple(ref_of(p) for p in [*surplus, *ended] if not p["metadata"].get("deletionTimestamp")),
    )


def reconcile_with_status(seen: Observed, settings_: Settings, now: datetime) -> Plan:
    """Keep the same pods, with a status that is derived as for every kind."""
    plan = replace(reconcile_pods(seen, settings_, now), status=None)
    return reconcile_nothing(seen, settings_, now, plan)


def run(
    tmp_path: Path,
    story: Callable[[Embedded, Operator], Awaitable[None]],
    reconcile: Any = reconcile_pods,
    pods: FakePods | None = None,
    wrap: Callable[[Any], Any] = lambda cluster: cluster,
) -> None:
    async def whole() -> None:
        world = embedded(tmp_path, pods=pods or FakePods())
        operator = Operator(
            wrap(world.cluster), SETTINGS, {"EnginePool": reconcile}, clock=world.clock, jitter=lambda: 0.5
        )
        running = asyncio.ensure_future(operator.run())
        await settle()
        try:
            await story(world, operator)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await world.kubelet.stop(0)

    asyncio.run(whole())


def running_pods(world: Embedded) -> list[str]:
    pods = world.objects.of_kind("Pod")
    return [
        p["metadata"]["name"]
        for p in pods
        if p["status"]["phase"] == "Running" and not p["metadata"].get("deletionTimestamp")
    ]


def status(world: Embedded) -> Any:
    return world.objects.get(KEY).get("status")


def test_a_resource_gets_its_pods_and_its_status(tmp_path: Path) -> None:
    async def story(world: Embedded, _: Operator) -> None:
        world.objects.create(pool("pool", 2))
        await world.clock.advance(1)
        assert running_pods(world) == ["pool-0", "pool-1"]
        assert status(world) == {"replicas": 2, "reported": []}

    run(tmp_path, story)


def test_a_converged_resource_costs_no_write(tmp_path: Path) -> None:
    async def story(world: Embedded, operator: Operator) -> None:
        world.objects.create(pool("pool", 2))
        await world.clock.advance(1)
        before = world.objects.version
        operator.queue.add(KEY)
        await world.clock.advance(SETTINGS.resync_interval_s * 2)
        assert world.objects.version == before

    run(tmp_path, story)


def test_passes_that_wait_for_nothing_let_everything_else_run(tmp_path: Path) -> None:
    """The Lease is renewed, probes are answered and watches are read on the same event loop."""
    turns: list[int] = []

    def reconcile_and_count(*_: Any) -> Plan:
        turns[-1] += 1
        return Plan()

    async def story(world: Embedded, _: Operator) -> None:
        for number in range(20):
            world.objects.create(pool(f"pool-{number}", 1))
        for _turn in range(200):
            turns.append(0)
            await asyncio.sleep(0)
        assert sum(turns) >= 20
        assert max(turns) <= SETTINGS.workers

    run(tmp_path, story, reconcile_and_count)


def test_an_ended_pod_is_replaced(tmp_path: Path) -> None:
    async def story(world: Embedded, _: Operator) -> None:
        world.objects.create(pool("pool", 1))
        await world.clock.advance(1)
        world.runner.processes[0].end(1)
        await world.clock.advance(1)
        assert len(world.runner.processes) == 2
        assert running_pods(world) == ["pool-0"]

    run(tmp_path, story)


def test_pods_go_with_their_resource(tmp_path: Path) -> None:
    async def story(world: Embedded, _: Operator) -> None:
        made = world.objects.create(pool("pool", 2))
        await world.clock.advance(1)
        world.objects.delete(ref_of(made))
        await world.clock.advance(1)
        assert world.objects.of_kind("Pod") == []
        assert [process.signals for process in world.runner.processes] == [["TERM"], ["TERM"]]

    run(tmp_path, story)


def test_the_public_keys_leave_a_namespace_with_the_last_resource_that_needs_them(tmp_path: Path) -> None:
    async def story(world: Embedded, operator: Operator) -> None:
        await operator.executor.apply(keys_object("default", SETTINGS))
        for name in ("pool", "second"):
            world.objects.create(pool(name))
        await settle()

        world.objects.delete(ref_of(world.objects.get(KEY)))
        await settle()
        assert has_keys(world)

        world.objects.delete(ref_of(world.objects.get(Key("EnginePool", "default", "second"))))
        await settle()
        assert not has_keys(world)

    run(tmp_path, story)


def test_the_public_keys_leave_a_namespace_whose_last_resource_went_without_a_leader(tmp_path: Path) -> None:
    async def whole() -> None:
        world = embedded(tmp_path, pods=FakePods())
        operator = Operator(world.cluster, SETTINGS, {}, clock=world.clock, jitter=lambda: 0.5)
        await operator.executor.apply(keys_object("default", SETTINGS))
        assert has_keys(world)
        running = asyncio.ensure_future(operator.run())
        await settle()
        try:
            assert not has_keys(world)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await world.kubelet.stop(0)

    asyncio.run(whole())


def has_keys(world: Embedded) -> bool:
    names = {found["metadata"]["name"] for found in world.objects.of_kind("ConfigMap")}
    return SETTINGS.control_keys_config_map in names


def test_a_new_report_wakes_its_resource(tmp_path: Path) -> None:
    pods = FakePods()

    async def story(world: Embedded, _: Operator) -> None:
        world.objects.create(pool("pool", 1))
        await world.clock.advance(1)
        uid = world.objects.of_kind("Pod")[0]["metadata"]["uid"]
        pods.answers[uid] = {"phase": "Serving"}
        await world.clock.advance(SETTINGS.poll_interval_s * 2)
        assert status(world) == {"replicas": 1, "reported": ["Serving"]}

    run(tmp_path, story, pods=pods)


def test_a_requeue_comes_at_its_time(tmp_path: Path) -> None:
    passes: list[float] = []

    def reconcile(seen: Observed, settings_: Settings, now: datetime) -> Plan:
        passes.append(now.second)
        return Plan(requeue_after_s=7.0)

    async def story(world: Embedded, _: Operator) -> None:
        world.objects.create(pool("pool"))
        await world.clock.advance(15)
        assert passes == [0, 7, 14]

    run(tmp_path, story, reconcile)


def test_a_reconciler_that_raises_is_tried_again_and_stops_no_other(tmp_path: Path) -> None:
    failures = 0

    def reconcile(seen: Observed, settings_: Settings, now: datetime) -> Plan:
        nonlocal failures
        if seen.resource["metadata"]["name"] == "bad" and failures < 3:
            failures += 1
            raise RuntimeError("a bug")
        return reconcile_pods(seen, settings_, now)

    async def story(world: Embedded, _: Operator) -> None:
        world.objects.create(pool("bad", 1))
        world.objects.create(pool("good", 1))
        await settle()
        await world.clock.advance(0.01)
        assert "good-0" in running_pods(world)
        await world.clock.advance(2)
        assert failures == 3
        assert running_pods(world) == ["bad-0", "good-0"]

    run(tmp_path, story, reconcile)


def test_a_refused_object_is_told_as_an_event(tmp_path: Path) -> None:
    def reconcile(seen: Observed, settings_: Settings, now: datetime) -> Plan:
        body = pod("sidecar", seen.resource)
        body["spec"]["initContainers"] = [{"name": "first"}]
        return Plan(create=(body,))

    async def story(world: Embedded, _: Operator) -> None:
        world.objects.create(pool("pool"))
        await world.clock.advance(5)
        events = world.objects.of_kind("Event")
        assert [(event["type"], event["reason"], event["message"]) for event in events] == [
            ("Warning", "Refused", "Pod sidecar: not supported yet: spec.initContainers")
        ]

    run(tmp_path, story, reconcile)


def test_liveness_is_the_age_of_the_oldest_news(tmp_path: Path) -> None:
    async def story(world: Embedded, operator: Operator) -> None:
        await world.clock.advance(10)
        assert operator.stuck_s() == 10
        await world.clock.advance(10)
        assert operator.stuck_s() <= 15  # bookmarks come every 15 s

    run(tmp_path, story)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(st.sampled_from(["scale 0", "scale 1", "scale 3", "end", "kill", "delete pod", "wait"]), max_size=12),
    st.integers(0, 30),
    st.booleans(),
)
def test_any_history_and_any_lost_write_converge(tmp_path: Path, history: list[str], fail_at: int, after: bool) -> None:
    async def story(world: Embedded, _: Operator) -> None:
        made = world.objects.create(pool("pool", 2))
        await settle()
        for number, what in enumerate(history):
            live = [process for process in world.runner.processes if process.alive]
            pods = world.objects.of_kind("Pod")
            if what.startswith("scale"):
                world.objects.scale(ref_of(made), int(what.split()[1]))
            elif what in ("end", "kill") and live:
                live[number % len(live)].end(0 if what == "end" else 137)
            elif what == "delete pod" and pods:
                world.objects.delete(ref_of(pods[number % len(pods)]))
            elif what == "wait":
                await world.clock.advance(0.3)
        await world.clock.advance(60)
        replicas = world.objects.get(KEY)["spec"]["replicas"]
        assert running_pods(world) == [f"pool-{number}" for number in range(replicas)]
        assert status(world)["replicas"] == replicas

    run(tmp_path, story, wrap=lambda cluster: Flaky(cluster, fail_at=fail_at, after=after))


def test_what_is_refused_is_in_the_status_until_it_is_taken(tmp_path: Path) -> None:
    class Quota:
        full = True

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        async def create(self, body: Object) -> Object:
            if Quota.full and body["kind"] == "Pod":
                raise Forbidden("exceeded quota: pods")
            return dict(await self.inner.create(body))

    async def story(world: Embedded, _: Operator) -> None:
        world.objects.create(pool("pool"))
        await world.clock.advance(1)
        status = world.objects.get(KEY)["status"]
        assert status["message"] == "exceeded quota: pods"
        assert {item["type"]: item["status"] for item in status["conditions"]} == {"Ready": "False", "Stalled": "True"}
        Quota.full = False
        await world.clock.advance(10)
        assert running_pods(world) == ["pool-0"]
        assert "message" not in world.objects.get(KEY)["status"]

    run(tmp_path, story, reconcile_with_status, wrap=Quota)


def test_a_pod_that_takes_the_place_of_another_comes_under_a_quota_for_one(tmp_path: Path) -> None:
    def reconcile(seen: Observed, _settings: Settings, _now: datetime) -> Plan:
        wanted = f"pool-g{seen.resource['metadata']['generation']}"
        found = {p["metadata"]["name"]: p for p in seen.of_kind("Pod")}
        old = (p for name, p in found.items() if name != wanted and not p["metadata"].get("deletionTimestamp"))
        create = () if wanted in found else (pod(wanted, seen.resource),)
        return Plan(create=create, delete=tuple(map(ref_of, old)))

    class QuotaForOne(Flaky):
        async def create(self, body: Object) -> Object:
            if body["kind"] == "Pod" and (await self.inner.list("Pod")).items:
                raise Forbidden("exceeded quota: pods")
            return await super().create(body)

    async def story(world: Embedded, _: Operator) -> None:
        made = world.objects.create(pool("pool", 1))
        await world.clock.advance(1)
        assert running_pods(world) == ["pool-g1"]
        world.objects.scale(ref_of(made), 2)
        await world.clock.advance(60)
        assert running_pods(world) == ["pool-g2"]

    run(tmp_path, story, reconcile, wrap=lambda cluster: QuotaForOne(cluster, fail_at=0, after=False))


def test_a_name_that_a_foreign_object_has_is_reported(tmp_path: Path) -> None:
    async def story(world: Embedded, _: Operator) -> None:
        world.objects.create(pod("pool-0", world.objects.create(config_map("somebody-else"))))
        world.objects.create(pool("pool"))
        await world.clock.advance(1)
        status = world.objects.get(KEY)["status"]
        assert status["message"] == "Pod default/pool-0 exists and belongs to another owner"
        assert [event["reason"] for event in world.objects.of_kind("Event")] == ["Refused"]

    run(tmp_path, story, reconcile_with_status)


def test_an_api_server_that_asks_for_patience_gets_it(tmp_path: Path) -> None:
    times: list[float] = []

    async def story(world: Embedded, _: Operator) -> None:
        def reconcile() -> None:
            times.append(world.clock.monotonic())
            if len(times) < 3:
                raise TooManyRequests("slow down", retry_after_s=7.0)

        calls.append(reconcile)
        world.objects.create(pool("pool"))
        await world.clock.advance(30)
        assert times == [0.0, 7.0, 14.0]

    calls: list[Callable[[], None]] = []

    def reconcile(_seen: Observed, _settings: Settings, _now: datetime) -> Plan:
        calls[0]()
        return Plan()

    run(tmp_path, story, reconcile=reconcile)
