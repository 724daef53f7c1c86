"""The objects that a reconcile sees, and the resources that a change wakes: the two must agree."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.operator.domain.labels import CHECKPOINT_UID, DEPLOYMENT, DEPLOYMENT_UID, JOB, JOB_UID, ROLE
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.references import references
from stoker.operator.loop.observe import interested, observe, only_progress
from stoker.operator.loop.store import Store, key_of

NAMESPACE = "team"


def thing(kind: str, name: str, spec: Any = None, *, owner: str = "", **labels: str) -> Object:
    names = {"job": JOB, "job_uid": JOB_UID, "checkpoint_uid": CHECKPOINT_UID, "role": ROLE}
    names |= {"deployment": DEPLOYMENT, "deployment_uid": DEPLOYMENT_UID}
    metadata: Object = {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "resourceVersion": "1"}
    metadata["labels"] = {names[label]: value for label, value in labels.items()}
    if owner:
        kind_of_owner, _, owner_name = owner.partition("/")
        metadata["ownerReferences"] = [{"kind": kind_of_owner, "name": owner_name, "uid": f"uid-{owner_name}"}]
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec or {}}


WORLD = [
    thing(
        "TrainingJob",
        "job",
        {"checkpoint": {"storage": {"claimName": "disk"}}, "workers": {"volumes": [{"configMap": {"name": "data"}}]}},
    ),
    thing("TrainingJob", "next", {"modelFrom": {"checkpoint": {"name": "save"}}}),
    thing("Pod", "trainer-0", owner="TrainingJob/job", job="job", job_uid="uid-job", role="trainer"),
    thing("Pod", "trainer-1", owner="TrainingJob/job", job="job", job_uid="uid-job", role="trainer"),
    thing("Checkpoint", "save", {"source": {"save": {"jobRef": {"name": "job"}}}}, job="job", job_uid="uid-job"),
    thing("Pod", "verify", owner="Checkpoint/save", checkpoint_uid="uid-save", role="task"),
    thing("InferenceDeployment", "chat", {"model": {"checkpointSelector": {"jobRef": {"name": "job"}}}}),
    thing("EnginePool", "pool", owner="InferenceDeployment/chat", deployment="chat", deployment_uid="uid-chat"),
    thing("Pod", "engine", owner="EnginePool/pool", deployment="chat", deployment_uid="uid-chat", role="engine"),
    thing(
        "Pod", "router", owner="InferenceDeployment/chat", deployment="chat", deployment_uid="uid-chat", role="router"
    ),
    thing("PersistentVolumeClaim", "disk"),
    thing("ConfigMap", "data"),
    thing("ConfigMap", "stoker-control-keys"),
    thing("ConfigMap", "foreign"),
    thing("Pod", "foreign"),
]
WORLD[6]["status"] = {"currentCheckpoint": {"name": "save"}}

SEEN: dict[tuple[str, str], dict[str, list[str]]] = {
    ("TrainingJob", "job"): {
        "Checkpoint": ["save"],
        "ConfigMap": ["data", "stoker-control-keys"],
        "PersistentVolumeClaim": ["disk"],
        "Pod": ["trainer-0", "trainer-1"],
    },
    ("TrainingJob", "next"): {"Checkpoint": ["save"], "ConfigMap": ["stoker-control-keys"]},
    ("Checkpoint", "save"): {
        "ConfigMap": ["stoker-control-keys"],
        "InferenceDeployment": ["chat"],
        "Pod": ["trainer-0", "trainer-1", "verify"],
        "TrainingJob": ["job", "next"],
    },
    ("InferenceDeployment", "chat"): {
        "Checkpoint": ["save"],
        "ConfigMap": ["stoker-control-keys"],
        "EnginePool": ["pool"],
        "Pod": ["engine", "router"],
        "TrainingJob": ["job"],
    },
    ("EnginePool", "pool"): {
        "ConfigMap": ["stoker-control-keys"],
        "InferenceDeployment": ["chat"],
        "Pod": ["engine", "router"],
    },
}


def world() -> Store:
    store = Store()
    for found in WORLD:
        store.put(found)
    return store


def test_each_kind_sees_its_surroundings() -> None:
    store = world()
    found = {}
    for kind, name in SEEN:
        seen = observe(store, Key(kind, NAMESPACE, name), 0.0)
        assert seen is not None
        found[kind, name] = {k: [o["metadata"]["name"] for o in objects] for k, objects in sorted(seen.objects.items())}
    assert found == SEEN


def test_every_resource_that_sees_an_object_looks_again_when_it_changes() -> None:
    store = world()
    for kind, name in SEEN:
        key = Key(kind, NAMESPACE, name)
        seen = observe(store, key, 0.0)
        assert seen is not None
        for objects in seen.objects.values():
            for found in objects:
                if found["metadata"]["name"] == "stoker-control-keys":
                    continue  # a rotation of keys is followed by the kubelet, not by reconciles
                if kind == "Checkpoint" and found["metadata"]["name"].startswith("trainer-"):
                    continue  # only while a save is requested, see below
                assert key in interested(store, found), (key, key_of(found))


@pytest.mark.parametrize(
    ("status", "follows"),
    [
        ({}, True),
        ({"phase": "Saving"}, True),
        ({"phase": "Complete"}, True),
        ({"phase": "Complete", "verifiedAt": "2026-01-01T00:00:00Z"}, False),
        ({"phase": "Corrupt"}, False),
    ],
)
def test_a_checkpoint_follows_the_trainer_until_its_save_is_read_back(status: dict[str, str], follows: bool) -> None:
    store = world()
    pod = store.get(Key("Pod", NAMESPACE, "trainer-0"))
    assert pod is not None
    saved = thing("Checkpoint", "save", job_uid="uid-job")
    saved["metadata"]["resourceVersion"] = "2"
    saved["status"] = status
    store.put(saved)
    save = {Key("Checkpoint", NAMESPACE, "save")} if follows else set()
    assert interested(store, pod) == {Key("TrainingJob", NAMESPACE, "job")} | save


@pytest.mark.parametrize(
    ("loss", "report", "wakes"),
    [
        (None, {"start_validation": {"step": 5, "loss": 0.5}}, True),
        ("0.5", {"start_validation": {"step": 5, "loss": 0.5}}, False),
        (None, {"start_validation": None, "validation_loss": 0.5}, False),
    ],
    ids=["validated", "known", "not validated"],
)
def test_a_save_looks_again_when_the_attempt_that_resumes_it_has_validated_it(
    loss: str | None, report: dict[str, Any], wakes: bool
) -> None:
    store = world()
    pod, job = store.get(Key("Pod", NAMESPACE, "trainer-0")), store.get(Key("TrainingJob", NAMESPACE, "job"))
    assert pod is not None
    assert job is not None
    resumes = {"attempt": {"number": 1, "resumedFrom": {"name": "old"}}}
    store.put({**job, "metadata": {**job["metadata"], "resourceVersion": "2"}, "status": resumes})
    saved = thing("Checkpoint", "old", job_uid="uid-job")
    saved["status"] = {"phase": "Complete", "verifiedAt": "now", "validationLoss": loss}
    store.put(saved)
    store.put_report("uid-trainer-0", report)
    assert (Key("Checkpoint", NAMESPACE, "old") in interested(store, pod)) is wakes


def test_a_config_map_of_trainers_concerns_its_job_and_has_no_report() -> None:
    store = world()
    config = thing("ConfigMap", "job-config", job="job", role="trainer")
    config.pop("spec", None)
    store.put(config)
    assert Key("TrainingJob", NAMESPACE, "job") in interested(store, config)


@pytest.mark.parametrize(
    ("newer", "looks"),
    [
        ({"status": {"phase": "Corrupt"}}, True),
        ({"status": {"phase": "Complete", "inUseBy": [{"kind": "TrainingJob", "name": "next"}]}}, True),
        ({"spec": {"source": {}, "pinned": True}}, True),
        ({"status": {"phase": "Complete"}}, False),
        ({"status": {"phase": "Deleting"}, "labels": {"stoker.dev/expired": "true"}}, False),
    ],
    ids=["corrupt", "used", "pinned", "counts", "given up"],
)
def test_a_save_that_waits_for_newer_ones_looks_again_when_one_counts_no_more(
    newer: dict[str, Any], looks: bool
) -> None:
    store, spec = world(), {"source": {"save": {"jobRef": {"name": "job"}}}}
    for name, status in (("waits", {"phase": "Complete"}), ("whole", {"phase": "Complete", "verifiedAt": "now"})):
        store.put({**thing("Checkpoint", name, spec, job="job", job_uid="uid-job"), "status": status})
    changed = thing("Checkpoint", "newer", newer.get("spec", spec), job="job", job_uid="uid-job")
    changed["metadata"]["labels"].update(newer.get("labels", {}))
    changed["status"] = newer.get("status", {"phase": "Complete"})
    store.put(changed)
    woken = {key.name for key in interested(store, changed) if key.kind == "Checkpoint"}
    assert woken == ({"newer", "waits"} if looks else {"newer"})


def test_moving_figures_concern_the_job_alone() -> None:
    before = thing("TrainingJob", "job", {"a": 1})
    before["status"] = {"phase": "Running", "progress": {"step": 1}, "message": ""}
    after = {**before, "metadata": {**before["metadata"], "resourceVersion": "2"}}
    after["status"] = {"phase": "Running", "progress": {"step": 2}, "message": "saving"}
    assert only_progress(before, after)
    assert not only_progress(before, {**after, "status": {**after["status"], "phase": "Completed"}})
    assert not only_progress(before, {**after, "spec": {"a": 2}})
    assert not only_progress(thing("Pod", "p"), thing("Pod", "p"))


def test_foreign_objects_concern_no_resource() -> None:
    store = world()
    assert interested(store, thing("Pod", "foreign")) == set()


def test_a_resource_that_is_gone_has_nothing_to_see() -> None:
    assert observe(world(), Key("TrainingJob", NAMESPACE, "ghost"), 0.0) is None


def test_reports_of_the_pods_around_come_with_them() -> None:
    store = world()
    store.put_report("uid-trainer-0", {"step": 3})
    seen = observe(store, Key("TrainingJob", NAMESPACE, "job"), 0.0)
    assert seen is not None
    assert seen.reports == {"uid-trainer-0": {"step": 3}}


def test_references_are_found_wherever_they_stand() -> None:
    found = thing(
        "TrainingJob",
        "job",
        {
            "workers": {
                "env": [{"valueFrom": {"secretKeyRef": {"name": "s1", "key": "k"}}}],
                "envFrom": [{"configMapRef": {"name": "c1"}}],
                "volumes": [{"secret": {"secretName": "s2"}}, {"persistentVolumeClaim": {"claimName": "p1"}}],
            },
            "checkpoint": {"storage": {"claimName": "p2"}},
            "model": {"uri": "pvc://p3/models/one"},
        },
    )
    assert {(key.kind, key.name) for key in references(found)} == {
        ("Secret", "s1"),
        ("Secret", "s2"),
        ("ConfigMap", "c1"),
        ("PersistentVolumeClaim", "p1"),
        ("PersistentVolumeClaim", "p2"),
        ("PersistentVolumeClaim", "p3"),
    }
