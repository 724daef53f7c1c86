"""Failed attempts of a TrainingJob: the cause, the budget, the resume."""

from __future__ import annotations

import pytest

from stoker.pod.causes import Cause
from testing.operator.training_world import JOB, SAVE_METRICS, Run


def test_a_failed_attempt_resumes_from_the_newest_verified_checkpoint() -> None:
    run = Run()
    run.start()
    run.train(25, (run.save(10), run.save(20)))
    run.cluster.end(run.gang[1], Cause.RANK_FAILED, step=26, rank=1, detail="ValueError: boom")
    run.cluster.end(run.gang[0], Cause.PEER_LOST, step=25, saves=(run.word(10), run.word(20)))
    run.next_attempt()
    assert run.attempt == 1
    assert run.status["attempt"]["resumedFrom"]["step"] == 20
    assert (run.status["lastFailure"]["cause"], run.status["lastFailure"]["rank"]) == ("RankFailed", 1)
    assert run.status["lastFailure"]["pod"].endswith("-a0-1")
    assert run.status["lostSteps"] == 6
    assert run.status["failuresWithoutProgress"] == 1


def test_a_killed_attempt_has_done_at_least_what_a_task_finds_of_it() -> None:
    run = Run()
    run.start()
    run.train(15)
    for pod in run.gang:
        run.cluster.kill(pod)
    run.cluster.settle()
    run.cluster.collect()
    run.cluster.settle()
    run.answer_tasks("list", saves=[{"folder": run.folder(20), "step": 20, "digest": "digest20"}])
    run.answer_tasks("verify", step=20, digest="digest20")
    run.next_attempt()
    assert (run.status["attempt"]["resumedFrom"]["step"], run.status["attempts"][0]["lastStep"]) == (20, 20)
    assert run.status["lostSteps"] == 0


def test_a_corrupt_resume_falls_back_to_the_checkpoint_before_it_and_marks_it() -> None:
    run = Run()
    run.start()
    run.train(25, (run.save(10), run.save(20)))
    corrupt = run.folder(20)
    run.cluster.end(run.gang[0], Cause.RANK_KILLED, saves=(run.word(10), run.word(20)))
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["folder"] == corrupt
    run.cluster.end(run.gang[0], Cause.CHECKPOINT_CORRUPT, detail="piece 3 of model.embed")
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["step"] == 10
    assert run.checkpoint(20)["status"]["phase"] == "Corrupt"


def test_a_save_in_a_last_word_that_was_not_read_back_is_verified_by_a_task_before_the_resume() -> None:
    run = Run()
    run.start()
    run.train(25, (run.save(10),))
    run.cluster.end(run.gang[0], Cause.INTERRUPTED, saves=(run.word(10), run.word(24, False)))
    run.cluster.settle()
    run.cluster.collect()
    run.cluster.settle()
    assert "step 24 is being verified" in run.status["message"]
    run.answer_tasks("verify", step=24, bytes=10)
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["step"] == 24
    assert run.status["failuresWithoutProgress"] == 0


def test_a_pod_lost_without_a_word_has_its_folder_listed() -> None:
    run = Run()
    run.start()
    run.train(25, (run.save(10),))
    found = run.save(20, None)
    for pod in run.gang:
        run.cluster.vanish(pod)
    run.cluster.settle()
    run.answer_tasks("list", saves=[{"folder": found["folder"], "step": 20, "digest": found["digest"]}])
    run.answer_tasks("verify", **{name: value for name, value in found.items() if name != "verified"})
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["step"] == 20
    assert run.checkpoint(20)["spec"]["source"]["save"]["reason"] == "found"
    assert run.checkpoint(20)["status"].items() >= SAVE_METRICS.items()


def test_saves_are_looked_for_again_while_the_storage_is_away_for_a_moment() -> None:
    run = Run()
    run.start()
    found = run.save(20, None)
    for pod in run.gang:
        run.cluster.vanish(pod)
    run.cluster.settle()
    for _ in range(2):
        (pod,) = [p for p in run.cluster.pods("task") if p["status"]["phase"] == "Pending"]
        run.cluster.end(pod, Cause.STORAGE_ERROR, detail="stale file handle")
        run.cluster.settle()
        assert not [p for p in run.cluster.pods("task") if p["status"]["phase"] == "Pending"]
        run.cluster.advance(60)
        run.cluster.settle()
    run.answer_tasks("list", saves=[{"folder": found["folder"], "step": 20, "digest": found["digest"]}])
    run.answer_tasks("verify", step=20)
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["step"] == 20


def test_a_storage_that_stays_away_is_told_and_holds_the_next_attempt_no_longer() -> None:
    run = Run()
    run.start()
    for pod in run.gang:
        run.cluster.kill(pod)
    for _ in range(6):
        run.cluster.settle()
        for pod in run.cluster.pods("task"):
            if pod["status"]["phase"] == "Pending":
                run.cluster.end(pod, Cause.STORAGE_ERROR, detail="stale file handle")
        run.cluster.advance(600)
    assert run.cluster.events.count("SavesNotListed") == 1
    run.next_attempt()
    assert run.attempt == 1


@pytest.mark.parametrize("cause", [Cause.CONFIG_INVALID, Cause.DATA_ERROR, Cause.MODEL_ERROR])
def test_what_a_retry_cannot_help_fails_at_once(cause: Cause) -> None:
    run = Run()
    run.start()
    run.cluster.end(run.gang[0], cause, detail="no such file")
    run.cluster.settle()
    assert run.status["phase"] == "Failed"
    assert run.condition(run.job, "Stalled") == "True"
    assert cause.value in run.status["message"]


def test_the_budget_ends_in_failure_and_progress_refills_it() -> None:
    run = Run(run={"backoffLimit": 1})
    run.start()
    run.cluster.kill(run.gang[0])
    run.next_attempt()
    run.train(10, (run.save(10),))
    assert run.status["failuresWithoutProgress"] == 0
    for _ in range(2):
        run.cluster.end(run.gang[0], Cause.HANG)
        run.next_attempt()
    assert run.status["phase"] == "Failed"
    assert run.status["lastFailure"]["action"] == "Fail"


def test_an_evicted_pod_does_not_count() -> None:
    run = Run(run={"backoffLimit": 0})
    run.start()
    pod = run.gang[0]
    run.cluster.kill(pod)
    pod["status"]["reason"] = "Evicted"
    run.next_attempt()
    assert (run.attempt, run.status["failuresWithoutProgress"]) == (1, 0)


def test_a_pod_that_a_full_node_refused_does_not_count_and_blames_no_node() -> None:
    run = Run(run={"backoffLimit": 0})
    run.start()
    pod = run.gang[0]
    pod["spec"]["nodeName"] = "node-1"
    refusal = "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, requested: 2, used: 4, capacity: 4"
    pod["status"] = {"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": refusal}
    run.next_attempt()
    assert (run.attempt, run.status["failuresWithoutProgress"]) == (1, 0)
    failure = run.status["attempts"][0]["failure"]
    assert (failure["action"], failure["detail"]) == ("RetryFree", f"OutOfnvidia.com/gpu: {refusal}")


def test_a_node_that_falls_silent_after_its_peers_have_failed_of_it_is_blamed_all_the_same() -> None:
    run = Run(workers={"replicas": 2}, run={"backoffLimit": 1})
    run.start()
    survivor, lost = run.gang
    run.cluster.end(survivor, Cause.PEER_LOST, detail="connection reset by peer")
    run.cluster.reconcile(JOB)
    assert run.status["lastFailure"]["cause"] == "PeerLost"
    assert (run.status["lastFailure"]["action"], run.status["failuresWithoutProgress"]) == ("Retry", 1)

    lost["spec"]["nodeName"] = "node-2"
    lost["status"] = {"phase": "Failed", "reason": "NodeLost", "message": "node node-2 sends no heartbeats any more"}
    run.cluster.reconcile(JOB)

    failure = run.status["lastFailure"]
    assert (failure["cause"], failure["action"], failure["node"]) == ("RankKilled", "RetryFree", "node-2")
    assert "NodeLost" in failure["detail"]
    assert run.status["attempt"]["failure"] == failure
    assert (run.attempt, run.status["failuresWithoutProgress"]) == (0, 0)
    run.next_attempt()
    assert (run.attempt, run.status["attempts"][0]["failure"]["node"]) == (1, "node-2")


def test_a_lost_node_costs_nothing_even_where_nothing_is_left_of_the_budget() -> None:
    run = Run(workers={"replicas": 2}, run={"backoffLimit": 0})
    run.start()
    survivor, lost = run.gang
    run.cluster.end(survivor, Cause.PEER_LOST, detail="connection reset by peer")
    run.cluster.settle()
    assert run.status["phase"] == "Restarting"
    lost["status"] = {"phase": "Failed", "reason": "NodeLost", "message": "node node-2 sends no heartbeats any more"}
    run.cluster.settle()
    run.next_attempt()
    assert (run.attempt, run.status["failuresWithoutProgress"]) == (1, 0)


def test_a_lost_peer_without_a_lost_node_ends_a_job_that_has_no_budget_left() -> None:
    run = Run(workers={"replicas": 2}, run={"backoffLimit": 0})
    run.start()
    run.cluster.end(run.gang[0], Cause.PEER_LOST, detail="connection reset by peer")
    run.cluster.settle()
    run.next_attempt()
    assert (run.status["phase"], run.attempt) == ("Failed", 0)
    assert run.status["lastFailure"]["action"] == run.status["attempt"]["failure"]["action"] == "Fail"
    assert run.status["message"] == "PeerLost: connection reset by peer"


@pytest.mark.parametrize(
    ("finished_at", "cause"), [("2026-01-01T00:00:00Z", "RankKilled"), ("2026-01-01T00:01:00Z", "PeerLost")]
)
def test_a_killed_rank_is_named_also_where_its_peer_was_heard_of_first_unless_it_was_killed_for_not_going(
    finished_at: str, cause: str
) -> None:
    run = Run(workers={"replicas": 2}, run={"backoffLimit": 2})
    run.start()
    survivor, killed = run.gang
    run.cluster.end(survivor, Cause.PEER_LOST, detail="connection reset by peer")
    run.cluster.reconcile(JOB)
    assert run.status["attempt"]["endedAt"] == "2026-01-01T00:00:00Z"

    terminated = {"exitCode": 137, "finishedAt": finished_at}
    main = {"name": "main", "state": {"terminated": terminated}}
    killed["status"] = {"phase": "Failed", "containerStatuses": [main]}
    run.cluster.reconcile(JOB)

    failure = run.status["lastFailure"]
    assert (failure["cause"], failure["action"], run.status["failuresWithoutProgress"]) == (cause, "Retry", 1)
    assert run.status["attempt"]["failure"] == failure
    assert not run.cluster.plan(JOB).events, "said once"


def test_a_pod_that_was_only_told_to_go_is_not_blamed_for_what_its_peer_did() -> None:
    run = Run(workers={"replicas": 2}, run={"backoffLimit": 2})
    run.start()
    failed, other = run.gang
    run.cluster.end(failed, Cause.RANK_FAILED, detail="KeyError")
    run.cluster.reconcile(JOB)
    run.cluster.kill(other)
    run.cluster.reconcile(JOB)
    assert (run.status["lastFailure"]["cause"], run.status["failuresWithoutProgress"]) == ("RankFailed", 1)


def test_an_evicted_pod_that_is_gone_already_is_judged_by_its_last_word() -> None:
    run = Run()
    run.start()
    run.train(10, (run.save(10),))
    leader, second = run.gang
    for pod in (leader, second):
        run.cluster.end(pod, Cause.INTERRUPTED, saves=(run.word(10),))
        run.cluster.evict(pod)
    run.cluster.settle()
    ended = run.status["attempts"][0]
    assert (ended["failure"]["cause"], ended["failure"]["action"]) == ("Interrupted", "RetryFree")
    assert run.cluster.pods("task") == [], "the last word says what was saved"
    assert run.attempt == 1
    assert run.status["attempt"]["resumedFrom"]["step"] == 10
    assert run.status["failuresWithoutProgress"] == 0


def test_a_start_that_is_corrupt_and_has_nothing_older_fails_the_job_instead_of_beginning_it_again_for_ever() -> None:
    run = Run()
    run.start()
    run.cluster.end(run.gang[0], Cause.CHECKPOINT_CORRUPT, detail="model.safetensors: hash differs")
    run.next_attempt()
    assert (run.status["phase"], run.attempt) == ("Failed", 0)
    assert "model.safetensors: hash differs" in run.status["message"]


def test_an_attempt_that_is_taken_away_again_and_again_waits_longer_each_time() -> None:
    run = Run(run={"backoffLimit": 0})
    run.start()
    waits = []
    for _ in range(5):
        before = run.attempt
        evict(run)
        run.cluster.settle()
        run.cluster.collect()
        waits.append(next(s for s in range(60) if opened(run, before, 1 if s else 0)))
        for pod in run.gang:
            run.cluster.run(pod)
        run.cluster.settle()
    assert waits == [0, 1, 2, 4, 8]
    assert run.status["failuresWithoutProgress"] == 0


def test_an_attempt_that_got_on_before_it_was_taken_away_does_not_wait() -> None:
    run = Run()
    run.start()
    for step in (10, 20, 30):
        run.train(step, (run.save(step),))
        before = run.attempt
        evict(run)
        run.cluster.settle()
        run.cluster.collect()
        assert opened(run, before, 0)
        for pod in run.gang:
            run.cluster.run(pod)
        run.cluster.settle()


def evict(run: Run) -> None:
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, saves=())


def opened(run: Run, before: int, seconds: float) -> bool:
    """Return whether the next attempt is there after some more time."""
    run.cluster.advance(seconds)
    run.cluster.settle()
    return run.attempt > before


def test_steps_that_an_earlier_attempt_lost_are_not_lost_again() -> None:
    run = Run()
    run.start()
    run.train(25, (run.save(20),))
    run.cluster.end(run.gang[0], Cause.RANK_FAILED, saves=(run.word(20),))
    run.next_attempt()
    assert (run.status["lostSteps"], run.status["progress"]["step"]) == (5, 20)
    run.cluster.end(run.gang[0], Cause.RANK_FAILED)
    run.next_attempt()
    assert (run.attempt, run.status["lostSteps"]) == (2, 5)
