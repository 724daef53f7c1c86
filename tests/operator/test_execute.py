"""Plans are carried out in order, stop at the first failure, and may be repeated after a crash at any point."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.operator.cluster.interface import (
    Cluster,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NameTaken,
    PodUnreachable,
    ServerError,
)
from stoker.operator.domain.applied_hash import with_applied_hash
from stoker.operator.domain.labels import APPLIED_HASH, JOB_UID
from stoker.operator.domain.plan import ControlCall, Event, Key, Object, Patch, Plan, Ref, Scale
from stoker.operator.loop.execute import PlanExecutor, event_object
from stoker.operator.loop.object_pruning import pruned
from stoker.operator.loop.store import Store
from testing.operator.cluster_contract import config_map, gated_pod, owned, pool, ref_of
from testing.operator.fakes import START, Embedded, FakeClock, FakePods, Flaky, embedded


class Recorder:
    """A cluster that passes calls on and records their names."""

    def __init__(self, inner: Cluster) -> None:
        self.inner = inner
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def record(*given: Any, **named: Any) -> Any:
            self.names.append(name)
            return getattr(self.inner, name)(*given, **named)

        return record


def wish(resource: Object, world: Mapping[str, Object]) -> Plan:
    """Return a plan that uses every field."""
    child = owned(gated_pod("child"), resource)
    return Plan(
        finalizers=("stoker.dev/data",),
        status={"phase": "Working"},
        create=(child,),
        apply=(owned(config_map("config", a="1"), resource),),
        patch=(Patch(ref_of(world["gated"]), {"spec": {"schedulingGates": []}}),),
        scale=(Scale(ref_of(world["pool"]), 3),),
        delete=(ref_of(world["old"]),),
        calls=(
            ControlCall(
                Ref("Pod", "default", "gated", world["gated"]["metadata"]["uid"]), "POST", "/drain", {"id": "one"}
            ),
        ),
        events=(Event("Normal", "Working", "it works"),),
    )


async def new_world(embedded_: Embedded) -> dict[str, Object]:
    objects = embedded_.objects
    held = pool("resource")
    held["metadata"] = {**held["metadata"], "finalizers": ["stoker.dev/old"]}
    return {
        "resource": objects.create(held),
        "pool": objects.create(pool("pool")),
        "gated": objects.create(gated_pod("gated")),
        "old": objects.create(config_map("old")),
    }


def store_of(embedded_: Embedded) -> Store:
    """Return a store as informers would have filled it."""
    store = Store()
    for kind in ("EnginePool", "Pod", "ConfigMap"):
        for found in embedded_.objects.of_kind(kind):
            store.put(found)
    return store


def test_fields_are_carried_out_in_their_order(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path, pods=FakePods())
        made = await new_world(world)
        recorder = Recorder(world.cluster)
        executor = PlanExecutor(recorder, store_of(world), FakeClock())
        await executor.execute(made["resource"], wish(made["resource"], made))
        assert recorder.names == [
            "patch",  # a finalizer that is added
            "update_status",
            "create",
            "apply",
            "patch",
            "scale",
            "delete",
            "call",
            "create",  # the event
            "patch",  # a finalizer that is removed
        ]

    asyncio.run(story())


def test_a_converged_plan_makes_no_call(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path)
        made = await new_world(world)
        resource = made["resource"]
        config = with_applied_hash(owned(config_map("config", a="1"), resource))
        world.objects.create(config)
        resource = world.objects.update_status(ref_of(resource), {"phase": "Working"})
        recorder = Recorder(world.cluster)
        executor = PlanExecutor(recorder, store_of(world), FakeClock())
        plan = Plan(
            finalizers=("stoker.dev/old",),
            status={"phase": "Working"},
            apply=(owned(config_map("config", a="1"), resource),),
        )
        await executor.execute(resource, plan)
        assert recorder.names == []

    asyncio.run(story())


def test_a_failure_stops_what_comes_after_it(tmp_path: Path) -> None:
    async def story() -> None:
        def refuse(call: ControlCall) -> Mapping[str, Any]:
            raise PodUnreachable(call.pod.name)

        world = embedded(tmp_path, pods=FakePods(on_call=refuse))
        made = await new_world(world)
        executor = PlanExecutor(world.cluster, store_of(world), FakeClock())
        with pytest.raises(PodUnreachable):
            await executor.execute(made["resource"], wish(made["resource"], made))
        assert world.objects.of_kind("Event") == []
        assert world.objects.find(("ConfigMap", "default", "old")) is None  # type: ignore[arg-type]

    asyncio.run(story())


def test_a_pod_that_does_not_answer_keeps_no_other_from_hearing(tmp_path: Path) -> None:
    async def story() -> None:
        def answer(call: ControlCall) -> Mapping[str, Any]:
            if call.pod.name == "deaf":
                raise PodUnreachable(call.pod.name)
            return {}

        pods = FakePods(on_call=answer)
        world = embedded(tmp_path, pods=pods)
        made = await new_world(world)
        calls = tuple(
            ControlCall(Ref("Pod", "default", name, name), "PUT", "/backends", {}) for name in ("deaf", "well")
        )
        with pytest.raises(PodUnreachable, match="deaf"):
            await PlanExecutor(world.cluster, Store(), FakeClock()).execute(made["resource"], Plan(calls=calls))
        assert [call.pod.name for call in pods.calls] == ["deaf", "well"]

    asyncio.run(story())


def test_our_object_of_the_same_name_counts_as_created_and_a_foreign_one_is_a_conflict(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path)
        made = await new_world(world)
        world.objects.create(owned(gated_pod("ours"), made["resource"]))
        world.objects.create(gated_pod("theirs"))
        executor = PlanExecutor(world.cluster, Store(), FakeClock())
        await executor.execute(made["resource"], Plan(create=(owned(gated_pod("ours"), made["resource"]),)))
        with pytest.raises(Conflict, match="theirs exists and belongs to another owner"):
            await executor.execute(made["resource"], Plan(create=(owned(gated_pod("theirs"), made["resource"]),)))

    asyncio.run(story())


def test_a_foreign_service_is_not_taken_over(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path)
        made = await new_world(world)
        executor = PlanExecutor(world.cluster, Store(), FakeClock())
        ours, theirs = service("ours"), service("theirs")
        world.objects.create(theirs)
        await executor.execute(made["resource"], Plan(apply=(owned(ours, made["resource"]),)))
        with pytest.raises(NameTaken, match="Service default/theirs exists and belongs to another owner"):
            await executor.execute(made["resource"], Plan(apply=(owned(theirs, made["resource"]),)))
        assert "ownerReferences" not in world.objects.get(Key("Service", "default", "theirs"))["metadata"]
        again = PlanExecutor(world.cluster, Store(), FakeClock())
        await again.execute(made["resource"], Plan(apply=(owned(ours, made["resource"]),)))

    asyncio.run(story())


def service(name: str) -> Object:
    metadata = {"name": name, "namespace": "default", "labels": {"stoker.dev/role": "router"}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 80}]}}


@pytest.mark.parametrize("end", ["-", ".", "x"])
def test_an_event_about_an_object_with_a_long_name_has_a_valid_name(end: str) -> None:
    metadata = {"name": f"{'a' * 199}{end}{'b' * 20}", "namespace": "default", "uid": "u"}
    resource = {"apiVersion": "v1", "kind": "Checkpoint", "metadata": metadata}
    made = event_object(resource, Event("Normal", "A", "b"), datetime(2026, 1, 1, tzinfo=UTC))
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", made["metadata"]["name"])


def test_an_object_without_owner_is_ours_by_its_uid_label(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path)
        made = await new_world(world)
        body = config_map("save")
        body["metadata"]["labels"] = {JOB_UID: "job"}
        world.objects.create(body)
        executor = PlanExecutor(world.cluster, Store(), FakeClock())
        await executor.execute(made["resource"], Plan(create=(body,)))
        other = {**body, "metadata": {**body["metadata"], "labels": {JOB_UID: "another"}}}
        with pytest.raises(Conflict):
            await executor.execute(made["resource"], Plan(create=(other,)))

    asyncio.run(story())


def test_own_writes_are_in_the_store_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path, pods=FakePods())
        await world.kubelet.stop(0)  # no other writer
        made = await new_world(world)
        store = store_of(world)
        await PlanExecutor(world.cluster, store, FakeClock()).execute(made["resource"], wish(made["resource"], made))
        for kind in ("Pod", "ConfigMap"):
            assert store.of_kind(kind) == [pruned(found) for found in world.objects.of_kind(kind)]
        found = store.by_uid(made["resource"]["metadata"]["uid"])
        assert found is not None
        assert found["status"] == {"phase": "Working"}
        assert found["metadata"]["finalizers"] == ["stoker.dev/data"]

    asyncio.run(story())


def test_a_status_for_an_older_version_is_a_conflict(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path)
        made = await new_world(world)
        world.objects.patch(ref_of(made["resource"]), {"metadata": {"labels": {"changed": "yes"}}})
        with pytest.raises(Conflict):
            await PlanExecutor(world.cluster, Store(), FakeClock()).execute(
                made["resource"], Plan(status={"phase": "Old"})
            )

    asyncio.run(story())


def test_the_same_event_appears_once_in_ten_minutes(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path)
        made = await new_world(world)
        clock = FakeClock()
        executor = PlanExecutor(world.cluster, Store(), clock)
        plan = Plan(events=(Event("Warning", "Refused", "no"),))
        for _ in range(3):
            await executor.execute(made["resource"], plan)
        assert len(world.objects.of_kind("Event")) == 1
        await clock.advance(601)
        await executor.execute(made["resource"], plan)
        assert len(world.objects.of_kind("Event")) == 2

    asyncio.run(story())


def test_an_event_is_about_its_resource() -> None:
    resource = pool("one")
    resource["metadata"]["uid"] = "u"
    found = event_object(resource, Event("Normal", "Done", "all good" * 1000), START)
    assert found["involvedObject"] == {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "EnginePool",
        "name": "one",
        "namespace": "default",
        "uid": "u",
    }
    assert len(found["message"]) == 1024
    assert found["metadata"]["name"].startswith("one.")


def test_events_that_cannot_be_written_stop_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path)
        made = await new_world(world)
        flaky = Flaky(world.cluster, fail_at=1, after=False)
        await PlanExecutor(flaky, Store(), FakeClock()).execute(
            made["resource"], Plan(events=(Event("Normal", "A", "b"),))
        )
        assert world.objects.of_kind("Event") == []

    asyncio.run(story())


def what_is_wanted(world: Embedded) -> dict[str, Any]:
    """Return the outcome of `wish` by meaning, without versions."""
    find = world.objects.find
    resource = find(("EnginePool", "default", "resource"))  # type: ignore[arg-type]
    pool_ = find(("EnginePool", "default", "pool"))  # type: ignore[arg-type]
    config = find(("ConfigMap", "default", "config"))  # type: ignore[arg-type]
    assert resource is not None
    assert pool_ is not None
    assert config is not None
    return {
        "finalizers": resource["metadata"]["finalizers"],
        "status": resource["status"],
        "pods": [pod["metadata"]["name"] for pod in world.objects.of_kind("Pod")],
        "config": config["data"],
        "hash": APPLIED_HASH in config["metadata"]["labels"],
        "gates": [pod["spec"]["schedulingGates"] for pod in world.objects.of_kind("Pod")],
        "replicas": pool_["spec"]["replicas"],
        "old": find(("ConfigMap", "default", "old")),  # type: ignore[arg-type]
        "events": [event["reason"] for event in world.objects.of_kind("Event")],
    }


WANTED = {
    "finalizers": ["stoker.dev/data"],
    "status": {"phase": "Working"},
    "pods": ["child", "gated"],
    "config": {"a": "1"},
    "hash": True,
    "gates": [[{"name": "stoker.dev/placement"}], []],
    "replicas": 3,
    "old": None,
    "events": ["Working"],
}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(st.tuples(st.integers(1, 11), st.booleans(), st.booleans()), max_size=4))
def test_any_crash_points_then_a_retry_converge(tmp_path: Path, crashes: list[tuple[int, bool, bool]]) -> None:
    """Crashes happen before or after any write; the operator comes back with an empty or a stale store."""

    async def story() -> None:
        pods = FakePods()
        world = embedded(tmp_path, pods=pods)
        made = await new_world(world)
        store = store_of(world)
        for fail_at, after, fresh in [*crashes, (0, False, True)]:
            if fresh:
                store = store_of(world)
            resource = world.objects.get(("EnginePool", "default", "resource"))  # type: ignore[arg-type]
            flaky = Flaky(world.cluster, fail_at=fail_at, after=after)
            try:
                await PlanExecutor(flaky, store, FakeClock()).execute(resource, wish(resource, made))
            except ServerError:
                continue
        assert what_is_wanted(world) == WANTED
        assert {call.body["id"] for call in pods.calls} == {"one"}

    asyncio.run(story())


def test_a_refused_pod_costs_few_requests_however_many_are_wanted(tmp_path: Path) -> None:
    class Refusing(Recorder):
        async def create(self, body: Object) -> Object:
            self.names.append("create")
            if body["metadata"]["name"] == "child-0004":
                raise Invalid("spec.containers: refused")
            return await self.inner.create(body)

    async def story() -> None:
        world = embedded(tmp_path, pods=FakePods())
        held = (await new_world(world))["resource"]
        cluster = Refusing(world.cluster)
        children = tuple(owned(gated_pod(f"child-{number:04}"), held) for number in range(1000))
        with pytest.raises(Invalid):
            await PlanExecutor(cluster, Store(), FakeClock()).execute(held, Plan(create=children))
        assert len(cluster.names) == 1 + 2 + 4
        cluster.names.clear()
        with pytest.raises(Invalid):  # a second try finds the others
            await PlanExecutor(cluster, Store(), FakeClock()).execute(held, Plan(create=children))

    asyncio.run(story())


def test_a_refused_pod_stops_no_other_write_and_is_told_at_the_end(tmp_path: Path) -> None:
    class Refusing(Recorder):
        async def create(self, body: Object) -> Object:
            if body["kind"] == "Pod":
                self.names.append("refuse")
                raise Forbidden("exceeded quota: pods")
            self.names.append("create")
            return await self.inner.create(body)

    def unreachable(_: ControlCall) -> Mapping[str, Any]:
        raise PodUnreachable("no answer")

    async def story(pods: FakePods) -> None:
        world = embedded(tmp_path, pods=pods)
        made = await new_world(world)
        cluster = Refusing(world.cluster)
        plan = wish(made["resource"], made)
        plan = replace(plan, create=(*plan.create, owned(config_map("made"), made["resource"])))
        with pytest.raises(Forbidden, match="exceeded quota"):
            await PlanExecutor(cluster, store_of(world), FakeClock()).execute(made["resource"], plan)
        rest = ["patch", "update_status", "create", "refuse", "apply", "patch", "scale", "delete", "call"]
        assert cluster.names[:9] == rest
        assert cluster.names[9:] in (["create"], [])  # the event; no finalizer is removed
        assert world.objects.find(Key("ConfigMap", "default", "old")) is None

    asyncio.run(story(FakePods()))
    asyncio.run(story(FakePods(on_call=unreachable)))


@pytest.mark.parametrize("kind", ["Service", "ConfigMap"])
def test_a_refused_edit_around_pods_stops_nothing_but_applies_and_patches(tmp_path: Path, kind: str) -> None:
    class Refusing(Recorder):
        async def apply(self, body: Object, *, manager: str) -> Object:
            self.names.append(f"apply {body['kind']}")
            if body["kind"] == kind:
                raise Forbidden("exceeded quota: services.loadbalancers")
            return await self.inner.apply(body, manager=manager)

    async def story() -> None:
        world = embedded(tmp_path, pods=FakePods())
        made = await new_world(world)
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "front", "namespace": "default"}}
        body = service if kind == "Service" else config_map("first")
        plan = wish(made["resource"], made)
        plan = replace(plan, create=(), apply=(owned(body, made["resource"]), *plan.apply))
        cluster = Refusing(world.cluster)
        with pytest.raises(Forbidden, match="exceeded quota"):
            await PlanExecutor(cluster, store_of(world), FakeClock()).execute(made["resource"], plan)
        rest = ["scale", "delete", "call", "create"] if kind == "Service" else []
        assert [name for name in cluster.names if name != "get"][2:] == [f"apply {kind}", *rest]

    asyncio.run(story())


def test_many_pods_are_made_side_by_side_and_no_more_than_allowed(tmp_path: Path) -> None:
    class Slow(Recorder):
        now = most = 0

        async def create(self, body: Object) -> Object:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return await self.inner.create(body)

    async def story() -> None:
        world = embedded(tmp_path, pods=FakePods())
        held = (await new_world(world))["resource"]
        cluster = Slow(world.cluster)
        children = tuple(owned(gated_pod(f"child-{number}"), held) for number in range(200))
        await PlanExecutor(cluster, Store(), FakeClock(), max_requests=8).execute(held, Plan(create=children))
        assert len(world.objects.of_kind("Pod")) >= 200
        assert cluster.most == 8

    asyncio.run(story())


def test_a_lost_pod_is_removed_without_waiting(tmp_path: Path) -> None:
    class Graces(Recorder):
        async def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
            self.names.append(f"{ref.name} {grace_s}")
            return await self.inner.delete(ref, grace_s=grace_s)

    async def story() -> None:
        world = embedded(tmp_path, pods=FakePods())
        made = await new_world(world)
        cluster = Graces(world.cluster)
        plan = Plan(delete=(ref_of(made["old"]),), force_delete=(ref_of(made["gated"]),))
        await PlanExecutor(cluster, Store(), FakeClock()).execute(made["resource"], plan)
        assert cluster.names == [f"{made['old']['metadata']['name']} None", "gated 0"]

    asyncio.run(story())


def test_a_namespace_that_refuses_everything_new_is_remembered(tmp_path: Path) -> None:
    class Ending(Recorder):
        ending = True

        async def create(self, body: Object) -> Object:
            if self.ending:
                raise NamespaceTerminating("namespace default is being terminated")
            return await self.inner.create(body)

    async def story() -> None:
        world = embedded(tmp_path, pods=FakePods())
        held = (await new_world(world))["resource"]
        cluster, store, clock = Ending(world.cluster), Store(), FakeClock()
        plan = Plan(create=(owned(gated_pod("child"), held),))
        with pytest.raises(NamespaceTerminating):
            await PlanExecutor(cluster, store, clock).execute(held, plan)
        assert store.is_terminating("default", clock.monotonic())
        cluster.ending = False
        await PlanExecutor(cluster, store, clock).execute(held, plan)
        assert not store.is_terminating("default", clock.monotonic())

    asyncio.run(story())


def test_a_generated_secret_has_a_random_key_and_one_that_exists_is_kept_unread(tmp_path: Path) -> None:
    async def story() -> None:
        world = embedded(tmp_path)
        made = await new_world(world)
        recorder = Recorder(world.cluster)
        keys = iter(("first", "second"))
        executor = PlanExecutor(recorder, Store(), FakeClock(), new_key=lambda: next(keys))
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key", "namespace": "default"}}
        for _ in range(2):
            await executor.execute(made["resource"], Plan(generate=(owned(secret, made["resource"]),)))
        assert recorder.names == ["create", "create"]
        (kept,) = world.objects.of_kind("Secret")
        assert base64.b64decode(kept["data"]["key"]) == b"first"
        drawn = [PlanExecutor(recorder, Store(), FakeClock()).new_key() for _ in range(2)]
        assert len({*drawn}) == 2
        assert all(len(bytes.fromhex(key)) == 32 for key in drawn)

    asyncio.run(story())
