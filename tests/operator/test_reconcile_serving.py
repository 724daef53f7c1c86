"""The reconciles of InferenceDeployment and EnginePool: single stories, then any order and any crash point."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.pool import Pool
from stoker.operator.domain.plan import Key
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.inferencedeployment.view import pool_object_name
from stoker.pod.causes import Cause
from testing.operator.serving_world import (
    CHAT,
    EVENTS,
    POOL,
    Serving,
    condition_of,
    disturb,
    label_of,
    renamed_as_by_an_older_version,
    running_engines,
    running_routers,
)


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


def test_it_is_not_ready_for_more_replicas_before_they_are() -> None:
    """In the first pass after the edit too, whose status has the new generation: `kubectl wait` and Flux end there."""
    serving = Serving(model={"uri": "pvc://claim/m"}, replicas=1)
    serving.rest()
    assert (serving.condition("Ready"), serving.status["ready"]) == ("True", "1/1")
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=3))
    serving.cluster.reconcile(CHAT)
    assert serving.status["observedGeneration"] == serving.cluster.objects[CHAT]["metadata"]["generation"]
    assert (serving.condition("Ready"), serving.status["ready"]) == ("False", "1/3")
    serving.rest()
    assert (serving.condition("Ready"), serving.status["ready"]) == ("True", "3/3")


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


def test_it_serves_when_a_router_has_reached_an_engine_and_no_longer_when_none_does() -> None:
    serving = Serving()
    serving.checkpoint(10)
    for _ in range(20):
        serving.cluster.settle_once()
        for pod in [*serving.engines(), *serving.cluster.pods("router")]:
            serving.cluster.run(pod)
        serving.take_snapshots(healthy=False)
    assert (serving.status["phase"], serving.status["ready"]) == ("Starting", "1/1")
    assert serving.status["message"] == "no router has reached an engine"
    serving.rest()
    assert serving.status["phase"] == "Serving"
    serving.take_snapshots(healthy=False)
    serving.cluster.settle_once()
    assert (serving.status["phase"], serving.status["message"]) == ("Degraded", "no router has reached an engine")
    assert ready_of(serving.status["conditions"]) == "False"
    serving.rest()
    assert serving.status["phase"] == "Serving"


def test_a_router_that_has_not_reported_takes_nothing_away() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.reports = {}
    serving.cluster.settle_once()
    assert serving.status["phase"] == "Serving"


def ready_of(conditions: list[dict[str, Any]]) -> str:
    return next(str(found["status"]) for found in conditions if found["type"] == "Ready")


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


def as_an_older_version_left_it(serving: Serving) -> None:
    """Make the deployment's status that of a version with fewer fields, whose hashes of the manifest differ."""
    found = serving.cluster.objects[CHAT]
    status = found["status"]
    for revision in status["revisions"]:
        revision["intent"] = "0123456789"
    status["router"]["intent"] = "01234567"


def test_a_version_with_other_defaults_keeps_the_revision_and_the_routers_of_an_unedited_spec() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    before, revision = (
        {pod["metadata"]["uid"] for pod in serving.cluster.of_kind("Pod")},
        serving.status["currentRevision"],
    )
    as_an_older_version_left_it(serving)
    serving.rest()
    assert {pod["metadata"]["uid"] for pod in serving.cluster.of_kind("Pod")} == before
    assert serving.status["currentRevision"] == revision
    assert [found["name"] for found in serving.status["revisions"]] == [revision]
    assert serving.status["revisions"][0]["intent"] != "0123456789", "the hash of this version"
    assert serving.cluster.plan(CHAT).empty


def test_an_edit_or_a_newer_checkpoint_beside_an_upgrade_makes_a_new_revision() -> None:
    for change in ("spec", "checkpoint"):
        serving = Serving()
        serving.checkpoint(10)
        serving.rest()
        old = serving.status["currentRevision"]
        as_an_older_version_left_it(serving)
        if change == "spec":
            serving.cluster.change_spec(CHAT, lambda spec: spec.setdefault("engine", {}).update(threads=3))
        else:
            serving.checkpoint(20)
        serving.rest()
        assert serving.status["currentRevision"] != old, change
        assert serving.engines(old) == [], change


def test_a_version_with_other_hashes_keeps_the_revision_of_a_deployment_that_is_paused() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout={"paused": True}))
    serving.rest()
    (older,) = renamed_as_by_an_older_version(serving).values()
    before = {pod["metadata"]["uid"] for pod in serving.engines()}
    serving.rest(5)
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout={"paused": False}))
    serving.rest()
    assert {pod["metadata"]["uid"] for pod in serving.engines()} == before
    assert [found["name"] for found in serving.status["revisions"]] == [older]


def test_a_version_with_other_hashes_keeps_the_edit_of_a_deployment_that_is_paused() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    old = serving.status["currentRevision"]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout={"paused": True}, engine={"threads": 3}))
    serving.rest()
    edited = next(found["name"] for found in serving.status["revisions"] if found["name"] != old)
    older = renamed_as_by_an_older_version(serving)
    serving.rest(5)
    assert serving.status["currentRevision"] == older[old]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout={"paused": False}))
    serving.rest()
    assert serving.status["currentRevision"] == older[edited]
    assert {found["name"] for found in serving.status["revisions"]} == set(older.values())


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


def test_one_replica_that_keeps_failing_beside_a_ready_one_is_replaced_ever_more_slowly_and_says_why() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    waits = []
    for _ in range(3):
        serving.cluster.end(running_engines(serving)[-1], Cause.RANK_FAILED, detail="no device")
        for _ in range(2):
            serving.cluster.settle_once()
        assert "1 of 2 replicas are ready" in serving.status["message"]
        assert "RankFailed: no device" in serving.status["message"]
        waits.append(next(s for s in range(60) if another_engine_runs(serving, 1 if s else 0)))
    assert (waits, serving.pool_status["phase"]) == ([1, 2, 4], "Degraded")
    serving.cluster.vanish(running_engines(serving)[-1])
    serving.rest()
    assert (serving.status["phase"], serving.pool_status["failures"]) == ("Serving", 0)


def another_engine_runs(serving: Serving, seconds: float) -> bool:
    """Return whether a new engine has started; it does not become ready."""
    serving.cluster.advance(seconds)
    for _ in range(2):
        serving.cluster.settle_once()
    for pod in serving.engines():
        serving.cluster.run(pod, ready=False)
    return len(running_engines(serving)) == 2


@pytest.mark.parametrize(("pinned", "step"), [(False, 10), (True, 20)])
def test_a_save_that_retention_gave_up_is_served_only_once_it_is_pinned(pinned: bool, step: int) -> None:
    serving = Serving()
    serving.checkpoint(10)
    given_up = serving.checkpoint(20)
    given_up["metadata"]["labels"]["stoker.dev/expired"] = "true"
    given_up["spec"]["pinned"] = pinned
    serving.rest()
    assert serving.status["currentCheckpoint"]["step"] == step


@pytest.mark.parametrize(
    ("metadata", "verified", "says"),
    [
        ({}, False, "is not verified yet"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b"]}, True, "is being deleted"),
        ({"labels": {"stoker.dev/expired": "true"}}, True, "is beyond checkpoint.maxToKeep of its job, and not pinned"),
    ],
)
def test_a_named_checkpoint_that_cannot_be_served_says_why(metadata: dict[str, Any], verified: bool, says: str) -> None:
    serving = Serving(model={"checkpointRef": {"name": "run-10"}})
    serving.checkpoint(10, verified=verified)["metadata"].update(metadata)
    serving.rest(2)
    assert serving.status["message"] == f"Checkpoint run-10 {says} (spec.model.checkpointRef)"
    assert serving.engines() == []


def test_a_corrupt_checkpoint_by_name_stalls_and_names_the_object() -> None:
    serving = Serving(model={"checkpointRef": {"name": "run-10"}})
    serving.checkpoint(10, phase="Corrupt")
    serving.rest(3)
    assert "Checkpoint run-10 is Corrupt" in serving.status["message"]
    stalled = [c for c in serving.status["conditions"] if c["type"] == "Stalled"]
    assert stalled


def test_a_checkpoint_that_is_made_anew_with_other_content_is_another_revision() -> None:
    """Its name alone says nothing: the engines that serve keep the data of the one that is gone until they are left."""
    key = Key("Checkpoint", "default", "run-10")
    serving = Serving(model={"checkpointRef": {"name": "run-10"}}, replicas=2)
    serving.checkpoint(10)
    serving.rest()
    first, old = serving.status["currentCheckpoint"], serving.status["currentRevision"]
    serving.cluster.delete(key)
    serving.rest(4)
    text = "Checkpoint run-10 does not exist (spec.model.checkpointRef)"
    assert (serving.status["phase"], serving.status["message"]) == ("Serving", text)
    serving.cluster.kill(serving.engines()[0])
    serving.rest(6)
    assert [label_of(pod, "revision") for pod in serving.engines()] == [old, old], "they are replaced as they were"
    serving.checkpoint(10, verified=False, digest="other", folder="step-00000010.11111111")
    serving.rest(4)
    assert serving.status["message"] == "Checkpoint run-10 is not verified yet (spec.model.checkpointRef)"
    assert (serving.status["currentCheckpoint"], len(serving.engines(old))) == (first, 2)
    serving.cluster.objects[key]["status"]["conditions"] = [
        {"type": "Verified", "status": "True", "reason": "ByTask", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    ]
    serving.rest(40)
    assert serving.status["currentCheckpoint"] == {
        **first, "uid": serving.cluster.objects[key]["metadata"]["uid"], "digest": "other",
        "folder": "step-00000010.11111111",
    }  # fmt: skip
    assert (serving.engines(old), serving.status["phase"], serving.status["ready"]) == ([], "Serving", "2/2")
    assert serving.cluster.plan(CHAT).empty


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


@pytest.mark.parametrize("diverged", ["nan", "inf"])
def test_a_checkpoint_whose_loss_is_not_finite_is_never_the_best(diverged: str) -> None:
    serving = Serving(model={"checkpointSelector": {"jobRef": {"name": "run"}, "policy": "best"}})
    serving.checkpoint(5, validationLoss=diverged)
    serving.cluster.settle()
    assert "has a validationLoss" in serving.status["message"]
    serving.checkpoint(10, validationLoss="1.5")
    serving.checkpoint(20, validationLoss=diverged)
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


def test_a_router_that_dies_is_replaced_while_an_edit_of_the_service_is_refused() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(router={"service": {"type": "LoadBalancer"}}))
    serving.cluster.kill(serving.cluster.pods("router")[0])
    serving.cluster.advance(60)
    plan = serving.cluster.plan(CHAT)
    assert [body["kind"] for body in plan.apply if body["kind"] == "Service"] == ["Service"]
    assert [pod["metadata"]["labels"]["stoker.dev/role"] for pod in made_after_refusals(serving)] == ["router"]


def made_after_refusals(serving: Serving) -> list[dict[str, Any]]:
    """Take everything but Services until nothing else is applied; return what the next plan makes."""
    for _ in range(4):
        for body in serving.cluster.plan(CHAT).apply:
            if body["kind"] != "Service":
                serving.cluster._apply(body)
    return list(serving.cluster.plan(CHAT).create)


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


def another_router_runs(serving: Serving, seconds: float) -> bool:
    serving.cluster.advance(seconds)
    for _ in range(3):
        serving.cluster.settle_once()
    for pod in serving.cluster.pods("router"):
        serving.cluster.run(pod)
    return bool(running_routers(serving))


@pytest.mark.parametrize("autoscaling", [None, {"min": 0, "max": 4, "mode": "external"}], ids=["fixed", "external"])
def test_a_deployment_without_replicas_is_scaled_to_zero_and_not_ready(autoscaling: dict[str, Any] | None) -> None:
    pool = {"name": "main", "replicas": 1, **({"autoscaling": autoscaling} if autoscaling else {})}
    serving = Serving(pools=[pool])
    serving.checkpoint(10)
    serving.rest()
    if autoscaling:
        serving.cluster.change_spec(POOL, lambda spec: spec.update(replicas=0))
    else:
        serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=0))
    serving.rest()
    assert serving.engines() == []
    assert (serving.status["phase"], serving.status["ready"]) == ("ScaledToZero", "0/0")
    assert serving.status["message"] == "scaled to zero: no replicas in pool main"
    assert [serving.condition(name) for name in ("Ready", "Reconciling", "Stalled")] == ["False", "absent", "absent"]
    assert (serving.pool_status["phase"], condition_of(serving.pool_status, "Ready")["status"]) == (
        "ScaledToZero",
        "False",
    )
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=1))
    serving.cluster.change_spec(POOL, lambda spec: spec.update(replicas=1))
    serving.rest()
    assert (serving.status["phase"], serving.condition("Ready")) == ("Serving", "True")


@pytest.mark.parametrize(
    ("asked", "pods", "bound"), [(9, 4, "max 4"), (0, 2, "min 2"), (3, 3, None)], ids=["above", "below", "within"]
)
def test_an_external_scaler_gets_replicas_within_min_and_max(asked: int, pods: int, bound: str | None) -> None:
    """`/scale` keeps what the scaler wrote; the pods keep to the bounds, and the condition names the one that holds."""
    pool = {"name": "main", "replicas": 2, "autoscaling": {"min": 2, "max": 4, "mode": "external"}}
    serving = Serving(pools=[pool])
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.change_spec(POOL, lambda spec: spec.update(replicas=asked))
    serving.rest()
    assert serving.cluster.objects[POOL]["spec"]["replicas"] == asked
    assert (len(serving.engines()), serving.status["ready"]) == (pods, f"{pods}/{pods}")
    assert (serving.status["phase"], serving.pool_status["phase"]) == ("Serving", "Serving")
    assert serving.status["rollout"]["phase"] == "Completed"
    assert serving.cluster.plan(CHAT).empty
    assert serving.cluster.plan(POOL).empty
    found = condition_of(serving.status, "AutoscalingLimited") if bound else {"reason": None, "message": ""}
    assert serving.condition("AutoscalingLimited") == ("True" if bound else "absent")
    assert found["reason"] == ("OutOfBounds" if bound else None)
    text = f"spec.pools[main].autoscaling: /scale of EnginePool chat-main has {asked} replicas, {bound} holds"
    assert found["message"] == (text if bound else "")


def test_new_bounds_of_an_external_scaler_take_effect_without_a_new_revision() -> None:
    pool = {"name": "main", "replicas": 1, "autoscaling": {"max": 2, "mode": "external"}}
    serving = Serving(pools=[pool])
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.change_spec(POOL, lambda spec: spec.update(replicas=3))
    serving.rest()
    revision, engines = serving.status["currentRevision"], {one["metadata"]["uid"] for one in serving.engines()}
    assert len(engines) == 2
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0]["autoscaling"].update(max=5))
    serving.rest()
    assert serving.status["currentRevision"] == revision
    assert len(serving.engines()) == 3
    assert engines < {one["metadata"]["uid"] for one in serving.engines()}
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].pop("autoscaling"))
    serving.rest()
    assert (len(serving.engines()), serving.cluster.objects[POOL]["spec"].get("bounds")) == (1, None)
    assert serving.condition("AutoscalingLimited") == "absent"


STUCK = "EngineStalled: no progress for 12 s"


def test_an_engine_that_makes_no_progress_says_why_the_deployment_is_not_ready_until_it_is_replaced() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    stuck = serving.engines()[0]
    stuck["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    serving.cluster.report(stuck, {"phase": "Serving", "message": STUCK})
    for _ in range(2):
        serving.cluster.settle_once()
    assert serving.pool_status["message"] == f"1 of 2 replicas are ready: {STUCK}"
    assert (serving.status["ready"], serving.status["message"]) == ("1/2", serving.pool_status["message"])
    assert (serving.condition("Ready"), serving.condition("Reconciling")) == ("False", "True")
    assert stuck["metadata"]["uid"] not in {backend["pod_uid"] for backend in serving.snapshot()["backends"]}

    serving.cluster.kill(stuck)  # as the kubelet does after the liveness probe has failed
    for _ in range(2):
        serving.cluster.settle_once()
    assert (
        f"RankKilled: the pod ended without a termination message; last reported: {STUCK}" in serving.status["message"]
    )
    serving.rest()
    assert (serving.status["phase"], serving.status["ready"], serving.pool_status["failures"]) == ("Serving", "2/2", 0)
    assert STUCK in serving.pool_status["lastFailure"]


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


def test_routers_of_locality_get_the_places_of_engines_and_their_own() -> None:
    serving = Serving(router={"policy": "locality"})
    serving.checkpoint(10)
    serving.rest()
    (engine,) = serving.engines()
    engine["spec"]["nodeName"] = "n1"
    engine["metadata"]["labels"]["topology.kubernetes.io/zone"] = "z1"
    serving.cluster._touch(engine)
    serving.rest()
    (entry,) = serving.snapshot()["backends"]
    assert (entry["host"], entry["zone"]) == ("n1", "z1")
    (router,) = serving.cluster.pods("router")
    env = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in router["spec"]["containers"][0]["env"]}
    assert env["STOKER_NODE_NAME"] == "spec.nodeName"
    assert env["STOKER_ZONE"] == "metadata.labels['topology.kubernetes.io/zone']"


def test_other_routers_get_no_places() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    assert "host" not in serving.snapshot()["backends"][0]
    assert "STOKER_ZONE" not in str(serving.cluster.pods("router"))
