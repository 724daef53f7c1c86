"""Edits of a deployment or pool that this version cannot apply: maintenance goes on from the last accepted spec."""

from __future__ import annotations

import copy
import json
from typing import Any

from stoker.operator.reconcile.enginepool.reconcile import reconcile_enginepool
from stoker.operator.reconcile.inferencedeployment.reconcile import reconcile_inferencedeployment
from stoker.pod.causes import Cause
from testing.operator.serving_world import CHAT, POOL, Serving, condition_of, running_engines, running_routers

REFUSED = "spec.engine.attention cudnn"


def refuse_edit(serving: Serving, **changes: Any) -> None:
    """Edit the deployment to an attention that engines do not have, together with `changes` of its first pool."""

    def edit(spec: dict[str, Any]) -> None:
        spec["engine"] = {**spec.get("engine", {}), "attention": "cudnn"}
        spec["pools"][0].update(changes)

    serving.cluster.change_spec(CHAT, edit)


def test_what_is_not_built_yet_is_refused_by_name_and_leaves_what_serves() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    refuse_edit(serving, replicas=3)
    serving.rest()
    assert REFUSED in condition_of(serving.status, "EditRefused")["message"]
    assert (serving.status["phase"], serving.status["ready"], len(serving.engines())) == ("Serving", "1/1", 1)


def test_after_a_refused_edit_engines_and_routers_are_replaced_and_the_snapshot_follows() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    refuse_edit(serving)
    serving.cluster.settle_once()
    dead_engine, dead_router = serving.engines()[0], serving.cluster.pods("router")[0]
    serving.cluster.kill(dead_engine)
    serving.cluster.kill(dead_router)
    for _ in range(2):
        serving.cluster.settle_once()
    assert serving.status["phase"] != "Serving"
    assert serving.status["ready"] == "1/2"
    serving.rest()
    known = {backend["pod_uid"] for backend in serving.snapshot()["backends"]}
    assert known == {pod["metadata"]["uid"] for pod in running_engines(serving)}
    assert dead_engine["metadata"]["uid"] not in known
    assert len(known) == 2
    assert [pod["metadata"]["uid"] != dead_router["metadata"]["uid"] for pod in running_routers(serving)] == [True]
    assert (serving.status["phase"], serving.status["ready"]) == ("Serving", "2/2")
    assert (serving.condition("Ready"), serving.condition("EditRefused")) == ("True", "True")


def test_after_a_refused_edit_a_drain_ends() -> None:
    serving = Serving(replicas=2)
    serving.begin_drain()
    refuse_edit(serving)
    serving.rest()
    assert (serving.status["phase"], serving.status["ready"], len(serving.engines())) == ("Serving", "1/1", 1)
    assert len(serving.snapshot()["backends"]) == 1


def test_after_a_refused_edit_rollouts_go_on_and_new_checkpoints_are_followed() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    serving.checkpoint(20)
    for _ in range(3):
        serving.cluster.settle_once()
        serving.live()
    assert serving.status["rollout"]["phase"] == "Progressing"
    refuse_edit(serving, image="elsewhere:2")
    serving.rest()
    assert (serving.status["currentCheckpoint"]["step"], serving.status["rollout"]["phase"]) == (20, "Completed")
    serving.checkpoint(30)
    serving.rest()
    assert (serving.status["currentCheckpoint"]["step"], serving.status["rollout"]["phase"]) == (30, "Completed")
    assert all("elsewhere" not in json.dumps(pod["spec"]) for pod in serving.engines())


def test_an_edit_that_takes_the_refused_value_back_takes_effect_and_clears_the_condition() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    refuse_edit(serving, replicas=3)
    serving.rest()
    serving.cluster.change_spec(CHAT, lambda spec: spec["engine"].update(attention="auto"))
    serving.rest()
    assert (serving.condition("EditRefused"), serving.status["ready"]) == ("absent", "3/3")


def test_a_deployment_that_was_never_accepted_is_stalled_and_makes_nothing() -> None:
    serving = Serving(engine={"attention": "cudnn"})
    serving.checkpoint(10)
    serving.rest(5)
    assert REFUSED in serving.status["message"]
    assert (serving.condition("Stalled"), serving.condition("Ready")) == ("True", "False")
    assert serving.cluster.of_kind("Pod") == []
    serving.cluster.change_spec(CHAT, lambda spec: spec["engine"].update(attention="auto"))
    serving.rest()
    assert (serving.status["phase"], serving.condition("Stalled")) == ("Serving", "absent")


def test_after_a_refused_edit_a_pool_replaces_its_engines_scales_and_keeps_its_failures() -> None:
    serving = Serving()
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.reconcilers = {"EnginePool": reconcile_enginepool}  # the other would take the edit back at once
    serving.cluster.end(serving.engines()[0], Cause.CHECKPOINT_CORRUPT, detail="piece 7")
    serving.cluster.reconcile(POOL)
    refused = {"podsPerReplica": 2, "config": {"parallelism": {"data": 3}}}
    serving.cluster.change_spec(POOL, lambda spec: spec["revisions"][0]["template"].update(refused))
    serving.cluster.reconcile(POOL)
    message = condition_of(serving.pool_status, "EditRefused")["message"]
    assert "spec.revisions" in message
    assert "template.config.parallelism.data 3 is not supported yet with podsPerReplica 2" in message
    assert (serving.pool_status["failures"], serving.engines()) == (1, []), "the delay goes on"
    serving.rest()
    assert (serving.pool_status["phase"], serving.pool_status["failures"]) == ("Serving", 0)
    serving.cluster.change_spec(POOL, lambda spec: spec.update(replicas=2))
    serving.rest()
    assert (serving.pool_status["phase"], len(running_engines(serving))) == ("Serving", 2)


def test_the_deployment_takes_an_edit_of_its_pools_shares_back() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.reconcilers = {"EnginePool": reconcile_enginepool}

    def split(spec: dict[str, Any]) -> None:
        (old,) = spec["revisions"]
        spec["revisions"] = [{**old, "share": 70}, {**copy.deepcopy(old), "name": "r2", "share": 30}]

    serving.cluster.change_spec(POOL, split)
    serving.rest()
    assert [found["desired"] for found in serving.pool_status["revisions"]] == [1, 1]

    serving.cluster.reconcilers = {"InferenceDeployment": reconcile_inferencedeployment}
    plan = serving.cluster.plan(CHAT)
    assert "EnginePool" in [body["kind"] for body in plan.apply], "the deployment takes the edit back"


def test_a_pool_whose_parts_are_less_than_a_replica_rolls_one_by_one() -> None:
    serving = Serving(pools=[{"name": "main", "replicas": 2, "maxSurge": 0, "maxUnavailable": "25%"}])
    serving.checkpoint(10)
    serving.rest()
    old = {pod["metadata"]["uid"] for pod in serving.engines()}
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"threads": 1}))
    least = 2
    for _ in range(12):
        serving.cluster.settle_once()
        least = min(least, len([one for one in serving.snapshot()["backends"] if not one["draining"]]))
        serving.live()
        serving.cluster.advance(2)
    assert least == 1
    assert (serving.status["rollout"]["phase"], serving.status["ready"]) == ("Completed", "2/2")
    assert not old & {pod["metadata"]["uid"] for pod in serving.engines()}


def test_a_router_that_the_operator_does_not_reach_is_named_where_it_holds_an_update() -> None:
    serving = Serving(replicas=2, router={"replicas": 2})
    serving.checkpoint(10)
    serving.rest()
    silent = serving.cluster.pods("router")[1]["metadata"]
    last = serving.cluster.reports[silent["uid"]]
    take_snapshots = serving.take_snapshots

    def take_but_one() -> None:
        take_snapshots()
        serving.cluster.reports[silent["uid"]] = last

    serving.take_snapshots = take_but_one  # type: ignore[method-assign,assignment]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"scheduler": {"maxRequests": 7}}))
    serving.rest()
    text = f"1 of 2 replicas are updated: router {silent['name']} has not reported to reach replica chat-main-"
    assert serving.status["message"].startswith(text)


def test_an_update_that_a_pause_holds_is_told_until_it_goes_on() -> None:
    serving = Serving(replicas=2)
    serving.checkpoint(10)
    serving.rest()
    old = serving.status["currentRevision"]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout={"paused": True}))
    serving.rest(5)
    assert "message" not in serving.status, "the pause holds nothing yet"
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"threads": 3}))
    serving.rest(5)
    edited = next(found["name"] for found in serving.status["revisions"] if found["name"] != old)
    text = f"spec.rollout.paused holds the update to revision {edited} of Checkpoint run-10 (step 10)"
    assert (serving.status["phase"], serving.status["message"]) == ("Serving", text)
    assert condition_of(serving.status, "Ready")["message"] == text
    assert serving.cluster.plan(CHAT).empty
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout={"paused": False}))
    serving.rest()
    assert (serving.status["currentRevision"], serving.status.get("message")) == (edited, None)
