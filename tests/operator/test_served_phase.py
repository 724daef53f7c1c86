"""A deployment that has moved to its revision: what it lacks later is no rollout, and it answers meanwhile."""

from __future__ import annotations

from stoker.operator.reconcile.enginepool.view import FAILURES_TO_STALL
from stoker.pod.causes import Cause
from testing.operator.serving_world import CHAT, Serving, running_engines


def served(replicas: int) -> Serving:
    """A served model, whose rollouts have a minute."""
    serving = Serving(replicas=replicas, rollout={"progressDeadlineSeconds": 60})
    serving.checkpoint(10)
    serving.rest()
    assert (serving.status["phase"], serving.status["rollout"]["phase"]) == ("Serving", "Completed")
    return serving


def settle(serving: Serving, seconds: float = 0) -> None:
    """Two passes without a new engine getting ready."""
    for _ in range(2):
        serving.cluster.advance(seconds)
        serving.cluster.settle_once()


def test_more_replicas_are_no_rollout_and_have_no_deadline() -> None:
    serving = served(1)
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=3))
    settle(serving)
    settle(serving, seconds=600)
    assert (serving.status["phase"], serving.status["ready"]) == ("Scaling", "1/3")
    assert serving.status["message"].startswith("1 of 3 replicas are ready")
    assert (serving.condition("Ready"), serving.condition("Stalled")) == ("False", "absent")
    assert serving.status["rollout"]["phase"] == "Completed"
    serving.rest()
    assert (serving.status["phase"], serving.status["ready"]) == ("Serving", "3/3")
    assert serving.cluster.plan(CHAT).empty


def test_a_lost_replica_is_no_rollout() -> None:
    serving = served(2)
    serving.cluster.vanish(running_engines(serving)[-1])
    settle(serving, seconds=600)
    assert (serving.status["phase"], serving.status["ready"]) == ("Scaling", "1/2")
    assert serving.condition("Stalled") == "absent"
    serving.rest()
    assert serving.status["phase"] == "Serving"


def test_without_a_ready_engine_it_starts_again() -> None:
    serving = served(1)
    serving.cluster.vanish(running_engines(serving)[-1])
    settle(serving)
    assert (serving.status["phase"], serving.status["ready"]) == ("Starting", "0/1")


def test_an_engine_that_fails_beside_one_that_serves_degrades_it() -> None:
    serving = served(2)
    serving.cluster.end(running_engines(serving)[-1], Cause.RANK_FAILED, detail="no device")
    settle(serving)
    assert (serving.status["phase"], serving.status["ready"]) == ("Degraded", "1/2")
    assert "RankFailed: no device" in serving.status["message"]


def test_engines_that_fail_again_and_again_stall_it_when_none_serves() -> None:
    serving = served(1)
    for number in range(FAILURES_TO_STALL):
        assert (serving.condition("Stalled") == "True") == (number >= FAILURES_TO_STALL)
        serving.cluster.end(serving.engines()[0], Cause.RANK_FAILED, detail="no device")
        settle(serving, seconds=600)
        settle(serving)
        assert serving.status["phase"] == "Failed"
    assert serving.condition("Stalled") == "True"
    assert "RankFailed: no device" in serving.status["message"]


def test_a_new_revision_is_a_rollout_again() -> None:
    serving = served(2)
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(env=[{"name": "MORE", "value": "1"}]))
    settle(serving)
    assert (serving.status["phase"], serving.status["rollout"]["phase"]) == ("Updating", "Progressing")
    settle(serving, seconds=61)
    assert serving.condition("Stalled") == "True"
    assert serving.status["message"].startswith("the rollout has made no progress for 60 s")


def test_a_return_to_the_revision_that_serves_is_an_update_away_from_the_other() -> None:
    serving = served(2)
    serving.cluster.vanish(running_engines(serving)[-1])
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(env=[{"name": "MORE", "value": "1"}]))
    settle(serving)
    other = serving.status["rollout"]["toRevision"]
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].pop("env"))
    settle(serving)
    assert (serving.status["phase"], serving.status["ready"]) == ("Updating", "1/2")
    assert serving.status["rollout"]["fromRevision"] == other
    serving.rest()
    assert (serving.status["phase"], serving.status["rollout"]["phase"]) == ("Serving", "Completed")
    assert "fromRevision" not in serving.status["rollout"]
