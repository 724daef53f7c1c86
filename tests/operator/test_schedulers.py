"""Gangs that another scheduler takes: which one, what their pods say to it, and what happens when it evicts them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.admission.admission import Admission
from stoker.operator.admission.status_cause import InvalidObject
from stoker.operator.cluster.interface import NotFound
from stoker.operator.cluster.kube.kube_cluster import KubeCluster
from stoker.operator.domain.plan import Object
from stoker.operator.domain.schedulers import Installed, Missing, Wanted, choose
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.execute import PlanExecutor
from stoker.operator.loop.store import Store
from stoker.operator.service.discovery import discover
from stoker.pod.causes import Cause
from testing.operator.fakes import FakeClock
from testing.operator.training_world import JOB, Run

ROOT = Path(__file__).parents[2]
KUEUE, VOLCANO = Installed(kueue=True), Installed(volcano=True)
BOTH, NATIVE = Installed(kueue=True, volcano=True), Installed(pod_groups="scheduling.k8s.io/v1alpha2")
LEVELS = [
    {"key": "clique", "mode": "Required"},
    {"key": "rack", "mode": "Preferred"},
    {"key": "zone", "mode": "Required"},
]


@pytest.mark.parametrize(
    ("wanted", "queue", "installed", "together", "chosen"),
    [
        ("stoker", None, BOTH, True, "stoker"),
        ("auto", None, Installed(), True, "stoker"),
        ("auto", "team", BOTH, True, "kueue"),
        ("auto", None, KUEUE, True, "stoker"),
        ("auto", None, BOTH, True, "volcano"),
        ("auto", "team", VOLCANO, True, "volcano"),
        ("kueue", "team", KUEUE, False, "kueue"),
        ("volcano", None, VOLCANO, False, "volcano"),
        ("stoker", None, NATIVE, False, "kubernetes"),
        ("auto", None, NATIVE, False, "kubernetes"),
        ("stoker", None, NATIVE, True, "stoker"),
    ],
)
def test_the_scheduler_follows_from_the_job_and_from_what_the_cluster_has(
    wanted: Wanted, queue: str | None, installed: Installed, together: bool, chosen: str
) -> None:
    assert choose(wanted, queue, installed, kept_together=together) == chosen


@given(
    st.sampled_from(["auto", "stoker", "kueue", "volcano"]),
    st.sampled_from([None, "team"]),
    st.builds(Installed, kueue=st.booleans(), volcano=st.booleans(), pod_groups=st.sampled_from(["", "a/v1"])),
    st.booleans(),
)
def test_an_absent_scheduler_is_never_chosen_and_a_queue_is_never_ignored(
    wanted: Wanted, queue: str | None, installed: Installed, together: bool
) -> None:
    found = choose(wanted, queue, installed, kept_together=together)
    if isinstance(found, Missing):
        assert wanted in found.message or str(queue) in found.message
        return
    assert found in ("stoker", "kueue", "volcano", "kubernetes")
    assert found != "kueue" or installed.kueue
    assert found != "volcano" or installed.volcano
    assert found != "kubernetes" or installed.pod_groups
    assert wanted in ("auto", found) or (wanted, found) == ("stoker", "kubernetes")
    assert queue is None or found in ("kueue", "volcano")


# Discovery


class Answers:
    """An API server with some groups."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, list[str]()

    async def request(self, _method: str, path: str, *, resource: str) -> Mapping[str, Any]:
        assert resource == "apis"
        self.asked.append(path)
        if path not in self.answers:
            raise NotFound(path)
        return dict(self.answers[path])


def groups(**versions: list[str]) -> dict[str, Any]:
    return {"groups": [{"name": name, "versions": [{"version": v} for v in found]} for name, found in versions.items()]}


def test_schedulers_are_found_by_the_groups_of_the_api_server_and_absent_ones_cost_one_request() -> None:
    plain = Answers(**{"/apis": groups(**{"apps": ["v1"], "scheduling.k8s.io": ["v1"]})})
    assert asyncio.run(discover(plain)) == Installed()  # type: ignore[arg-type]
    assert plain.asked == ["/apis"]
    found = groups(
        **{
            "kueue.x-k8s.io": ["v1beta2", "v1beta1"],
            "scheduling.volcano.sh": ["v1beta1"],
            "scheduling.k8s.io": ["v1", "v1alpha2", "v1alpha1"],
            "resource.k8s.io": ["v1", "v1beta2"],
        }
    )
    all_of_them = Answers(
        **{
            "/apis": found,
            "/apis/scheduling.k8s.io/v1alpha1": {"resources": [{"name": "podgroups"}]},
            "/apis/scheduling.k8s.io/v1alpha2": {"resources": [{"name": "workloads"}, {"name": "podgroups"}]},
        }
    )
    native = "scheduling.k8s.io/v1alpha2"
    devices = "resource.k8s.io/v1"
    whole = Installed(kueue=True, volcano=True, pod_groups=native, devices=devices)
    assert asyncio.run(discover(all_of_them)) == whole  # type: ignore[arg-type]
    early = {"scheduling.volcano.sh": ["v1alpha1"], "scheduling.k8s.io": ["v1alpha1"], "resource.k8s.io": ["v1alpha3"]}
    assert asyncio.run(discover(Answers(**{"/apis": groups(**early)}))) == Installed()  # type: ignore[arg-type]
    beta = Answers(**{"/apis": groups(**{"resource.k8s.io": ["v1beta1", "v1beta2"]})})
    assert asyncio.run(discover(beta)) == Installed(devices="resource.k8s.io/v1beta2")  # type: ignore[arg-type]


# Pods


def gang(installed: Installed, *, backend: str = "auto", places: bool = False, **spec: Any) -> Run:
    scheduling = {"backend": backend, **spec.pop("scheduling", {})}
    run = Run(Settings(installed=installed, places_gangs=places), scheduling=scheduling, **spec)
    run.cluster.settle()
    return run


def pod_groups(run: Run) -> list[Object]:
    return run.cluster.of_kind("PodGroup")


def test_kueue_gets_a_group_of_plain_pods_with_its_queue_size_and_topology() -> None:
    run = gang(
        KUEUE,
        places=True,
        scheduling={"queueName": "team", "topology": LEVELS},
        workers={"replicas": 4, "ranksPerPod": 1},
        parallelism={"tensor": 2},
    )
    assert run.status["attempt"]["scheduler"] == "kueue"
    name = run.gang[0]["metadata"]["name"].rsplit("-", 1)[0]
    for rank, pod in enumerate(run.gang):
        labels = {key: value for key, value in pod["metadata"]["labels"].items() if "kueue" in key}
        assert labels == {
            "kueue.x-k8s.io/queue-name": "team",
            "kueue.x-k8s.io/pod-group-name": name,
            "kueue.x-k8s.io/pod-group-pod-index": str(rank),
        }
        assert pod["metadata"]["annotations"] == {
            "kueue.x-k8s.io/pod-group-total-count": "4",
            "kueue.x-k8s.io/retriable-in-group": "false",
            "kueue.x-k8s.io/podset-slice-required-topology": "clique",
            "kueue.x-k8s.io/podset-slice-size": "2",
            "kueue.x-k8s.io/podset-required-topology": "zone",
        }
        assert "schedulingGates" not in pod["spec"], "Kueue adds its own gate"
    condition = next(found for found in run.status["conditions"] if found["type"] == "PlacementLimited")
    assert condition["message"] == "kueue is not told these levels of scheduling.topology: rack"
    assert pod_groups(run) == []


def test_volcano_gets_a_pod_group_before_the_pods_that_name_it() -> None:
    run = gang(VOLCANO, scheduling={"queueName": "team"}, workers={"replicas": 2, "priorityClassName": "high"})
    (group,) = pod_groups(run)
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"] == {"minMember": 2, "queue": "team", "priorityClassName": "high"}
    assert group["metadata"]["ownerReferences"][0]["uid"] == run.job["metadata"]["uid"]
    for pod in run.gang:
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": group["metadata"]["name"]}


@pytest.mark.parametrize(("installed", "kept"), [(VOLCANO, 1), (KUEUE, 2)])
def test_a_pod_that_succeeded_is_no_member_of_the_next_gang_for_volcano(installed: Installed, kept: int) -> None:
    """Volcano counts it as a running pod of the same PodGroup; other schedulers leave it out, and its log stays."""
    run = gang(installed, scheduling={"queueName": "team"})
    for pod in run.gang:
        run.cluster.run(pod)
    first, second = run.gang
    run.cluster.end(second, Cause.COMPLETED, step=100)
    run.cluster.kill(first)
    run.next_attempt()
    ends = [pod["status"]["phase"] for pod in run.cluster.of_kind("Pod") if "-a0-" in pod["metadata"]["name"]]
    assert sorted(ends) == ["Failed", "Succeeded"][:kept]


def test_kubernetes_own_pod_group_keeps_a_gang_together_where_no_node_is_seen() -> None:
    run = gang(NATIVE, backend="stoker")
    (group,) = pod_groups(run)
    assert (group["apiVersion"], group["spec"]) == (
        "scheduling.k8s.io/v1alpha2",
        {"schedulingPolicy": {"gang": {"minCount": 2}}},
    )
    reference = {"podGroupName": group["metadata"]["name"]}
    assert [pod["spec"]["schedulingGroup"] for pod in run.gang] == [reference, reference]
    single = gang(NATIVE, backend="stoker", workers={"replicas": 1})
    assert pod_groups(single) == []
    assert "schedulingGroup" not in single.gang[0]["spec"]


def test_a_job_waits_for_a_scheduler_that_is_not_there_and_goes_on_when_it_is() -> None:
    run = gang(Installed(), backend="kueue", scheduling={"queueName": "team"})
    assert run.status["message"] == "spec.scheduling.backend kueue: the API server knows no kueue.x-k8s.io"
    assert "attempt" not in run.status
    run.cluster.settings = Settings(installed=KUEUE)
    run.start()
    assert run.status["phase"] == "Running"


@pytest.mark.parametrize("scheduling", [{"backend": "kueue"}, {"queueName": "team"}])
def test_a_queue_is_needed_by_kueue_and_refused_without_a_scheduler_that_has_queues(scheduling: Object) -> None:
    admission = Admission.from_folder(ROOT / "crds")
    admission.admit(Run(scheduling={"backend": "kueue", "queueName": "team"}).job)
    with pytest.raises(InvalidObject, match="queueName is needed with backend kueue, and unknown to stoker"):
        admission.admit(Run(scheduling=scheduling).job)


class Requests:
    """A connection that records what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    async def request(self, method: str, path: str, **_: Any) -> Object:
        self.sent.append((method, path))
        return {}


def test_a_pod_group_is_applied_in_the_version_that_it_names_and_is_not_kept_in_memory() -> None:
    requests = Requests()
    cluster = KubeCluster(requests, None)  # type: ignore[arg-type]
    store = Store()
    executor = PlanExecutor(cluster, store, FakeClock())
    groups_ = [pod_groups(gang(found, backend="auto"))[0] for found in (VOLCANO, NATIVE)]
    for group in groups_:
        asyncio.run(executor.apply(group))
    name = groups_[0]["metadata"]["name"]
    root = f"namespaces/default/podgroups/{name}"
    assert requests.sent == [
        ("PATCH", f"/apis/scheduling.volcano.sh/v1beta1/{root}"),
        ("PATCH", f"/apis/scheduling.k8s.io/v1alpha2/{root}"),
    ]
    assert store.counts() == {}


# Eviction, and a cluster that changes


def held(run: Run) -> None:
    """What Kueue's webhook does to new pods."""
    for pod in run.gang:
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]


def test_an_eviction_saves_and_queues_a_new_group_and_suspend_leaves_none() -> None:
    run = gang(KUEUE, scheduling={"queueName": "team"})
    held(run)
    run.cluster.settle()
    assert (run.status["phase"], run.status["message"]) == ("Pending", "the gang waits for kueue, queue team")
    for pod in run.gang:
        pod["spec"].pop("schedulingGates")
    run.start()
    run.train(30, (run.save(20),))
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, step=30, saves=(run.word(20), run.word(30)))
    run.next_attempt()
    assert run.status["attempt"]["resumedFrom"]["step"] == 30
    assert run.status.get("failuresWithoutProgress", 0) == 0
    group = {pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in run.gang}
    assert len(group) == 1
    assert group.pop().endswith("-a1")
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=True))
    run.cluster.reconcile(JOB)
    assert run.cluster.calls[-1][2]["mode"] == "suspend"
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, saves=(run.word(40),))
    run.cluster.settle()
    assert run.status["phase"] == "Suspended"


def test_a_gang_that_waits_in_a_queue_is_moved_to_another() -> None:
    run = gang(KUEUE, scheduling={"queueName": "full"})
    held(run)
    run.cluster.settle()
    run.cluster.change_spec(JOB, lambda spec: spec["scheduling"].update(queueName="free"))
    run.next_attempt()
    assert run.attempt == 1
    assert {pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for pod in run.gang} == {"free"}
    assert run.status.get("failuresWithoutProgress", 0) == 0
    run.train(1)
    assert run.cluster.plan(JOB).empty


def test_an_attempt_keeps_the_scheduler_that_it_was_opened_with() -> None:
    run = Run(Settings(installed=VOLCANO), scheduling={"backend": "auto"})
    while not run.gang:
        run.cluster.reconcile(JOB)
    run.cluster.vanish(run.gang[1])
    run.cluster.settings = Settings()
    run.job["status"]["attempt"].pop("phase", None)
    run.cluster.settle()
    assert [pod["spec"].get("schedulerName") for pod in run.gang] == ["volcano", "volcano"]
    for pod in run.gang:
        run.cluster.run(pod)
    run.cluster.kill(run.gang[0])
    run.next_attempt()
    assert [pod["spec"].get("schedulerName") for pod in run.gang] == [None, None]
