"""Labels of Stoker's own that users give to their objects, or take from ours: they mislead no decision."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from stoker.operator.domain.labels import JOB, JOB_UID
from stoker.operator.domain.placement.node_capacity import pinned_node, pod_use
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.queue.reading import read_queue
from stoker.operator.domain.settings import Settings
from stoker.operator.domain.unsupported import unsupported
from testing.operator.ready_node import ready_node
from testing.operator.serving_world import Serving
from testing.operator.training_world import JOB as RUN
from testing.operator.training_world import Run


def copy_of(found: Object, name: str, **labels: str) -> Object:
    """What a user gets who reads an object, gives it another name and applies it: its labels, but no owner."""
    metadata = {"name": name, "namespace": "default", "labels": {**found["metadata"]["labels"], **labels}}
    return {**copy.deepcopy(found), "metadata": metadata}


def trainers(run: Run) -> list[str]:
    uid = run.job["metadata"]["uid"]
    owned = (pod for pod in run.cluster.pods("trainer") if pod["metadata"].get("ownerReferences"))
    return [pod["metadata"]["name"] for pod in owned if pod["metadata"]["ownerReferences"][0]["uid"] == uid]


@pytest.mark.parametrize("labels", [{}, {"stoker.dev/node-rank": "first"}, {"stoker.dev/attempt": "7"}], ids=str)
def test_a_copy_of_a_trainers_pod_is_no_part_of_the_gang(labels: dict[str, str]) -> None:
    run = Run()
    run.start()
    run.train(20, (run.save(10),))
    theirs = run.cluster.add(copy_of(run.gang[1], "debug", **labels))
    run.cluster.run(theirs)
    assert run.cluster.plan(RUN).empty
    assert run.status["pods"]["running"] == 2
    run.cluster.kill(theirs)
    assert run.cluster.plan(RUN).empty, "its end is no end of an attempt"
    run.cluster.change_spec(RUN, lambda spec: spec.update(run={"suspend": True}))
    for _ in range(3):
        run.cluster.settle_once()
        for name in trainers(run):
            pod = run.cluster.objects[Key("Pod", "default", name)]
            if pod["status"]["phase"] == "Running":
                run.cluster.kill(pod)
    run.cluster.settle()
    run.answer_tasks("list", saves=[])
    assert run.status["phase"] == "Suspended"
    assert Key("Pod", "default", "debug") in run.cluster.objects, "nor does it go with one"


def test_a_copy_takes_room_like_any_pod_and_gives_its_job_no_place() -> None:
    run = Run(Settings(places_gangs=True), workers={"replicas": 2, "gpusPerPod": 4})
    run.cluster.add(ready_node("n0", 4))
    run.cluster.settle()
    theirs = run.cluster.add(copy_of(run.gang[0], "debug"))
    theirs["spec"] = {**theirs["spec"], "nodeName": "n0", "schedulingGates": []}
    jobs, pods = [run.job], run.cluster.of_kind("Pod")
    waiting, holdings = read_queue(jobs, pods, pod_use, datetime(2026, 1, 1, tzinfo=UTC))
    assert ([found.name for found in waiting], holdings) == (["default/run"], [])
    run.cluster.add(ready_node("n1", 4))
    run.cluster.settle()
    gang = [run.cluster.objects[Key("Pod", "default", name)] for name in trainers(run)]
    assert [pinned_node(pod) for pod in gang] == [None, None], "one of two nodes is the copy's"


def test_a_users_config_map_with_our_labels_stays() -> None:
    run = Run()
    run.start()
    own = next(
        found for found in run.cluster.of_kind("ConfigMap") if "stoker.dev/attempt" in found["metadata"]["labels"]
    )
    run.cluster.add(copy_of(own, "notes", **{"stoker.dev/attempt": "99"}))
    run.cluster.kill(run.gang[0])
    run.next_attempt()
    assert run.attempt == 1
    assert Key("ConfigMap", "default", "notes") in run.cluster.objects


def test_an_imported_folder_with_the_labels_of_a_job_is_not_what_it_resumes() -> None:
    run = Run()
    run.start()
    uid = run.job["metadata"]["uid"]
    source = {"import": {"storage": {"claimName": "claim", "path": "elsewhere"}, "folder": "step-00000500.abcdef01"}}
    run.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "Checkpoint",
            "metadata": {"name": "foreign", "labels": {JOB: "run", JOB_UID: uid}},
            "spec": {"source": source, "deletionPolicy": "Retain"},
        }
    )
    run.cluster.settle()
    run.answer_tasks("import", step=500, digest="d", metrics={})
    foreign = run.cluster.objects[Key("Checkpoint", "default", "foreign")]
    assert foreign["status"]["phase"] == "Complete"
    run.train(20, (run.save(10),))
    assert run.status["newestVerifiedCheckpoint"]["step"] == 10
    run.cluster.kill(run.gang[0])
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["step"] == 10


def test_labels_that_are_changed_on_our_own_pods_cost_an_attempt_at_most() -> None:
    run = Run()
    run.start()
    run.gang[1]["metadata"]["labels"]["stoker.dev/node-rank"] = "second"
    run.cluster._touch(run.gang[1])
    run.cluster.settle()
    assert run.status["phase"] == "Running"
    moved = run.gang[1]
    moved["metadata"]["labels"]["stoker.dev/attempt"] = "5"
    run.cluster._touch(moved)
    run.next_attempt()
    assert run.attempt == 1
    assert run.status["phase"] in {"Starting", "Running"}
    assert moved["metadata"]["name"] not in trainers(run), "and the pod that was its is gone"


def test_a_copy_of_a_router_keeps_no_drain_waiting() -> None:
    serving = Serving()
    serving.checkpoint(5)
    serving.rest()
    router = serving.cluster.pods("router")[0]
    theirs = serving.cluster.add(copy_of(router, "debug"))
    serving.cluster.run(theirs)
    engine = serving.cluster.add(copy_of(serving.engines()[0], "engine-debug", **{"stoker.dev/replica-pods": "many"}))
    serving.cluster.run(engine)
    serving.cluster.settle()
    assert (serving.status["router"]["ready"], serving.pool_status["readyReplicas"]) == (1, 1)
    assert not [backend for backend in serving.snapshot()["backends"] if "debug" in json.dumps(backend)]


# What a template may carry

TEMPLATES: list[Any] = [
    (
        {"metadata": {"labels": {"stoker.dev/draining": "true"}}},
        ".metadata.labels stoker.dev/draining is set by Stoker",
    ),
    (
        {"metadata": {"annotations": {"stoker.dev/placed-at": "now"}}},
        ".metadata.annotations stoker.dev/placed-at is set",
    ),
    ({"metadata": {"ownerReferences": []}}, ".metadata.ownerReferences is set by Stoker; allowed: labels, annotations"),
    ({"labels": {"a": "b"}}, ".labels is no part of a pod's template; allowed: metadata, spec"),
    ({"spec": "x"}, ".spec 'x' is no object"),
    ({"spec": {"containers": None}}, ".spec.containers needs a list of objects with a name"),
    ({"spec": {"volumes": [{"emptyDir": {}}]}}, ".spec.volumes needs a list of objects with a name"),
    ({"spec": {"restartPolicy": "Always"}}, ".spec.restartPolicy Always is not allowed"),
]
PLACES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "TrainingJob": ("spec.workers.podTemplate", lambda template: {"workers": {"podTemplate": template}}),
    "InferenceDeployment": ("spec.pools[0].podTemplate", lambda template: {"pools": [{"podTemplate": template}]}),
    "Checkpoint": ("spec.task.podTemplate", lambda template: {"task": {"podTemplate": template}}),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(("template", "text"), TEMPLATES, ids=[text.split()[0] for _, text in TEMPLATES])
def test_a_template_that_would_mislead_is_refused_by_name(kind: str, template: dict[str, Any], text: str) -> None:
    path, spec = PLACES[kind]
    lines = unsupported(kind, spec(template))
    assert len(lines) == 1
    assert lines[0].startswith(f"{path}{text}")


def test_kueues_labels_of_single_pods_are_refused_for_a_gang_alone() -> None:
    template = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}}
    assert unsupported("TrainingJob", {"workers": {"podTemplate": template}}) == [
        "spec.workers.podTemplate.metadata.labels kueue.x-k8s.io/queue-name splits the gang: "
        "use scheduling.backend kueue with queueName"
    ]
    assert unsupported("InferenceDeployment", {"pools": [{"podTemplate": template}]}) == []


def test_a_template_that_was_accepted_before_still_changes_no_label_of_ours() -> None:
    labels = {"stoker.dev/task": "list", "app.kubernetes.io/managed-by": "helm", "team": "a"}
    run = Run()
    run.cluster.change_spec(RUN, lambda spec: spec["workers"].update(podTemplate={"metadata": {"labels": labels}}))
    run.job["status"] = {"acceptedSpec": copy.deepcopy(run.job["spec"])}
    run.start()
    found = run.gang[0]["metadata"]["labels"]
    assert (found.get("stoker.dev/task"), found["app.kubernetes.io/managed-by"], found["team"]) == (
        None,
        "stoker-operator",
        "a",
    )


def test_a_job_whose_template_is_refused_stalls_and_names_it() -> None:
    run = Run(workers={"replicas": 2, "podTemplate": {"metadata": {"labels": {"stoker.dev/role": "engine"}}}})
    run.cluster.settle()
    assert "stoker.dev/role is set by Stoker" in run.status["message"]
    assert not run.cluster.pods("trainer")
