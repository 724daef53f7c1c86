"""The reconciles of InferenceDeployment and EnginePool, in a simulated cluster: single stories, then any order and any crash point."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.pool import Pool
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.enginepool.reconcile import reconcile_enginepool
from stoker.operator.reconcile.inferencedeployment.reconcile import reconcile_inferencedeployment
from stoker.operator.reconcile.inferencedeployment.view import pool_object_name
from stoker.pod.exit_code import Cause
from tests.operator.simulated_cluster import Crash, SimulatedCluster

CHAT = Key("InferenceDeployment", "default", "chat")
POOL = Key("EnginePool", "default", "chat-main")


class Serving:
    """A cluster with one deployment, and an environment that behaves."""

    def __init__(self, *, model: dict[str, Any] | None = None, replicas: int = 1, **spec: Any) -> None:
        reconcilers = {"InferenceDeployment": reconcile_inferencedeployment, "EnginePool": reconcile_enginepool}
        self.cluster = SimulatedCluster(reconcilers)
        self.cluster.add(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "claim"}, "spec": {}}
        )
        body = {
            "model": model or {"checkpointSelector": {"jobRef": {"name": "run"}}},
            "pools": [{"name": "main", "replicas": replicas}],
            **spec,
        }
        self.cluster.add(
            {
                "apiVersion": "stoker.dev/v1alpha1",
                "kind": "InferenceDeployment",
                "metadata": {"name": "chat"},
                "spec": body,
            }
        )

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.cluster.objects[CHAT].get("status", {}))

    @property
    def pool_status(self) -> dict[str, Any]:
        return dict(self.cluster.objects[POOL].get("status", {}))

    def checkpoint(self, step: int, *, verified: bool = True, **status: Any) -> Object:
        conditions = [
            {"type": "Verified", "status": "True", "reason": "ByAgent", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        ]
        made = self.cluster.add(
            {
                "apiVersion": "stoker.dev/v1alpha1",
                "kind": "Checkpoint",
                "metadata": {"name": f"run-{step}", "labels": {"stoker.dev/job": "run", "stoker.dev/job-uid": "u"}},
                "spec": {"source": {"jobRef": {"name": "run"}}},
            }
        )
        made["status"] = {
            "phase": "Complete",
            "storage": {"claimName": "claim", "path": "run"},
            "folder": f"step-{step:08d}.00000000",
            "step": step,
            "digest": f"d{step}",
            "conditions": conditions if verified else [],
            **status,
        }
        self.cluster._touch(made)
        return made

    def engines(self, revision: str | None = None) -> list[Object]:
        found = self.cluster.pods("engine")
        return [p for p in found if revision in (None, p["metadata"]["labels"]["stoker.dev/revision"])]

    def live(self) -> None:
        """One round of an environment that behaves: pods get ready, routers take snapshots, engines drain, deleted pods end."""
        cluster = self.cluster
        for pod in [*cluster.pods("engine"), *cluster.pods("router")]:
            cluster.run(pod)
        self.take_snapshots()
        self.drain_engines()
        cluster.collect()

    def take_snapshots(self, *, healthy: bool = True) -> None:
        """Routers follow, and have probed every backend."""
        stored = [c for c in self.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith("-backends")]
        for pod in self.cluster.pods("router"):
            if stored and pod["status"]["phase"] == "Running":
                snapshot = json.loads(stored[0]["data"]["backends.json"])
                backends = [{**backend, "healthy": healthy} for backend in snapshot["backends"]]
                self.cluster.report(pod, {"snapshot_version": snapshot["version"], "backends": backends})

    def drain_engines(self) -> None:
        asked = {name for name, path, _ in self.cluster.calls if path == "/drain"}
        for pod in self.engines():
            phase = (
                "Drained"
                if pod["metadata"]["name"] in asked and "stoker.dev/draining" in pod["metadata"]["labels"]
                else "Serving"
            )
            self.cluster.report(pod, {"phase": phase})

    def rest(self, rounds: int = 30) -> None:
        """Until nothing changes any more."""
        for _ in range(rounds):
            self.cluster.settle_once()
            self.live()
            self.cluster.advance(2)
        for _ in range(3):
            self.cluster.settle_once()

    def condition(self, name: str) -> str:
        return next((c["status"] for c in self.status.get("conditions", ()) if c["type"] == name), "absent")

    def snapshot(self) -> dict[str, Any]:
        stored = next(c for c in self.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith("-backends"))
        return dict(json.loads(stored["data"]["backends.json"]))


def test_deployments_with_the_same_long_beginning_have_pools_of_their_own() -> None:
    pools = []
    for end in ("one", "two"):
        name = f"a-team-with-a-very-long-name-serves-{end}"
        pool_name = pool_object_name(
            InferenceDeployment.model_validate(
                {"metadata": {"name": name}, "spec": {"model": {"uri": "file:///m"}, "pools": [{"name": "p" * 12}]}}
            ),
            Pool(name="p" * 12),
        )
        pools.append(pool_name)
    assert len(set(pools)) == 2
    assert all(len(f"{name}-r0123456789-9999") <= 63 for name in pools)


def test_without_a_verified_checkpoint_it_waits_and_says_for_what() -> None:
    serving = Serving()
    serving.checkpoint(10, verified=False)
    serving.rest(3)
    assert serving.status["phase"] == "WaitingForCheckpoint"
    assert "no verified checkpoint of TrainingJob run" in serving.status["message"]
    assert serving.engines() == []


def test_the_newest_verified_checkpoint_is_served_behind_a_router() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.checkpoint(20)
    serving.rest()
    assert (serving.status["phase"], serving.status["ready"]) == ("Serving", "2/2")
    assert serving.status["currentCheckpoint"]["step"] == 20
    assert len(serving.cluster.pods("router")) == 1
    assert [backend["draining"] for backend in serving.snapshot()["backends"]] == [False, False]


def test_a_second_pass_over_a_served_model_is_empty() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    assert serving.cluster.plan(CHAT).empty
    assert serving.cluster.plan(POOL).empty


def test_an_upgrade_of_the_operator_restarts_no_pod() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    before = {pod["metadata"]["uid"] for pod in serving.cluster.of_kind("Pod")}
    serving.cluster.settings = Settings(operator_version="9.9.9", runtime_image="new:9", control_image="new:9")
    serving.rest()
    assert {pod["metadata"]["uid"] for pod in serving.cluster.of_kind("Pod")} == before


def test_a_newer_checkpoint_rolls_without_losing_a_ready_replica() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    old = serving.status["currentRevision"]
    serving.checkpoint(20)
    for _ in range(40):
        serving.cluster.settle_once()
        usable = [backend for backend in serving.snapshot()["backends"] if not backend["draining"]]
        assert len(usable) >= 2
        serving.live()
        serving.cluster.advance(2)
    serving.rest(5)
    assert serving.status["currentCheckpoint"]["step"] == 20
    assert serving.engines(old) == []
    assert (serving.status["phase"], serving.status["rollout"]["phase"]) == ("Serving", "Completed")


def test_an_engine_drains_only_after_the_routers_have_forgotten_it() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.calls.clear()
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=1))
    for _ in range(4):
        serving.cluster.settle_once()
    assert [path for _, path, _ in serving.cluster.calls if path == "/drain"] == []
    serving.take_snapshots()
    serving.cluster.settle_once()
    assert [path for _, path, _ in serving.cluster.calls if path == "/drain"] == ["/drain"]
    serving.rest()
    assert (serving.status["ready"], len(serving.engines())) == ("1/1", 1)


def test_an_old_engine_stays_until_the_routers_have_found_the_new_one_healthy() -> None:
    serving = Serving(replicas=1)
    serving.checkpoint(10)
    serving.rest()
    serving.checkpoint(20)
    for _ in range(10):
        serving.cluster.settle_once()
        for pod in serving.engines():
            serving.cluster.run(pod)
        serving.take_snapshots(healthy=False)
    assert [backend["draining"] for backend in serving.snapshot()["backends"]] == [False, False]
    serving.rest()
    assert (len(serving.engines()), serving.status["currentCheckpoint"]["step"]) == (1, 20)


def test_replicas_set_through_scale_are_kept_when_the_revision_changes() -> None:
    serving = Serving(model={"uri": "file:///models/a"}, pools=[{"name": "main", "replicas": 1}])
    serving.rest()
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=3))
    serving.rest()
    assert serving.cluster.objects[POOL]["spec"]["replicas"] == 3
    serving.cluster.change_spec(CHAT, lambda spec: spec["model"].update(uri="file:///models/b"))
    serving.rest()
    assert (serving.cluster.objects[POOL]["spec"]["replicas"], serving.status["ready"]) == (3, "3/3")


def test_an_engine_that_ends_is_replaced_with_growing_delay_and_its_cause_is_shown() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    for _ in range(3):
        serving.cluster.end(serving.engines()[0], Cause.CHECKPOINT_CORRUPT, detail="piece 7")
        for _ in range(3):
            serving.cluster.settle_once()
        serving.cluster.advance(600)
        serving.cluster.settle_once()
        serving.cluster.settle_once()
    assert serving.pool_status["failures"] == 3
    assert "CheckpointCorrupt: piece 7" in serving.pool_status["message"]
    serving.rest()
    assert (serving.pool_status["failures"], serving.status["phase"]) == (0, "Serving")


def test_a_corrupt_checkpoint_by_name_stalls_and_names_the_object() -> None:
    serving = Serving(model={"checkpointRef": {"name": "run-10"}})
    serving.checkpoint(10, phase="Corrupt")
    serving.rest(3)
    assert "Checkpoint run-10 is Corrupt" in serving.status["message"]
    stalled = [c for c in serving.status["conditions"] if c["type"] == "Stalled"]
    assert stalled


def test_a_deployment_whose_engines_cannot_start_fails_with_their_words_until_its_model_changes() -> None:
    serving = Serving(model={"uri": "file:///models/bad"})
    for _ in range(3):
        for _ in range(4):
            serving.cluster.settle_once()
        (engine,) = serving.engines()
        serving.cluster.run(engine, ready=False)
        serving.cluster.report(engine, {"phase": "Failed", "message": "config.json: no such architecture"})
        serving.cluster.settle_once()
        serving.cluster.end(engine, Cause.MODEL_ERROR, detail="config.json: no such architecture")
        for _ in range(3):
            serving.cluster.settle_once()
        assert serving.engines() == []
        assert serving.status["phase"] == "Failed"
        assert "ModelError: config.json: no such architecture" in serving.status["message"]
        serving.cluster.advance(serving.pool_status["failures"] * 2)
    assert serving.condition("Stalled") == "True"
    assert serving.pool_status["failures"] == 3
    serving.cluster.change_spec(CHAT, lambda spec: spec["model"].update(uri="file:///models/good"))
    serving.rest()
    assert (serving.status["phase"], serving.status["ready"]) == ("Serving", "1/1")


def test_the_best_checkpoint_has_the_lowest_validation_loss() -> None:
    serving = Serving(model={"checkpointSelector": {"jobRef": {"name": "run"}, "policy": "best"}})
    serving.checkpoint(10, validationLoss="1.5")
    serving.checkpoint(20, validationLoss="1.7")
    serving.rest()
    assert serving.status["currentCheckpoint"]["step"] == 10


def test_a_router_that_dies_comes_back_and_takes_the_snapshot() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.kill(serving.cluster.pods("router")[0])
    serving.rest()
    assert serving.status["phase"] == "Serving"
    assert len(running_routers(serving)) == 1


def test_a_paused_rollout_stays_where_it_is_and_goes_on_from_there() -> None:
    serving = Serving(replicas=3)
    serving.checkpoint(10)
    serving.rest()
    before = {label_of(pod, "revision") for pod in serving.engines()}
    serving.checkpoint(20)
    while {label_of(pod, "revision") for pod in running_engines(serving)} <= before:
        serving.cluster.settle_once()
        serving.live()
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout={"paused": True}))
    serving.rest()
    held = sorted(label_of(pod, "revision") for pod in serving.engines())
    assert len(held) == 3
    assert set(held) > before
    assert serving.status["rollout"]["phase"] == "Paused"

    serving.cluster.kill(next(pod for pod in serving.engines() if label_of(pod, "revision") in before))
    serving.rest()
    assert len(running_engines(serving)) == 3, "what ends is replaced all the same"

    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout={"paused": False}))
    serving.rest()
    assert not before & {label_of(pod, "revision") for pod in serving.engines()}
    assert (serving.status["rollout"]["phase"], serving.status["ready"]) == ("Completed", "3/3")


def label_of(pod: Object, name: str) -> str:
    return str(pod["metadata"]["labels"][f"stoker.dev/{name}"])


def running_engines(serving: Serving) -> list[Object]:
    return [found for found in serving.engines() if found["status"]["phase"] == "Running"]


def test_a_pool_that_is_renamed_serves_until_the_new_one_is_ready() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=[{"name": "big", "replicas": 1}]))
    for _ in range(4):
        serving.cluster.settle_once()
    assert {key.name for key in serving.cluster.objects if key.kind == "EnginePool"} == {"chat-main", "chat-big"}
    assert len(serving.snapshot()["backends"]) == 1
    serving.rest()
    assert {key.name for key in serving.cluster.objects if key.kind == "EnginePool"} == {"chat-big"}
    assert (serving.status["phase"], serving.status["rollout"]["phase"]) == ("Serving", "Completed")


def test_an_engine_beyond_those_of_the_status_drains_in_its_time_too() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    (first,) = serving.engines()
    for number in range(1, 300):
        other = copy.deepcopy(first)
        other["metadata"] |= {"name": f"{first['metadata']['name']}{number:03}", "uid": f"uid-of-{number:03}"}
        serving.cluster.objects[Key("Pod", "default", other["metadata"]["name"])] = other
    other["metadata"]["labels"]["stoker.dev/draining"] = "true"
    serving.cluster.objects[POOL]["spec"]["replicas"] = 299
    serving.cluster.reconcile(POOL)
    engines = serving.pool_status["engines"]
    assert len(engines) == 256
    assert [engine["name"] for engine in engines] == sorted(engine["name"] for engine in engines)
    assert [engine["name"] for engine in engines if engine["draining"]] == [other["metadata"]["name"]]
    serving.cluster.advance(301)
    refs = serving.cluster.plan(POOL).delete
    assert [ref.name for ref in refs] == [other["metadata"]["name"]]


def test_routers_that_end_one_after_the_other_are_replaced_ever_more_slowly_and_say_why() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    waits = []
    for _ in range(5):
        (pod,) = [found for found in serving.cluster.pods("router") if found["status"]["phase"] == "Running"]
        serving.cluster.end(pod, Cause.CONFIG_INVALID, detail="no such policy")
        serving.cluster.settle_once()
        waits.append(next(s for s in range(60) if another_router_runs(serving, 1 if s else 0)))
    assert waits == [1, 2, 4, 8, 16]
    serving.cluster.end(running_routers(serving)[0], Cause.CONFIG_INVALID, detail="no such policy")
    serving.cluster.settle_once()
    assert serving.status["message"] == "no router is ready: ConfigInvalid: no such policy"
    assert serving.status["router"]["replicas"] == 0

    serving.cluster.advance(700)
    serving.rest()
    assert len(serving.cluster.pods("router")) == 1
    assert serving.status["phase"] == "Serving"


def running_routers(serving: Serving) -> list[Object]:
    return [found for found in serving.cluster.pods("router") if found["status"]["phase"] == "Running"]


def another_router_runs(serving: Serving, seconds: float) -> bool:
    serving.cluster.advance(seconds)
    for _ in range(3):
        serving.cluster.settle_once()
    for pod in serving.cluster.pods("router"):
        serving.cluster.run(pod)
    return bool(running_routers(serving))


def test_what_is_not_built_yet_is_refused_by_name_and_leaves_what_serves() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.change_spec(
        CHAT,
        lambda spec: (
            spec["router"].update(policy="cacheAware")
            if "router" in spec
            else spec.update(router={"policy": "cacheAware"})
        ),
    )
    serving.rest()
    assert "spec.router.policy cacheAware is not supported yet" in serving.status["message"]
    assert len(serving.engines()) == 1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "deployment",
                "pool",
                "run",
                "snapshots",
                "drain",
                "collect",
                "kill engine",
                "kill router",
                "vanish",
                "checkpoint",
                "scale",
                "wait",
            ]
        ),
        st.integers(0, 6),
    ),
    max_size=50,
)


def disturb(serving: Serving, event: str, number: int) -> None:
    cluster = serving.cluster
    engines, routers = cluster.pods("engine"), cluster.pods("router")
    if event in {"deployment", "pool"}:
        key = CHAT if event == "deployment" else POOL
        if key in cluster.objects:
            with contextlib.suppress(Crash):
                cluster.reconcile(key, crash_after=number if number < 6 else None)
    elif event == "run":
        for pod in [*engines, *routers][: number + 1]:
            cluster.run(pod)
    elif event == "snapshots":
        serving.take_snapshots()
    elif event == "drain":
        serving.drain_engines()
    elif event == "collect":
        cluster.collect()
    elif event == "kill engine" and engines:
        cluster.kill(engines[number % len(engines)])
    elif event == "kill router" and routers:
        cluster.kill(routers[number % len(routers)])
    elif event == "vanish" and engines:
        cluster.vanish(engines[number % len(engines)])
    elif event == "checkpoint":
        serving.checkpoint(10 * (number + 1))
    elif event == "scale":
        cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=number % 4))
    elif event == "wait":
        cluster.advance(60 * number)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_any_order_and_any_crash_point_converge(events: list[tuple[str, int]]) -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(5)
    for event, number in events:
        disturb(serving, event, number)
        versions = [r.get("snapshot_version", 0) for r in serving.cluster.reports.values()]
        newest = serving.status.get("router", {}).get("snapshotVersion", 0)
        assert all(version <= newest for version in versions), "no router is ahead of the status"
    for _ in range(3):
        serving.cluster.advance(600)
        serving.rest(12)
    wanted = serving.cluster.objects[CHAT]["spec"]["pools"][0]["replicas"]
    steps = [c["status"]["step"] for c in serving.cluster.of_kind("Checkpoint")]
    assert len(serving.engines()) == wanted
    assert serving.status["currentCheckpoint"]["step"] == max(steps)
    assert serving.status["rollout"]["phase"] == "Completed"
    assert serving.cluster.plan(CHAT).empty
    assert serving.cluster.plan(POOL).empty


@pytest.mark.parametrize(("autoscaling", "replicas"), [(None, 1), ({"max": 4, "mode": "external"}, 3)])
def test_only_an_external_scaler_may_change_the_number_of_replicas(
    autoscaling: dict[str, Any] | None, replicas: int
) -> None:
    pool = {"name": "main", "replicas": 1, **({"autoscaling": autoscaling} if autoscaling else {})}
    serving = Serving(pools=[pool])
    serving.checkpoint(10)
    serving.rest()

    def scale(spec: dict[str, Any]) -> None:
        spec["replicas"] = 3

    serving.cluster.change_spec(POOL, scale)
    serving.rest()
    assert serving.cluster.objects[POOL]["spec"]["replicas"] == len(serving.engines()) == replicas
    assert (serving.status["phase"], serving.status["ready"]) == ("Serving", f"{replicas}/{replicas}")
