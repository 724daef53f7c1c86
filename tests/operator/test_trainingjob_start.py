"""The start of a TrainingJob: its children, the objects that it waits for, the parts of an attempt."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from stoker.operator.domain.plan import Key
from stoker.operator.render.pod import WORK_FOLDER
from stoker.pod.causes import Cause
from testing.operator.simulated_cluster import Crash
from testing.operator.training_world import JOB, Run
from testing.operator.unbuilt import UNBUILT, UNBUILT_FIELD


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


def test_a_pod_with_a_mig_device_or_claims_has_shared_memory_and_the_first_needs_the_gpu() -> None:
    """The MIG device is a GPU; what a claim holds is not known when the pod is rendered."""
    mig = {"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    claims = {"podTemplate": {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]}}}
    found = {}
    for name, workers in (("mig", mig), ("claims", claims), ("cpu", {})):
        run = Run(workers={"replicas": 2, **workers})
        run.cluster.settle()
        volumes = [volume["name"] for volume in run.gang[0]["spec"]["volumes"]]
        found[name] = ("stoker-shm" in volumes, configuration(run)["device"])
    assert found == {"mig": (True, "cuda"), "claims": (True, "auto"), "cpu": (False, "auto")}


def configuration(run: Run) -> Any:
    """What the ranks of the newest attempt read."""
    (found,) = [one["data"] for one in run.cluster.of_kind("ConfigMap") if "config.json" in (one.get("data") or {})]
    return json.loads(found["config.json"])


def test_a_running_job_reports_progress_and_a_second_pass_is_empty() -> None:
    run = Run()
    run.start()
    run.train(7)
    assert run.status["phase"] == "Running"
    assert run.status["progress"]["step"] == 7
    assert run.cluster.plan(JOB).empty


def test_progress_by_data_source_is_in_the_status() -> None:
    run = Run()
    run.start()
    run.train(6)
    assert run.status["progress"]["sources"] == [{"name": "web", "samples": 48, "epochs": "1.5"}]


def test_keys_of_logging_services_are_variables_of_the_pod_and_not_in_its_configuration() -> None:
    wandb = {"project": "p", "apiKeySecretRef": {"name": "wandb", "key": "api-key"}}
    mlflow = {"trackingUri": "https://x", "experiment": "e", "tokenSecretRef": {"name": "mlflow", "key": "token"}}
    run = Run(logging={"wandb": wandb, "mlflow": mlflow})
    run.cluster.add({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "wandb"}, "data": {"api-key": "eA=="}})
    run.cluster.add({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mlflow"}, "data": {"token": "eA=="}})
    run.cluster.settle()
    env = {item["name"]: item for item in run.gang[0]["spec"]["containers"][0]["env"]}
    assert env["WANDB_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    assert env["MLFLOW_TRACKING_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "mlflow", "key": "token"}}
    assert env["WANDB_CACHE_DIR"]["value"] == f"{WORK_FOLDER}/wandb"
    (config,) = (found for found in run.cluster.of_kind("ConfigMap") if "config.json" in found.get("data", {}))
    logging = json.loads(config["data"]["config.json"])["logging"]
    assert logging["wandb"] == {"project": "p", "tags": []}
    assert logging["mlflow"] == {"tracking_uri": "https://x", "experiment": "e"}


def test_the_configuration_of_a_new_attempt_names_what_to_resume() -> None:
    run = Run()
    run.start()
    run.train(25, (run.save(20),))
    run.cluster.end(run.gang[0], Cause.RANK_FAILED, saves=(run.word(20),))
    run.next_attempt()
    config = next(c for c in run.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith("-a1"))
    assert '"digest": "digest20"' in config["data"]["config.json"]
    assert "/var/stoker/checkpoints/run/step-00000020." in config["data"]["config.json"]


def test_a_missing_claim_is_named_and_nothing_runs() -> None:
    run = Run(checkpoint={"storage": {"claimName": "elsewhere"}})
    run.cluster.settle()
    assert "PersistentVolumeClaim elsewhere does not exist" in run.status["message"]
    assert run.cluster.pods("trainer") == []


def test_what_is_not_built_yet_is_refused_by_name() -> None:
    run = Run(**UNBUILT)
    run.cluster.settle()
    assert "not supported yet" in run.status["message"]
    assert UNBUILT_FIELD in run.status["message"]
    assert run.cluster.pods("trainer") == []


def test_no_child_is_made_after_a_deletion_timestamp() -> None:
    run = Run()
    run.job["metadata"]["finalizers"] = ["foregroundDeletion"]
    run.cluster.delete(JOB)
    run.cluster.settle()
    assert run.cluster.of_kind("Pod") == []


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


PULLED = "ghcr.io/stoker-dev/runtime@sha256:" + "0a" * 32


def test_a_restarted_attempt_runs_the_image_that_the_first_one_pulled_though_its_tag_has_moved() -> None:
    run = Run()
    run.cluster.settle()
    assert run.status["pinned"]["images"] == {"trainer": "ghcr.io/stoker-dev/runtime:0.1.0"}
    for pod in run.gang:
        run.cluster.run(pod)
        pod["status"]["containerStatuses"] = [{"name": "main", "imageID": PULLED, "state": {"running": {}}}]
    run.train(1)
    assert run.status["pinned"]["images"] == {"trainer": PULLED}
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED)
    run.next_attempt()
    assert [pod["spec"]["containers"][0]["image"] for pod in run.gang] == [PULLED, PULLED]
    assert run.status["pinned"]["images"] == {"trainer": PULLED}
    assert run.status["attempt"]["revision"] == run.status["attempts"][0]["revision"]


def test_another_image_of_the_user_replaces_the_pinned_one() -> None:
    run = Run()
    run.cluster.settle()
    for pod in run.gang:
        run.cluster.run(pod)
        pod["status"]["containerStatuses"] = [{"name": "main", "imageID": PULLED, "state": {"running": {}}}]
    run.train(1)
    run.cluster.change_spec(JOB, lambda spec: spec["workers"].update(image="ghcr.io/lab/runtime:2"))
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED)
    run.next_attempt()
    assert run.status["pinned"]["images"] == {"trainer": "ghcr.io/lab/runtime:2"}
    assert run.gang[0]["spec"]["containers"][0]["image"] == "ghcr.io/lab/runtime:2"


FROM = {"name": "old", "state": "All"}


def adopt_old(run: Run, name: str = "old", claim: str = "claim") -> None:
    """Add a Checkpoint of an earlier job, verified by a task."""
    source = {"import": {"storage": {"claimName": claim, "path": "earlier"}, "folder": "step-00000005.0badc0de"}}
    run.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "Checkpoint",
            "metadata": {"name": name},
            "spec": {"source": source},
        }
    )
    run.cluster.settle()
    run.answer_tasks("import", step=5, digest="d5")


def resume_of(run: Run, attempt: int) -> Any:
    config = next(c for c in run.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith(f"-a{attempt}"))
    return json.loads(config["data"]["config.json"])["resume"]


def test_a_job_that_takes_all_state_from_a_checkpoint_resumes_it_and_later_its_own_saves() -> None:
    run = Run(model=None, modelFrom={"checkpoint": FROM})
    run.cluster.settle()
    assert run.status["message"] == "Checkpoint old does not exist (spec.modelFrom.checkpoint)"
    adopt_old(run)
    folder = "/var/stoker/checkpoints/earlier/step-00000005.0badc0de"
    assert resume_of(run, 0) == {"folder": folder, "step": 5, "digest": "d5"}
    assert run.status["message"].startswith("2 of 2 pods wait")
    resumed = run.status["attempt"]["resumedFrom"]
    assert (resumed["name"], resumed["step"], run.status["attempt"]["firstStep"]) == ("old", 5, 5)
    old = run.cluster.objects[Key("Checkpoint", "default", "old")]
    assert [user["name"] for user in old["status"]["inUseBy"]] == ["run"]
    for pod in run.gang:
        run.cluster.run(pod)
    run.train(8, (run.save(7),))
    run.cluster.end(run.gang[0], Cause.RANK_FAILED, saves=(run.word(7),))
    run.next_attempt()
    assert resume_of(run, 1)["step"] == 7


def test_a_job_begins_with_no_checkpoint_that_is_being_deleted() -> None:
    run = Run(model=None, modelFrom={"checkpoint": FROM}, run={"suspend": True})
    adopt_old(run)
    run.cluster.objects[Key("Checkpoint", "default", "old")]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(suspend=False))
    run.cluster.settle()
    assert run.status["message"] == "Checkpoint old is being deleted (spec.modelFrom.checkpoint)"
    assert run.gang == []


def test_a_save_that_is_being_deleted_is_not_resumed() -> None:
    """Between two attempts no resource uses it, so that its data goes at any moment."""
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "deletionPolicy": "Delete"})
    run.start()
    run.train(20, (run.save(10), run.save(20)))
    run.cluster.end(run.gang[0], Cause.RANK_FAILED, saves=(run.word(20),))
    run.next_attempt()
    assert resume_of(run, 1)["step"] == 20
    run.cluster.delete(Key("Checkpoint", "default", run.checkpoint(20)["metadata"]["name"]))
    run.cluster.settle()
    run.cluster.end(run.gang[0], Cause.RANK_FAILED)
    run.next_attempt()
    assert resume_of(run, 2)["step"] == 10


def test_a_job_that_takes_the_weights_from_a_checkpoint_begins_at_step_0() -> None:
    run = Run(model=None, modelFrom={"checkpoint": {"name": "old", "state": "Weights"}})
    adopt_old(run)
    assert resume_of(run, 0) is None
    assert (run.status["attempt"]["firstStep"], "resumedFrom" in run.status["attempt"]) == (0, False)


def test_all_state_of_a_checkpoint_that_turns_out_corrupt_fails_the_job_because_nothing_is_older() -> None:
    run = Run(model=None, modelFrom={"checkpoint": FROM})
    adopt_old(run)
    run.start()
    run.cluster.end(run.gang[0], Cause.CHECKPOINT_CORRUPT, detail="rank-0.bin: hash differs")
    run.cluster.settle()
    assert (run.status["phase"], run.status["lastFailure"]["cause"]) == ("Failed", "CheckpointCorrupt")
