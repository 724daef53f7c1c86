"""Roles that flip, from the engines' reports to the routers' snapshot: before a start, back again, after a restart."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.operator.api.pool import Pool, flipping_pools
from stoker.operator.domain.autoscaling.decision import REVIEW_S, Decision
from stoker.operator.domain.autoscaling.record import first_record
from stoker.operator.domain.lent_pods import served_pool
from stoker.operator.domain.plan import Key, Object
from stoker.operator.loop.load_watch import LoadWatch
from stoker.operator.loop.metrics import OperatorMetrics, OperatorState
from stoker.operator.loop.node_watch import NodeCounts
from stoker.operator.loop.store import Store
from testing.operator.engine_load import load
from testing.operator.fakes import FakeClock
from testing.operator.serving_world import CHAT, Serving, label_of
from testing.operator.simulated_cluster import Crash

PRE, DEC = (Key("EnginePool", "default", f"chat-{name}") for name in ("pre", "dec"))
LENT_TO = "stoker.dev/lent-to"
SCALED: dict[str, Any] = {"min": 1, "max": 4, "mode": "load", "scaleDownAfterSeconds": 60}
SEATS = 64


def pools(prefill: int = 3, decode: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """A prefill and a decode pool that Stoker scales; a long proof keeps the prefill pool from going down by itself."""
    return [
        {"name": "pre", "role": "prefill", "replicas": prefill,
         "autoscaling": {**SCALED, "scaleDownAfterSeconds": 3600}},
        {"name": "dec", "role": "decode", "replicas": decode, "autoscaling": SCALED, **changes},
    ]  # fmt: skip


class World:
    """A deployment of two pools whose engines report the load that the test gives the pool that they serve."""

    def __init__(self, layout: list[dict[str, Any]] | None = None, **changes: Any) -> None:
        self.serving = Serving(pools=layout or pools(**changes), router={"holdSeconds": 60})
        self.serving.checkpoint(10)
        self.serving.rest(10)
        self.clock = FakeClock()
        self.restart()

    def restart(self) -> None:
        """Begin with an operator that remembers nothing."""
        self.store = Store()
        self.woken = list[Object]()
        self.watch = LoadWatch(self.store, self.clock, self.woken.append, lambda: None)
        self.serving.cluster.scaling = {}
        self.take()

    def take(self) -> None:
        for found in self.serving.cluster.objects.values():
            if found["kind"] == "Pod" and found["status"].get("conditions"):
                found["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:00:40Z"
            self.store.put(found)

    def serve(self, seconds: int, prefill: int, decode: int) -> None:
        """Let time pass with so many sequences at the engines of each role; the reconcilers follow each review."""
        for number in range(seconds):
            self.clock.passed_s += 1
            for pod in self.engines():
                running = {"pre": prefill, "dec": decode}[served_pool(pod)]
                share = running // max(len(self.of(served_pool(pod))), 1)
                self.watch.note(pod, {"load": load(1, 1, running=share, max_requests=SEATS, owned_tokens=0)})
            if number % REVIEW_S == REVIEW_S - 1:
                self.watch.review_all()
                self.follow()

    def follow(self) -> None:
        """Let the reconcilers act on a decision that has changed."""
        self.serving.cluster.scaling = self.watch.scaling(CHAT)
        if self.woken:
            self.woken.clear()
            self.serving.rest(4)
            self.take()

    def engines(self) -> list[Object]:
        return [pod for pod in self.serving.engines() if pod["status"]["phase"] == "Running"]

    def of(self, pool: str) -> list[Object]:
        """Engines that serve a pool."""
        return [pod for pod in self.engines() if served_pool(pod) == pool]

    @property
    def lent(self) -> list[Object]:
        return [pod for pod in self.engines() if LENT_TO in pod["metadata"]["labels"]]

    @property
    def scales(self) -> tuple[int, int]:
        """`/scale` of the prefill and of the decode pool."""
        spec = [self.serving.cluster.objects[key]["spec"] for key in (PRE, DEC)]
        return spec[0]["replicas"], spec[1]["replicas"]

    def roles(self) -> dict[str, str]:
        """The routers' view: pod uid -> role."""
        return {found["pod_uid"]: found["role"] for found in self.serving.snapshot()["backends"]}

    def decisions(self, pool: str) -> list[tuple[int, int, str]]:
        (found,) = (each for each in self.serving.status["pools"] if each["name"] == pool)
        return [(each["before"], each["after"], each["reason"]) for each in found.get("decisions", ())]


def flipped() -> World:
    """A world whose decode pool has needed a second replica, and got one of the prefill pool's three."""
    world = World()
    world.serve(120, 4, 10)
    world.serve(15, 4, 60)
    return world


def test_a_spare_prefill_engine_becomes_a_decode_engine_before_one_is_started() -> None:
    world = flipped()
    (lent,) = world.lent
    assert (label_of(lent, "pool"), lent["metadata"]["labels"][LENT_TO]) == ("pre", "dec")
    assert world.roles()[lent["metadata"]["uid"]] == "decode"
    assert sorted(world.roles().values()) == ["decode", "decode", "prefill", "prefill"]
    assert world.scales == (3, 1), "no pod was started or drained"
    assert world.decisions("dec")[-1] == (1, 2, "RoleFlip")
    assert world.decisions("pre")[-1] == (3, 2, "RoleFlip")
    world.serve(60, 4, 60)
    assert (world.lent, world.scales) == ([lent], (3, 1))
    assert "RoleFlip" in world.serving.cluster.events


def test_it_goes_back_when_the_need_is_over() -> None:
    world = flipped()
    world.serve(90, 4, 10)
    assert world.lent == []
    assert sorted(world.roles().values()) == ["decode", "prefill", "prefill", "prefill"]
    assert world.scales == (3, 1)
    assert world.decisions("dec")[-1] == (2, 1, "RoleFlip")
    assert world.decisions("pre")[-1] == (2, 3, "RoleFlip")


def test_a_pool_that_needs_its_replica_gets_it_back_and_the_other_starts_one() -> None:
    world = flipped()
    world.serve(20, 150, 60)
    assert world.lent == []
    assert len(world.of("pre")) == 3
    assert world.scales == (3, 2)


def test_a_flip_outlives_the_operator_and_ends_under_the_next_one() -> None:
    world = flipped()
    (lent,) = world.lent
    world.restart()
    world.serving.rest(4)
    assert (world.lent, world.scales) == ([lent], (3, 1))
    world.serve(30, 4, 60)
    assert (world.lent, world.scales) == ([lent], (3, 1))
    world.serve(120, 4, 10)
    assert (world.lent, world.scales) == ([], (3, 1))


def test_a_lent_engine_that_dies_is_replaced_in_its_own_pool() -> None:
    world = flipped()
    world.serving.cluster.vanish(world.lent[0])
    world.restart()
    world.serving.rest(10)
    assert (world.lent, world.scales) == ([], (3, 1))
    assert len(world.of("pre")) == 3


def test_the_replica_that_a_pool_drains_is_not_the_lent_one() -> None:
    world = flipped()
    (lent,) = world.lent
    world.serving.cluster.scaling = {}
    world.serving.cluster.change_spec(PRE, lambda spec: spec.update(replicas=2))
    world.serving.rest(10)
    assert world.lent == [lent]
    assert len(world.engines()) == 3


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"autoscaling": {"min": 1, "max": 4, "mode": "external"}}, id="another scaler"),
        pytest.param({"autoscaling": None}, id="no scaler"),
        pytest.param({"gracePeriodSeconds": 30}, id="pools that differ"),
    ],
)
def test_pools_that_may_not_lend_any_more_get_their_replicas_back(change: dict[str, Any]) -> None:
    world = flipped()
    world.serving.cluster.scaling = {}
    world.serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][1].update(change))
    world.serving.rest(10)
    assert world.lent == []


def test_only_alike_pools_of_two_roles_that_stoker_scales_lend() -> None:
    one, other = (Pool.model_validate(found) for found in pools())
    assert flipping_pools((one, other)) == (one, other)
    assert flipping_pools((one,)) is None
    for change in (
        {"gpusPerPod": 1}, {"parallelism": {"tensor": 2}, "ranksPerPod": 2}, {"role": "colocated"},
        {"autoscaling": {"min": 1, "max": 2, "mode": "external"}},
        {"autoscaling": {"min": 1, "max": 2, "mode": "fixed"}},
    ):  # fmt: skip
        assert flipping_pools((one, Pool.model_validate({**pools()[1], **change}))) is None
    assert flipping_pools((one, Pool.model_validate({**pools()[1], "maxSurge": 2, "replicas": 4}))) is not None


def test_an_old_decision_flips_nothing() -> None:
    world = World()
    decisions = {
        "pre": Decision(0.0, 4, 3, "RoleFlip", "m", flips=-1), "dec": Decision(0.0, 1, 2, "RoleFlip", "m", flips=1),
    }  # fmt: skip
    world.serving.cluster.scaling = {
        name: first_record(found, "2026-01-01T00:00:00Z") for name, found in decisions.items()
    }
    world.serving.rest(4)
    assert world.lent == []


def test_metrics_count_borrowed_replicas() -> None:
    world = flipped()
    world.serve(10, 4, 60)
    metrics = OperatorMetrics()
    metrics.watch(
        lambda: OperatorState(
            queue=0, delayed=0, polls=0, objects={}, silence_s={}, nodes=NodeCounts(0, 0, 0),
            pools=tuple(world.watch.inputs()),
        )
    )  # fmt: skip
    for pool, replicas, borrowed in (("pre", 2, 0), ("dec", 2, 1)):
        labels = {"namespace": "default", "deployment": "chat", "pool": pool}
        value = metrics.registry.get_sample_value
        assert value("stoker_operator_pool_replicas", labels) == replicas
        assert value("stoker_operator_pool_borrowed_replicas", labels) == borrowed


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(["deployment", "pre", "dec", "vanish", "live"]), st.integers(0, 6)), max_size=12)
)
def test_a_flip_that_is_cut_short_at_any_write_is_carried_out_once(events: list[tuple[str, int]]) -> None:
    world = World()
    decisions = {
        "pre": Decision(0.0, 3, 2, "RoleFlip", "m", flips=-1), "dec": Decision(0.0, 1, 3, "RoleFlip", "m", flips=1),
    }  # fmt: skip
    cluster = world.serving.cluster
    cluster.scaling = {name: first_record(found, "2026-01-01T00:00:00Z") for name, found in decisions.items()}
    for event, number in events:
        if event == "vanish":
            cluster.vanish(world.engines()[number % len(world.engines())])
        elif event == "live":
            world.serving.live()
        else:
            with contextlib.suppress(Crash):
                cluster.reconcile({"deployment": CHAT, "pre": PRE, "dec": DEC}[event], crash_after=number)
        if not world.engines():
            return
    assert len(world.lent) <= 1
    world.serving.rest(10)
    assert len(world.lent) <= 1
    assert world.scales[0] == 3
    assert world.scales[1] in (1, 2)


def test_a_deployment_that_is_deleted_during_a_flip_leaves_nothing_and_makes_nothing() -> None:
    world = World()
    world.serve(10, 4, 10)
    cluster = world.serving.cluster
    flips = {
        "pre": Decision(0.0, 3, 2, "RoleFlip", "m", flips=-1), "dec": Decision(0.0, 1, 2, "RoleFlip", "m", flips=1),
    }  # fmt: skip
    cluster.scaling = {name: first_record(found, "2026-01-01T00:00:00Z") for name, found in flips.items()}
    assert [patch.body["metadata"]["labels"] for patch in cluster.plan(CHAT).patch] == [{LENT_TO: "dec"}]
    cluster.objects[CHAT]["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z", finalizers=["other/one"])
    assert cluster.plan(CHAT).empty, "neither a label, nor an event in each pass"
    cluster.objects[CHAT]["metadata"].update(finalizers=[])
    cluster.delete(CHAT)
    for _ in range(3):
        cluster.settle_once()
        cluster.collect()
    assert [key for key in cluster.objects if key.kind in ("InferenceDeployment", "EnginePool", "Pod")] == []
    world.store = world.watch.store = cluster._store()
    world.watch.review_all()
    assert world.watch.scaling(CHAT) == {}


@pytest.mark.parametrize(
    "roles", [("decode", "prefill"), ("prefill", "decode")], ids=["exchanged", "only another edit"]
)
def test_roles_that_are_edited_during_a_flip_hold_for_the_new_engines_of_each_pool(roles: tuple[str, str]) -> None:
    world = flipped()
    assert world.lent
    spec = [{**found, "role": role, "startupSeconds": 700} for found, role in zip(pools(), roles, strict=True)]
    world.serving.cluster.change_spec(CHAT, lambda found: found.update(pools=spec))
    for _ in range(30):
        world.serve(5, 10, 10)
        world.serving.rest(2)
        world.take()
    live = {found["pod_uid"]: found for found in world.serving.snapshot()["backends"] if not found["draining"]}
    for pod in world.engines():
        found = live[pod["metadata"]["uid"]]
        assert found["role"] == dict(zip(("pre", "dec"), roles, strict=True))[served_pool(pod)]
    assert {found["role"] for found in live.values()} == {"prefill", "decode"}
    assert world.serving.status["phase"] == "Serving"
    assert world.serving.cluster.plan(CHAT).empty


def test_two_pools_that_become_one_leave_no_engine_lent() -> None:
    world = flipped()
    one = [{"name": "dec", "replicas": 2, "autoscaling": SCALED}]
    world.serving.cluster.change_spec(CHAT, lambda found: found.update(pools=one))
    for _ in range(30):
        world.serving.rest(2)
    world.take()
    assert (world.lent, PRE in world.serving.cluster.objects) == ([], False)
    assert {found["role"] for found in world.serving.snapshot()["backends"]} == {"colocated"}
    assert world.serving.status["phase"] == "Serving"
    assert world.serving.cluster.plan(CHAT).empty
