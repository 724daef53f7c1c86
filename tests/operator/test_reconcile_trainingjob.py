"""The reconciles of TrainingJob and Checkpoint, in a simulated cluster: single stories, then any order and any crash point."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.operator.domain.plan import Key, Object
from stoker.operator.reconcile.checkpoint.reconcile import reconcile_checkpoint
from stoker.operator.reconcile.trainingjob.reconcile import reconcile_trainingjob
from stoker.operator.render.names import writer_of
from stoker.pod.exit_code import Cause
from tests.operator.simulated_cluster import Crash, SimulatedCluster

JOB = Key("TrainingJob", "default", "run")


FIGURE_NAMES = ("tokens", "loss", "learning_rate", "elapsed_s", "bytes", "files", "pieces")


class Run:
    """A cluster with one job of two pods, and an environment that behaves."""

    def __init__(self, **spec: Any) -> None:
        self.cluster = SimulatedCluster({"TrainingJob": reconcile_trainingjob, "Checkpoint": reconcile_checkpoint})
        self.cluster.add(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "claim"}, "spec": {}}
        )
        body = {
            "model": {
                "architecture": "llama",
                "hiddenSize": 64,
                "intermediateSize": 128,
                "numLayers": 2,
                "numHeads": 4,
                "vocabSize": 512,
            },
            "workers": {"replicas": 2},
            "training": {"totalSteps": 100},
            "data": {"sources": [{"name": "text", "path": "/data/text.txt"}]},
            "checkpoint": {"storage": {"claimName": "claim"}},
            **spec,
        }
        self.cluster.add(
            {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "run"}, "spec": body}
        )

    @property
    def job(self) -> Object:
        return self.cluster.objects[JOB]

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.job.get("status", {}))

    @property
    def attempt(self) -> int:
        return int(self.status["attempt"]["number"])

    @property
    def gang(self) -> list[Object]:
        number = str(self.attempt) if "attempt" in self.status else ""
        return [p for p in self.cluster.pods("trainer") if p["metadata"]["labels"]["stoker.dev/attempt"] == number]

    def start(self) -> None:
        self.cluster.settle()
        for pod in self.gang:
            self.cluster.run(pod)
        self.train(0)

    def folder(self, step: int) -> str:
        return f"step-{step:08d}.{writer_of(self.job['metadata']['uid'], self.attempt)}"

    def train(self, step: int, saves: tuple[dict[str, Any], ...] = ()) -> None:
        """Pod 0's agent reports."""
        body = {
            "attempt": self.attempt,
            "phase": "Training",
            "step": step,
            "total_steps": 100,
            "loss": 2.5,
            "saves": list(saves),
        }
        leader = next(p for p in self.gang if p["metadata"]["labels"]["stoker.dev/node-rank"] == "0")
        self.cluster.report(leader, body)
        self.cluster.settle()

    def save(self, step: int, verified: bool | None = True, id_: str = "") -> dict[str, Any]:
        folder = self.folder(step)
        return {
            "id": id_ or folder,
            "folder": folder,
            "step": step,
            "digest": f"digest{step}",
            "verified": verified,
            "state": "Committed",
            "tokens": 640,
            "loss": 2.0,
            "learning_rate": 3e-4,
            "elapsed_s": 61.7,
            "bytes": 10,
            "files": 4,
            "pieces": 9,
        }

    def word(self, step: int, verified: bool | None = True) -> dict[str, Any]:
        known = self.save(step, verified)
        names = ("id", "folder", "step", "digest", "verified")
        return {name: known[name] for name in names} | {"metrics": {name: known[name] for name in FIGURE_NAMES}}

    def next_attempt(self) -> None:
        """Old pods end, the delay passes, a new gang runs."""
        for _ in range(6):
            self.cluster.settle()
            self.cluster.collect()
            self.cluster.advance(400)
            self.cluster.settle()
            self.answer_tasks("list", saves=[])
        for pod in self.gang:
            self.cluster.run(pod)
        self.cluster.settle()

    def answer_tasks(self, verb: str, *, ok: bool = True, **result: Any) -> None:
        for pod in self.cluster.pods("task"):
            if pod["metadata"]["labels"]["stoker.dev/task"] == verb and pod["status"]["phase"] == "Pending":
                self.cluster.run(pod)
                answer = {"task": verb, "ok": ok, **result}
                self.cluster.end(pod, Cause.COMPLETED if ok else Cause.TASK_FAILED, result=answer)
        self.cluster.settle()

    def checkpoint(self, step: int) -> Object:
        return next(
            c for c in self.cluster.of_kind("Checkpoint") if c["spec"]["source"].get("save", {}).get("step") == step
        )

    def condition(self, found: Object, name: str) -> str:
        return next((c["status"] for c in found["status"].get("conditions", ()) if c["type"] == name), "absent")


def test_a_new_job_gets_service_configuration_and_one_pod_per_node() -> None:
    run = Run()
    run.cluster.settle()
    assert [pod["metadata"]["name"].rpartition("-a")[2] for pod in run.gang] == ["0-0", "0-1"]
    assert len(run.cluster.of_kind("Service")) == 1
    assert run.status["phase"] == "Pending"
    assert run.status["message"].startswith("2 of 2 pods wait")


def test_a_job_waits_for_what_its_volumes_are_made_of_and_names_it() -> None:
    volumes = [
        {"name": "a", "configMap": {"name": "maybe", "optional": True}},
        {"name": "b", "configMap": {"name": "data"}},
    ]
    run = Run(workers={"replicas": 2, "volumes": volumes})
    run.cluster.settle()
    assert (run.status["phase"], run.gang) == ("Pending", [])
    assert run.status["message"] == "ConfigMap data does not exist (spec.workers.volumes[1])"
    run.cluster.add({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "data"}})
    run.cluster.settle()
    assert len(run.gang) == 2


def test_a_running_job_reports_progress_and_a_second_pass_is_empty() -> None:
    run = Run()
    run.start()
    run.train(7)
    assert run.status["phase"] == "Running"
    assert run.status["progress"]["step"] == 7
    assert run.cluster.plan(JOB).empty


def test_each_committed_save_becomes_a_checkpoint_and_is_verified_by_the_agent() -> None:
    run = Run()
    run.start()
    run.train(10, (run.save(10, None),))
    found = run.checkpoint(10)
    assert (found["status"]["phase"], run.condition(found, "Verified")) == ("Complete", "absent")
    run.train(11, (run.save(10, True),))
    assert run.condition(run.checkpoint(10), "Verified") == "True"
    assert run.status["newestVerifiedCheckpoint"]["step"] == 10
    assert not run.cluster.pods("task")


FIGURES = {
    "tokens": 640,
    "loss": "2",
    "learningRate": "0.0003",
    "elapsedSeconds": 61,
    "bytes": 10,
    "files": 4,
    "pieces": 9,
}


@pytest.mark.parametrize("word_says", [{}, {"metrics": {}}], ids=["told in the last word", "told before"])
def test_a_checkpoint_shows_the_figures_of_its_save_whoever_tells_them(word_says: dict[str, Any]) -> None:
    run = Run()
    run.start()
    if word_says:
        run.train(10, (run.save(10, None),))
        assert run.checkpoint(10)["status"].items() >= FIGURES.items()
    run.cluster.end(run.gang[0], Cause.INTERRUPTED, saves=(run.word(10) | word_says,))
    run.cluster.settle()
    assert run.condition(run.checkpoint(10), "Verified") == "True"
    assert run.checkpoint(10)["status"].items() >= FIGURES.items()


def test_saves_of_another_writer_change_nothing() -> None:
    run = Run()
    run.start()
    stale = {**run.save(10), "folder": "step-00000010.ffffffff"}
    run.train(10, (stale,))
    assert run.cluster.of_kind("Checkpoint") == []


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


def test_the_configuration_of_a_new_attempt_names_what_to_resume() -> None:
    run = Run()
    run.start()
    run.train(25, (run.save(20),))
    run.cluster.end(run.gang[0], Cause.RANK_FAILED, saves=(run.word(20),))
    run.next_attempt()
    config = next(c for c in run.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith("-a1"))
    assert '"digest": "digest20"' in config["data"]["config.json"]
    assert "/var/stoker/checkpoints/run/step-00000020." in config["data"]["config.json"]


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
    assert run.checkpoint(20)["status"].items() >= FIGURES.items()


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


def test_a_node_that_falls_silent_after_its_peers_have_failed_of_it_is_blamed_all_the_same() -> None:
    run = Run(workers={"replicas": 2}, run={"backoffLimit": 1})
    run.start()
    survivor, lost = run.gang
    run.cluster.end(survivor, Cause.PEER_LOST, detail="connection reset by peer")
    run.cluster.reconcile(JOB)
    assert run.status["lastFailure"]["cause"] == "PeerLost"
    assert (run.status["lastFailure"]["action"], run.status["failuresWithoutProgress"]) == ("Retry", 1)

    lost["spec"]["nodeName"] = "node-2"
    lost["status"] = {"phase": "Failed", "reason": "NodeLost", "message": "node node-2 is not heard of any more"}
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
    lost["status"] = {"phase": "Failed", "reason": "NodeLost", "message": "node node-2 is not heard of any more"}
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


def test_a_completed_job_is_final_and_makes_no_pod_again() -> None:
    run = Run()
    run.start()
    run.train(100, (run.save(100),))
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED, step=100, saves=(run.word(100),))
    run.cluster.settle()
    assert run.status["phase"] == "Completed"
    assert run.condition(run.job, "Ready") == "True"
    for pod in run.cluster.pods("trainer"):
        run.cluster.vanish(pod)
    run.cluster.settle()
    assert run.cluster.pods("trainer") == []
    assert run.cluster.plan(JOB).empty


def test_a_finished_job_is_deleted_after_its_time_and_its_checkpoints_stay() -> None:
    run = Run(run={"ttlSecondsAfterFinished": 60})
    run.start()
    run.train(100, (run.save(100),))
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED, saves=(run.word(100),))
    run.cluster.settle()
    run.cluster.advance(61)
    run.cluster.reconcile(JOB)
    run.cluster.settle()
    assert JOB not in run.cluster.objects
    assert len(run.cluster.of_kind("Checkpoint")) == 1


def test_suspend_drains_through_pod_0_and_resume_goes_on_from_the_last_save() -> None:
    run = Run()
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=True))
    run.cluster.reconcile(JOB)
    assert [(path, body["mode"]) for _, path, body in run.cluster.calls] == [("/drain", "suspend")]
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, step=30, saves=(run.word(30),))
    run.cluster.settle()
    assert run.status["phase"] == "Suspended"
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(suspend=False))
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["step"] == 30
    assert run.status["restarts"] == 0


def test_cancel_saves_and_is_final() -> None:
    run = Run()
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(cancel=True))
    run.cluster.reconcile(JOB)
    assert run.cluster.calls[-1][2]["mode"] == "cancel"
    for pod in run.gang:
        run.cluster.end(pod, Cause.CANCELLED, saves=(run.word(30),))
    run.cluster.settle()
    assert run.status["phase"] == "Cancelled"
    assert run.status["attempt"]["lastStep"] == 30
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(cancel=False))
    run.cluster.settle()
    assert run.status["phase"] == "Cancelled"


def test_pods_that_ignore_a_drain_are_deleted_after_the_grace_period() -> None:
    run = Run(workers={"replicas": 2, "gracePeriodSeconds": 20})
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=True))
    run.cluster.reconcile(JOB)
    run.cluster.advance(51)
    run.cluster.reconcile(JOB)
    assert all(pod["metadata"].get("deletionTimestamp") for pod in run.gang)


def test_a_deadline_ends_the_job() -> None:
    run = Run(run={"activeDeadlineSeconds": 100})
    run.start()
    run.cluster.advance(101)
    run.cluster.settle()
    assert run.status["phase"] == "Failed"
    assert "activeDeadlineSeconds 100" in run.status["message"]


def test_the_deadline_of_a_suspended_job_comes_in_time_too() -> None:
    run = Run(run={"activeDeadlineSeconds": 100})
    run.start()
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(suspend=True))
    run.cluster.advance(50)
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED)
    run.cluster.settle()
    run.cluster.collect()
    run.answer_tasks("list", saves=[])
    assert run.status["phase"] == "Suspended"
    assert run.cluster.plan(JOB).requeue_after_s == 50


def test_a_missing_claim_is_named_and_nothing_runs() -> None:
    run = Run(checkpoint={"storage": {"claimName": "elsewhere"}})
    run.cluster.settle()
    assert "PersistentVolumeClaim elsewhere does not exist" in run.status["message"]
    assert run.cluster.pods("trainer") == []


def test_what_is_not_built_yet_is_refused_by_name() -> None:
    run = Run(memory={"zeroStage": 3})
    run.cluster.settle()
    assert "not supported yet" in run.status["message"]
    assert "memory.zeroStage" in run.status["message"]
    assert run.cluster.pods("trainer") == []


def test_no_child_is_made_after_a_deletion_timestamp() -> None:
    run = Run()
    run.job["metadata"]["finalizers"] = ["foregroundDeletion"]
    run.cluster.delete(JOB)
    run.cluster.settle()
    assert run.cluster.of_kind("Pod") == []


def test_retention_keeps_the_newest_verified_and_spares_pinned_ones() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 2})
    run.start()
    run.train(20, (run.save(10), run.save(20)))
    pinned = run.checkpoint(10)
    pinned["spec"]["pinned"] = True
    run.train(50, (run.save(10), run.save(20), run.save(30), run.save(40)))
    run.answer_tasks("delete", deleted=["a"])
    run.cluster.settle()
    assert sorted(c["spec"]["source"]["save"]["step"] for c in run.cluster.of_kind("Checkpoint")) == [10, 30, 40]


def test_pinned_and_used_checkpoints_take_no_place_of_those_that_are_kept() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 1})
    run.start()
    for step in (10, 20, 30):
        run.train(step, (run.save(step, None),))
        run.checkpoint(step)["spec"]["pinned"] = step > 10
        run.train(step, (run.save(step),))
    run.cluster.settle()
    assert sorted(c["spec"]["source"]["save"]["step"] for c in run.cluster.of_kind("Checkpoint")) == [10, 20, 30]


def request(run: Run, name: str = "now") -> Key:
    run.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "Checkpoint",
            "metadata": {"name": name},
            "spec": {"source": {"jobRef": {"name": "run"}}},
        }
    )
    return Key("Checkpoint", "default", name)


def test_a_checkpoint_asks_its_running_job_to_save_now() -> None:
    run = Run()
    run.start()
    key = request(run)
    run.cluster.reconcile(key)
    uid = run.cluster.objects[key]["metadata"]["uid"]
    assert [(path, body["id"]) for _, path, body in run.cluster.calls] == [("/checkpoint", uid)]
    run.train(33, (run.save(33, True, uid),))
    found = run.cluster.objects[key]
    assert (found["status"]["step"], run.condition(found, "Ready")) == (33, "True")
    assert len(run.cluster.of_kind("Checkpoint")) == 1


def test_a_job_that_does_not_answer_yet_is_not_asked_to_save() -> None:
    run = Run()
    run.cluster.settle()
    for pod in run.gang:
        run.cluster.run(pod)
    key = request(run)
    run.cluster.settle()
    assert (run.cluster.calls, run.cluster.objects[key]["status"]["message"]) == ([], "TrainingJob run starts")


def test_one_save_answers_two_requests_and_its_data_goes_with_the_last_of_them() -> None:
    run = Run()
    run.start()
    keys = [request(run, name) for name in ("first", "second")]
    for key in keys:
        run.cluster.change_spec(key, lambda spec: spec.update(deletionPolicy="Delete"))
        run.cluster.reconcile(key)
    first, second = (run.cluster.objects[key]["metadata"]["uid"] for key in keys)
    save = run.save(33, True, first)
    answers = {uid: {"state": "Done", "folder": save["folder"], "detail": ""} for uid in (first, second)}
    run.cluster.report(
        run.gang[0], {"attempt": 0, "phase": "Training", "step": 33, "saves": [save], "requests": answers}
    )
    run.cluster.settle()
    assert [run.cluster.objects[key]["status"]["folder"] for key in keys] == [save["folder"]] * 2
    run.cluster.delete(keys[0])
    run.cluster.settle()
    assert (run.cluster.of_kind("Pod") == run.gang, keys[0] in run.cluster.objects) == (True, False)
    run.cluster.delete(keys[1])
    run.cluster.settle()
    assert [pod["metadata"]["labels"]["stoker.dev/task"] for pod in run.cluster.pods("task")] == ["delete"]


def test_a_request_to_a_finished_job_fails_and_says_so() -> None:
    run = Run()
    run.start()
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED)
    run.cluster.settle()
    key = request(run)
    run.cluster.settle()
    assert run.cluster.objects[key]["status"]["phase"] == "Failed"
    assert "is Completed" in run.cluster.objects[key]["status"]["message"]


def adopt(run: Run, **spec: Any) -> Key:
    run.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "Checkpoint",
            "metadata": {"name": "old"},
            "spec": {
                "source": {
                    "import": {"storage": {"claimName": "claim", "path": "old"}, "folder": "step-00000005.0badc0de"}
                },
                **spec,
            },
        }
    )
    return Key("Checkpoint", "default", "old")


def test_an_imported_folder_is_read_by_a_task_and_then_verified() -> None:
    run = Run()
    key = adopt(run)
    run.cluster.settle()
    run.answer_tasks("import", step=5, digest="d5", bytes=10, tokens=100)
    found = run.cluster.objects[key]
    assert (found["status"]["step"], found["status"]["tokens"], run.condition(found, "Verified")) == (5, 100, "True")


def test_figures_of_an_adopted_manifest_that_no_status_can_hold_are_left_out() -> None:
    run = Run()
    key = adopt(run)
    run.cluster.settle()
    layout = {"world_size": -1, "tensor": 2**40, "zero_stage": 2}
    run.answer_tasks("import", step=5, digest="d5", bytes=10, tokens=-1, elapsed_s=1e300, layout=layout)
    status = run.cluster.objects[key]["status"]
    assert (status["phase"], status["bytes"], status["layout"]) == ("Complete", 10, {"zeroStage": 2})
    assert not {"tokens", "elapsedSeconds"} & status.keys()


def test_a_broken_import_is_corrupt_and_names_the_problem() -> None:
    run = Run()
    key = adopt(run)
    run.cluster.settle()
    run.answer_tasks("import", ok=False, problems=["rank-0.bin: hash differs"])
    found = run.cluster.objects[key]
    assert (found["status"]["phase"], found["status"]["message"]) == ("Corrupt", "rank-0.bin: hash differs")


def test_a_task_that_could_not_read_the_disk_says_nothing_about_the_data_and_is_tried_again() -> None:
    run = Run()
    key = adopt(run)
    run.cluster.settle()
    for tries, delay_s in enumerate((0, 10, 60)):
        if delay_s:
            run.cluster.advance(delay_s - 1)
            run.cluster.settle()
            assert run.cluster.plan(key).requeue_after_s == 1
            assert not [p for p in run.cluster.pods("task") if p["status"]["phase"] == "Pending"]
            run.cluster.advance(1)
            run.cluster.settle()
        (pod,) = [p for p in run.cluster.pods("task") if p["status"]["phase"] == "Pending"]
        run.cluster.run(pod)
        run.cluster.end(pod, Cause.STORAGE_ERROR, detail="stale file handle", result={"task": "import", "folder": "x"})
        run.cluster.settle()
        assert run.cluster.objects[key]["status"]["phase"] == ("Pending" if tries < 2 else "Failed")
    assert "failed 3 times: stale file handle" in run.cluster.objects[key]["status"]["message"]


def test_a_task_that_is_evicted_is_tried_again_as_often_as_it_takes() -> None:
    run = Run()
    key = adopt(run)
    run.cluster.settle()
    for _ in range(5):
        (pod,) = [p for p in run.cluster.pods("task") if p["status"]["phase"] == "Pending"]
        run.cluster.kill(pod)
        pod["status"]["reason"] = "Evicted"
        run.cluster.advance(60)
        run.cluster.settle()
    run.answer_tasks("import", step=5, digest="d5")
    assert run.condition(run.cluster.objects[key], "Verified") == "True"


def test_a_task_that_has_verified_a_save_goes() -> None:
    run = Run()
    key = adopt(run)
    run.cluster.settle()
    run.answer_tasks("import", step=5, digest="d5")
    assert run.condition(run.cluster.objects[key], "Verified") == "True"
    assert run.cluster.pods("task") == []
    assert run.cluster.plan(key).empty


def test_more_users_than_a_status_can_name_hinder_nothing() -> None:
    run = Run()
    key = adopt(run)
    run.cluster.settle()
    run.answer_tasks("import", step=5, digest="d5")
    for number in range(70):
        run.cluster.add(
            {
                "apiVersion": "stoker.dev/v1alpha1",
                "kind": "InferenceDeployment",
                "metadata": {"name": f"chat-{number:02}"},
                "spec": {"model": {"checkpointRef": {"name": "old"}}, "pools": [{"name": "main"}]},
            }
        )
    run.cluster.settle()
    assert len(run.cluster.objects[key]["status"]["inUseBy"]) == 64


def test_data_is_deleted_only_under_policy_delete_and_not_while_used() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "deletionPolicy": "Delete"})
    run.start()
    run.train(10, (run.save(10),))
    key = Key("Checkpoint", "default", run.checkpoint(10)["metadata"]["name"])
    assert run.cluster.objects[key]["metadata"]["finalizers"] == ["stoker.dev/checkpoint-data"]
    run.cluster.end(run.gang[0], Cause.RANK_FAILED, saves=(run.word(10),))
    run.next_attempt()
    run.cluster.delete(key)
    run.cluster.settle()
    assert "TrainingJob run" in run.cluster.objects[key]["status"]["message"]
    assert run.cluster.pods("task") == []
    run.train(100)
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED)
    run.cluster.settle()
    run.answer_tasks("delete", deleted=["a"])
    run.cluster.settle()
    assert key not in run.cluster.objects


def test_a_task_that_refuses_to_delete_blocks_the_deletion_even_without_a_reason() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "deletionPolicy": "Delete"})
    run.start()
    run.train(10, (run.save(10),))
    key = Key("Checkpoint", "default", run.checkpoint(10)["metadata"]["name"])
    run.cluster.delete(key)
    run.cluster.settle()
    run.answer_tasks("delete", ok=False)
    found = run.cluster.objects[key]
    assert (run.condition(found, "Stalled"), found["status"]["message"]) == ("True", "the delete task says no")


def test_a_retained_checkpoint_leaves_at_once_and_its_data_stays() -> None:
    run = Run()
    run.start()
    run.train(10, (run.save(10),))
    key = Key("Checkpoint", "default", run.checkpoint(10)["metadata"]["name"])
    run.cluster.delete(key)
    run.cluster.settle()
    assert key not in run.cluster.objects or "finalizers" not in run.cluster.objects[key]["metadata"]
    assert run.cluster.pods("task") == []


def test_a_task_whose_image_cannot_be_pulled_says_so() -> None:
    run = Run()
    key = adopt(run)
    run.cluster.settle()
    (pod,) = run.cluster.pods("task")
    state = {"waiting": {"reason": "ErrImagePull", "message": 'pull "none:1": not found'}}
    pod["status"]["containerStatuses"] = [{"name": "main", "state": state}]
    run.cluster._touch(pod)
    run.cluster.settle()
    status = run.cluster.objects[key]["status"]
    assert status["message"] == 'a task reads the folder: ImagePullBackOff: pull "none:1": not found'
    stalled = next(item for item in status["conditions"] if item["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ImagePullBackOff")
    run.cluster.run(pod)
    run.cluster.settle()
    status = run.cluster.objects[key]["status"]
    assert status["message"] == "a task reads the folder"
    assert all(item["type"] != "Stalled" for item in status["conditions"])


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


def test_in_an_ending_namespace_the_data_stays_and_the_finalizer_goes() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "deletionPolicy": "Delete"})
    run.start()
    run.train(10, (run.save(10),))
    key = Key("Checkpoint", "default", run.checkpoint(10)["metadata"]["name"])
    run.cluster.ending.add("default")
    run.cluster.delete(key)
    run.cluster.settle()
    assert key not in run.cluster.objects
    assert run.cluster.pods("task") == []
    assert any("Retained" in event for event in run.cluster.events)


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
    """Whether the next attempt is there after some more time."""
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


@pytest.mark.parametrize(
    "change",
    [{"activeDeadlineSeconds": 100}, {"suspend": True}, {"cancel": True}],
    ids=["deadline", "suspend", "cancel"],
)
def test_a_job_whose_pods_have_all_done_their_part_is_completed_whatever_is_wanted_since(
    change: dict[str, Any],
) -> None:
    """The operator was away, or the wish came at the last moment."""
    run = Run()
    run.start()
    run.train(100, (run.save(100),))
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED, step=100, saves=(run.word(100),))
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(change))
    run.cluster.advance(101)
    run.cluster.settle()
    assert run.status["phase"] == "Completed"


def test_a_job_whose_leader_is_done_needs_no_finished_pod_that_somebody_removed() -> None:
    run = Run()
    run.start()
    run.train(100, (run.save(100),))
    leader, other = run.gang
    run.cluster.end(leader, Cause.COMPLETED, step=100, saves=(run.word(100),))
    run.cluster.vanish(other)
    run.cluster.settle()
    assert run.status["phase"] == "Completed"


def test_what_earlier_attempts_needed_goes_when_the_next_one_starts() -> None:
    run = Run()
    run.start()
    for _ in range(3):
        for pod in run.gang:
            run.cluster.vanish(pod)
        run.next_attempt()
    assert run.attempt == 3
    configs = [c["metadata"]["name"] for c in run.cluster.of_kind("ConfigMap") if "attempt" in str(c["metadata"])]
    assert [name.rpartition("-")[2] for name in configs] == ["a3"]
    assert len(run.cluster.pods("task")) <= 1


def test_an_attempt_that_was_opened_goes_on_though_its_checkpoint_object_is_gone_meanwhile() -> None:
    """The operator died before it had written the attempt's configuration; the data is where it was."""
    run = Run()
    run.start()
    run.train(25, (run.save(20),))
    run.cluster.end(run.gang[0], Cause.RANK_FAILED, saves=(run.word(20),))
    run.cluster.settle()
    run.cluster.collect()
    run.cluster.advance(400)
    with contextlib.suppress(Crash):
        run.cluster.reconcile(JOB, crash_after=1)
    assert run.attempt == 1
    run.cluster.delete(Key("Checkpoint", "default", run.checkpoint(20)["metadata"]["name"]))
    run.cluster.settle()
    config = next(c for c in run.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith("-a1"))
    assert '"digest": "digest20"' in config["data"]["config.json"]
    assert len(run.gang) == 2


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "job",
                "checkpoints",
                "run",
                "train",
                "save",
                "fail",
                "kill",
                "vanish",
                "complete",
                "tasks",
                "collect",
                "wait",
                "suspend",
                "go on",
            ]
        ),
        st.integers(0, 6),
    ),
    max_size=40,
)


def disturb(run: Run, event: str, number: int) -> None:
    """One thing that may happen at any time; `number` picks the pod, the step or the point of a crash."""
    cluster, gang = run.cluster, run.gang if "attempt" in run.status else []
    running = [pod for pod in gang if pod["status"]["phase"] == "Running"]
    if event == "job":
        crash(cluster, JOB, number)
    elif event == "checkpoints":
        for found in cluster.of_kind("Checkpoint"):
            crash(cluster, Key("Checkpoint", "default", found["metadata"]["name"]), number)
    elif event == "run":
        for pod in gang[: number + 1]:
            cluster.run(pod)
    elif event in {"train", "save"} and running and running[0]["metadata"]["labels"]["stoker.dev/node-rank"] == "0":
        old = cluster.reports.get(running[0]["metadata"]["uid"], {"saves": [], "step": 0})
        step = old["step"] + number
        saves = [*old["saves"], *([run.save(step, [None, True][number % 2])] if event == "save" and step else [])]
        cluster.report(running[0], {"attempt": run.attempt, "phase": "Training", "step": step, "saves": saves})
    elif event == "fail" and running:
        causes = [
            Cause.RANK_FAILED,
            Cause.HANG,
            Cause.OUT_OF_MEMORY,
            Cause.INTERRUPTED,
            Cause.CHECKPOINT_CORRUPT,
            Cause.STORAGE_ERROR,
        ]
        cluster.end(running[number % len(running)], causes[number % len(causes)])
    elif event == "kill" and running:
        cluster.kill(running[number % len(running)])
    elif event == "vanish" and gang:
        cluster.vanish(gang[number % len(gang)])
    elif event == "complete" and len(running) == 2:
        cluster.end(running[number % 2], Cause.COMPLETED)
    elif event == "tasks":
        for verb in ("verify", "list"):
            for pod in cluster.pods("task"):
                if pod["metadata"]["labels"]["stoker.dev/task"] == verb and pod["status"]["phase"] == "Pending":
                    cluster.end(pod, Cause.COMPLETED, result={"task": verb, "ok": True, "saves": []})
    elif event == "collect":
        cluster.collect()
    elif event == "wait":
        cluster.advance(60 * number)
    elif event in {"suspend", "go on"}:
        cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=event == "suspend"))


def crash(cluster: SimulatedCluster, key: Key, point: int) -> None:
    with contextlib.suppress(Crash):
        cluster.reconcile(key, crash_after=point if point < 6 else None)


def check_invariants(run: Run) -> None:
    live = [p for p in run.cluster.pods("trainer") if p["status"]["phase"] in {"Pending", "Running"}]
    wanted = [p for p in live if not p["metadata"].get("deletionTimestamp")]
    attempts = {p["metadata"]["labels"]["stoker.dev/attempt"] for p in live}
    assert len(attempts) <= 1, "two attempts at the same time"
    if run.status.get("phase") in {"Completed", "Failed", "Cancelled"} and run.cluster.plan(JOB).create:
        kinds = {body["kind"] for body in run.cluster.plan(JOB).create}
        assert kinds <= {"Checkpoint"}, "a terminal job makes no workload"
    resumed = run.status.get("attempt", {}).get("resumedFrom")
    assert resumed is None or resumed["verified"], "only verified checkpoints are resumed"
    assert len(wanted) <= 2


def behave(run: Run) -> None:
    """From here on everything works: the job must come to an end."""
    cluster = run.cluster
    cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=False))
    for _ in range(40):
        cluster.settle()
        if run.status["phase"] in {"Completed", "Failed", "Cancelled"}:
            break
        cluster.collect()
        cluster.advance(400)
        disturb(run, "tasks", 0)
        gang = run.gang if "attempt" in run.status else []
        for pod in gang:
            cluster.run(pod)
        if len(gang) == 2 and all(p["status"]["phase"] in {"Running", "Succeeded"} for p in gang):
            cluster.settle()
            for pod in run.gang:
                if pod["status"]["phase"] == "Running" and not pod["metadata"].get("deletionTimestamp"):
                    cluster.end(pod, Cause.COMPLETED)
    disturb(run, "tasks", 0)
    cluster.collect()
    cluster.settle()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_any_order_and_any_crash_point_converge(events: list[tuple[str, int]]) -> None:
    run = Run(run={"backoffLimit": 1000})
    for event, number in events:
        disturb(run, event, number)
        check_invariants(run)
    behave(run)
    assert run.status["phase"] in {"Completed", "Failed"}
    writes = run.cluster.writes
    run.cluster.settle()
    assert run.cluster.writes == writes, "a second pass over a converged cluster writes nothing"
