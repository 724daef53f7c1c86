"""Checkpoints in a bucket, as the operator renders them: pods that reach it, objects that name it, hidden secrets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.checkpoint.bucket_access import access_of
from stoker.operator.api.storage import ObjectStore, StorageSpec
from stoker.operator.domain.plan import Key, Object
from stoker.operator.render.storage import bucket_mounts, settled, storage_root
from testing.operator.serving_world import Serving
from testing.operator.training_world import Run

S3 = {
    "bucket": "models",
    "endpoint": "https://s3.example:9000",
    "region": "eu-1",
    "credentialsSecretRef": {"name": "s3"},
}
SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "s3"},
    "stringData": {"AWS_ACCESS_KEY_ID": "AKIDVERYSECRET", "AWS_SECRET_ACCESS_KEY": "verysecret"},
}
DIGEST = "ab" * 32


def in_bucket(secret: bool = True, **s3: Any) -> Run:
    run = Run(checkpoint={"storage": {"s3": {**S3, **s3}}})
    if secret:
        run.cluster.add(SECRET)
    return run


def main(pod: Object) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def environment(pod: Object) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in main(pod)["env"] if "value" in variable}


def assert_reaches(pod: Object, place: str) -> None:
    """The pod's program finds endpoint and credentials of a place, and no claim is mounted."""
    access = access_of(place, environment(pod))
    assert (access.endpoint, access.region) == (S3["endpoint"], S3["region"])
    mounts = {mount["mountPath"]: mount for mount in main(pod)["volumeMounts"]}
    mount = mounts[str(access.credentials)]
    assert mount["readOnly"] is True
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes[mount["name"]]["secret"] == {"secretName": "s3"}
    assert not any("persistentVolumeClaim" in volume for volume in volumes.values())


def test_a_job_saves_into_its_bucket_and_its_checkpoints_and_tasks_name_it() -> None:
    run = in_bucket()
    run.start()
    for pod in run.gang:
        assert_reaches(pod, "models/run/step-1")
    configs = [found for found in run.cluster.of_kind("ConfigMap") if "config.json" in found.get("data", {})]
    assert json.loads(configs[0]["data"]["config.json"])["checkpoint"]["root"] == "s3://models/run"

    run.train(10, (run.save(10, None),))
    found = run.checkpoint(10)
    assert found["spec"]["source"]["save"]["storage"] == {"s3": {**S3, "prefix": "run"}}
    for pod in run.gang:
        run.cluster.kill(pod)
    run.cluster.settle()
    tasks = {pod["metadata"]["labels"]["stoker.dev/task"]: pod for pod in run.cluster.pods("task")}
    assert main(tasks["verify"])["command"][-6:-2] == [
        "--folder",
        f"s3://models/run/{run.folder(10)}",
        "--digest",
        "digest10",
    ]
    assert "s3://models/run" in main(tasks["list"])["command"]
    for pod in tasks.values():
        assert_reaches(pod, "models/run")
    made = json.dumps([item for item in run.cluster.objects.values() if item["kind"] != "Secret"])
    assert "SECRET" not in made.replace("AWS_SECRET", "")
    assert "verysecret" not in made


def test_a_job_waits_for_the_secret_of_its_bucket() -> None:
    run = in_bucket(secret=False)
    run.cluster.settle()
    assert run.status["message"] == "Secret s3 does not exist (spec.checkpoint.storage.s3.credentialsSecretRef)"
    assert not run.gang
    run.cluster.add(SECRET)
    run.cluster.settle()
    assert len(run.gang) == 2


def test_an_attempt_resumes_from_the_bucket() -> None:
    run = in_bucket(prefix="team/runs")
    run.start()
    run.train(10, (run.save(10),))
    for pod in run.gang:
        run.cluster.kill(pod)
    run.next_attempt()
    texts = [item["data"]["config.json"] for item in run.cluster.of_kind("ConfigMap") if "config.json" in item["data"]]
    config = max(map(json.loads, texts), key=lambda found: int(found["job"]["attempt"]))
    assert config["resume"]["folder"].startswith("s3://models/team/runs/step-00000010.")


def with_a_save_to_delete() -> tuple[Run, Key]:
    """A run of two saves, and the older one, whose data goes with its Checkpoint."""
    run = in_bucket()
    run.start()
    run.train(20, (run.save(10), run.save(20)))
    key = Key("Checkpoint", "default", run.checkpoint(10)["metadata"]["name"])
    run.cluster.change_spec(key, lambda spec: spec.update(deletionPolicy="Delete"))
    run.cluster.settle()
    return run, key


def test_the_data_of_a_deleted_save_is_removed_from_the_bucket_by_a_task() -> None:
    run, key = with_a_save_to_delete()
    run.cluster.delete(key)
    run.cluster.settle()
    (task,) = (pod for pod in run.cluster.pods("task") if pod["metadata"]["labels"]["stoker.dev/task"] == "delete")
    assert_reaches(task, "models/run")


def test_data_that_was_adopted_from_the_same_bucket_stays_however_its_endpoint_is_written() -> None:
    run, key = with_a_save_to_delete()
    storage = {"s3": {**S3, "prefix": "run", "endpoint": f"{S3['endpoint']}/"}}
    source = {"import": {"storage": storage, "folder": run.folder(10)}}
    metadata = {"name": "adopted"}
    run.cluster.add(
        {"apiVersion": "stoker.dev/v1alpha1", "kind": "Checkpoint", "metadata": metadata, "spec": {"source": source}}
    )
    run.cluster.delete(key)
    run.cluster.settle()
    tasks = [pod["metadata"]["labels"]["stoker.dev/task"] for pod in run.cluster.pods("task")]
    assert (key in run.cluster.objects, "delete" in tasks) == (False, False)


def test_an_import_from_a_bucket_is_read_by_a_task_there() -> None:
    run = Run()
    storage = {"s3": {**S3, "prefix": "archive"}}
    folder = "step-00000400.0a1b2c3d"
    source = {"import": {"storage": storage, "folder": folder, "digest": DIGEST}}
    key = Key("Checkpoint", "default", "adopted")
    run.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "Checkpoint",
            "metadata": {"name": "adopted"},
            "spec": {"source": source},
        }
    )
    run.cluster.settle()
    missing = "Secret s3 does not exist (spec.source.import.storage.s3.credentialsSecretRef)"
    assert run.cluster.objects[key]["status"]["message"] == missing
    run.cluster.add(SECRET)
    run.cluster.settle()
    (task,) = (pod for pod in run.cluster.pods("task") if pod["metadata"]["labels"]["stoker.dev/task"] == "import")
    assert_reaches(task, f"models/archive/{folder}")
    run.answer_tasks("import", step=400, digest=DIGEST, bytes=10)
    assert run.condition(run.cluster.objects[key], "Verified") == "True"


def test_a_start_is_read_from_its_own_server_where_the_jobs_has_the_same_names() -> None:
    start = {"checkpoint": {"name": "adopted"}}
    run = Run(checkpoint={"storage": {"s3": {**S3, "prefix": "run"}}}, model=None, modelFrom=start)
    run.cluster.add(SECRET)
    old = {"bucket": S3["bucket"], "prefix": "run", "endpoint": "https://old.example"}
    folder = "step-00000400.0a1b2c3d"
    source = {"import": {"storage": {"s3": old}, "folder": folder, "digest": DIGEST}}
    metadata = {"name": "adopted"}
    run.cluster.add(
        {"apiVersion": "stoker.dev/v1alpha1", "kind": "Checkpoint", "metadata": metadata, "spec": {"source": source}}
    )
    run.cluster.settle()
    run.answer_tasks("import", step=400, digest=DIGEST, bytes=10)
    variables = environment(run.gang[0])
    assert access_of(f"models/run/{folder}", variables).endpoint == "https://old.example"
    assert access_of("models/run/step-00000010.aa", variables).endpoint == S3["endpoint"]


def test_engines_reach_the_bucket_of_their_checkpoint() -> None:
    serving = Serving(model={"checkpointRef": {"name": "run-7"}})
    serving.checkpoint(7, storage={"s3": {**S3, "prefix": "run"}})
    serving.rest()
    (engine,) = serving.engines()
    assert_reaches(engine, "models/run")


@pytest.mark.parametrize(
    ("storage", "root", "with_default"),
    [
        (StorageSpec(claim_name="c"), "/m/job", StorageSpec(claim_name="c", path="job")),
        (StorageSpec(claim_name="c", path="a/b"), "/m/a/b", StorageSpec(claim_name="c", path="a/b")),
        (StorageSpec(s3=ObjectStore(bucket="b")), "s3://b/job", StorageSpec(s3=ObjectStore(bucket="b", prefix="job"))),
        (
            StorageSpec(s3=ObjectStore(bucket="b", prefix="a/b")),
            "s3://b/a/b",
            StorageSpec(s3=ObjectStore(bucket="b", prefix="a/b")),
        ),
    ],
)
def test_the_root_of_a_storage(storage: StorageSpec, root: str, with_default: StorageSpec) -> None:
    assert storage_root(storage, "job", "/m") == root
    assert settled(storage, "job") == with_default
    assert storage_root(settled(storage, "job"), "", "/m") == root


def test_several_buckets_of_one_pod_keep_apart() -> None:
    one = StorageSpec(s3=ObjectStore.model_validate({**S3, "prefix": "runs"}))
    other = StorageSpec(
        s3=ObjectStore.model_validate({"bucket": "models", "prefix": "runs/base", "endpoint": "http://b"})
    )
    found = bucket_mounts((one, ""), (other, ""), (one, ""))
    assert len(found.volumes) == 1
    assert access_of("models/runs/x", found.env).endpoint == S3["endpoint"]
    assert access_of("models/runs/base/step-1", found.env).endpoint == "http://b"
    assert access_of("models/runs/based", found.env).endpoint == S3["endpoint"]
    assert access_of("models/other", found.env).endpoint is None
