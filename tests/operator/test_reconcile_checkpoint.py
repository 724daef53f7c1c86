"""The reconcile of a Checkpoint: reported saves, requests, imports, tasks, deletion."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.plan import Key
from stoker.pod.causes import Cause
from testing.operator.serving_world import Serving
from testing.operator.simulated_cluster import Crash, SimulatedCluster
from testing.operator.training_world import JOB, SAVE_METRICS, Run


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


@pytest.mark.parametrize("word_says", [{}, {"metrics": {}}], ids=["in the termination message", "in an earlier report"])
def test_a_checkpoint_shows_the_figures_of_its_save_from_any_source(word_says: dict[str, Any]) -> None:
    run = Run()
    run.start()
    if word_says:
        run.train(10, (run.save(10, None),))
        assert run.checkpoint(10)["status"].items() >= SAVE_METRICS.items()
    run.cluster.end(run.gang[0], Cause.INTERRUPTED, saves=(run.word(10) | word_says,))
    run.cluster.settle()
    assert run.condition(run.checkpoint(10), "Verified") == "True"
    assert run.checkpoint(10)["status"].items() >= SAVE_METRICS.items()


def test_saves_of_another_writer_change_nothing() -> None:
    run = Run()
    run.start()
    stale = {**run.save(10), "folder": "step-00000010.ffffffff"}
    run.train(10, (stale,))
    assert run.cluster.of_kind("Checkpoint") == []


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


def test_by_its_manifest_an_import_is_verified_without_its_data_and_later_whole() -> None:
    run = Run()
    key = adopt(run, verification="Manifest")
    run.cluster.settle()
    run.answer_tasks("inspect", step=5, digest="d5", bytes=10)
    found = run.cluster.objects[key]
    assert (found["status"]["verifiedBy"], run.condition(found, "Ready")) == ("Manifest", "True")
    assert run.cluster.pods("task") == []
    run.cluster.change_spec(key, lambda spec: spec.update(verification="Full"))
    run.cluster.settle()
    assert run.condition(run.cluster.objects[key], "Ready") == "True"
    run.answer_tasks("verify", step=5, digest="d5", bytes=10)
    found = run.cluster.objects[key]
    assert (found["status"]["verifiedBy"], run.condition(found, "Verified")) == ("Task", "True")
    assert run.cluster.plan(key).empty


def test_the_whole_verification_after_that_of_the_manifest_may_find_damage() -> None:
    run = Run()
    key = adopt(run, verification="Manifest")
    run.cluster.settle()
    run.answer_tasks("inspect", step=5, digest="d5")
    run.cluster.change_spec(key, lambda spec: spec.update(verification="Full"))
    run.cluster.settle()
    run.answer_tasks("verify", ok=False, problems=["rank-0.bin: hash differs"])
    found = run.cluster.objects[key]
    assert (found["status"]["phase"], run.condition(found, "Verified")) == ("Corrupt", "False")


def test_a_save_without_a_read_back_is_verified_by_its_manifest_where_that_suffices() -> None:
    run = Run()
    run.start()
    run.train(10, (run.save(10, None),))
    key = Key("Checkpoint", "default", run.checkpoint(10)["metadata"]["name"])
    run.cluster.change_spec(key, lambda spec: spec.update(verification="Manifest"))
    run.cluster.end(run.gang[0], Cause.CANCELLED)
    run.cluster.settle()
    run.answer_tasks("inspect", step=10, digest=run.checkpoint(10)["status"]["digest"])
    assert run.checkpoint(10)["status"]["verifiedBy"] == "Manifest"


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


def test_the_checkpoint_that_a_deployment_served_before_a_refused_edit_is_still_in_use() -> None:
    run = Run()
    key = adopt(run)
    run.cluster.settle()
    run.answer_tasks("import", step=5, digest="d5")
    run.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "InferenceDeployment",
            "metadata": {"name": "chat"},
            "spec": {"model": {"checkpointRef": {"name": "another"}}, "pools": [{"name": "main"}]},
            "status": {"acceptedSpec": {"model": {"checkpointRef": {"name": "old"}}}},
        }
    )
    run.cluster.settle()
    assert run.cluster.objects[key]["status"]["inUseBy"] == [{"kind": "InferenceDeployment", "name": "chat"}]


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
    assert (run.condition(found, "Stalled"), found["status"]["message"]) == (
        "True",
        "the delete task refused without a reason",
    )


def test_a_retained_checkpoint_leaves_at_once_and_its_data_stays() -> None:
    run = Run()
    run.start()
    run.train(10, (run.save(10),))
    key = Key("Checkpoint", "default", run.checkpoint(10)["metadata"]["name"])
    run.cluster.delete(key)
    run.cluster.settle()
    assert key not in run.cluster.objects or "finalizers" not in run.cluster.objects[key]["metadata"]
    assert run.cluster.pods("task") == []


def test_a_save_that_is_pinned_after_it_was_given_up_stays_and_so_does_its_data() -> None:
    run = Run()
    run.start()
    run.train(10, (run.save(10),))
    key = Key("Checkpoint", "default", run.checkpoint(10)["metadata"]["name"])
    run.cluster.objects[key]["metadata"]["labels"]["stoker.dev/expired"] = "true"
    run.cluster.change_spec(key, lambda spec: spec.update(pinned=True))
    run.cluster.settle()
    assert run.cluster.objects[key]["metadata"].get("finalizers", []) == []
    run.cluster.delete(key)
    run.cluster.settle()
    assert (key in run.cluster.objects, run.cluster.pods("task")) == (False, [])


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


@settings(max_examples=15, deadline=None)
@given(data=st.data(), waits=st.booleans(), serves=st.booleans(), passes=st.integers(0, 3))
def test_a_namespace_that_is_deleted_with_everything_in_it_comes_to_its_end(
    data: st.DataObject, waits: bool, serves: bool, passes: int
) -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "deletionPolicy": "Delete"})
    cluster = run.cluster
    run.start()
    run.train(20, (run.save(10), run.save(20)))
    name = run.checkpoint(10)["metadata"]["name"]
    if serves:
        cluster.reconcilers = {**cluster.reconcilers, **Serving().cluster.reconcilers}
        spec = {"model": {"checkpointRef": {"name": name}}, "pools": [{"name": "main"}]}
        cluster.add({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"},
                     "spec": spec})  # fmt: skip
    if waits:
        cluster.delete(Key("Checkpoint", "default", name))
    for _ in range(passes):
        cluster.settle_once()
    cluster.closed.add("default")
    for key in data.draw(st.permutations(sorted(cluster.objects))):
        cluster.delete(key)
        if data.draw(st.booleans()):
            pass_over(cluster)
    for _ in range(6):
        cluster.collect()
        pass_over(cluster)
        cluster.advance(120)
    assert cluster.objects == {}


def pass_over(cluster: SimulatedCluster) -> None:
    """Run one pass over everything; what is refused is tried again with the next."""
    for key in sorted(cluster.objects):
        if key.kind in cluster.reconcilers and key in cluster.objects:
            with contextlib.suppress(Crash):
                cluster.reconcile(key)


def test_a_save_whose_validation_diverged_is_not_the_jobs_best() -> None:
    run = Run()
    run.start()
    losses = {10: float("nan"), 20: 1.5, 30: float("nan")}
    run.train(30, tuple({**run.save(step), "validation_loss": loss} for step, loss in losses.items()))
    run.cluster.settle()
    assert run.status["newestVerifiedCheckpoint"]["step"] == 30
    assert run.status["bestVerifiedCheckpoint"]["step"] == 20


def resumed_after_a_stop() -> Run:
    """A run that goes on from the save of step 10, with which it was suspended during a validation."""
    run = Run()
    run.start()
    run.train(10, (run.save(10),))
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=True))
    run.cluster.settle_once()
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, saves=(run.word(10),))
    run.cluster.settle()
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(suspend=False))
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["step"] == 10
    assert "validationLoss" not in run.checkpoint(10)["status"]
    return run


@pytest.mark.parametrize("ends", [False, True], ids=["reported", "in the termination message"])
def test_a_save_gets_the_validation_loss_that_the_attempt_that_resumes_it_begins_with(ends: bool) -> None:
    run = resumed_after_a_stop()
    validated = {"start_validation": {"step": 10, "loss": 1.25}}
    if ends:
        run.cluster.end(run.gang[0], Cause.INTERRUPTED, step=10, result={"step": 10, **validated})
    else:
        run.cluster.report(run.gang[0], {"attempt": 1, "phase": "Training", "step": 12, "saves": [], **validated})
    run.cluster.settle()
    assert run.checkpoint(10)["status"]["validationLoss"] == "1.25"
    assert run.status["bestVerifiedCheckpoint"]["step"] == 10


def test_a_validation_of_other_weights_is_not_that_of_the_save_that_was_resumed() -> None:
    run = resumed_after_a_stop()
    other = {"start_validation": {"step": 20, "loss": 1.25}, "validation_loss": 1.0}
    run.cluster.report(run.gang[0], {"attempt": 1, "phase": "Training", "step": 20, "saves": [], **other})
    run.cluster.settle()
    assert "validationLoss" not in run.checkpoint(10)["status"]
