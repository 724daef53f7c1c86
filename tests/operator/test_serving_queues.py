"""Replicas that another scheduler starts: which one, what their pods say to it, how they wait, are evicted, updated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.operator.admission.admission import Admission
from stoker.operator.admission.status_cause import InvalidObject
from stoker.operator.api.gang_scheduling import GangScheduling, PoolScheduling
from stoker.operator.api.inferencedeployment import InferenceDeploymentSpec
from stoker.operator.api.trainingjob import Scheduling
from stoker.operator.domain.plan import Object
from stoker.operator.domain.schedulers import Installed
from stoker.operator.domain.settings import Settings
from stoker.operator.render.names import digest_of
from testing.operator.ready_node import ready_node
from testing.operator.serving_world import CHAT, POOL, Serving, condition_of, disturb, label_of
from testing.operator.small_kueue import GATE, GROUP, SmallKueue

ROOT = Path(__file__).parents[2]
KUEUE, VOLCANO = Installed(kueue=True), Installed(volcano=True)
NATIVE = Installed(pod_groups="scheduling.k8s.io/v1alpha2")
ALL = Installed(kueue=True, volcano=True, pod_groups="scheduling.k8s.io/v1alpha2")
TEAM = {"backend": "kueue", "queueName": "team"}
WIDE: dict[str, Any] = {"podsPerReplica": 2, "gpusPerPod": 4, "parallelism": {"tensor": 8}}
LEVELS = [
    {"key": "clique", "mode": "Required"},
    {"key": "rack", "mode": "Preferred"},
    {"key": "zone", "mode": "Required"},
]


def world(installed: Installed = KUEUE, *, places: bool = False, scheduling: Any = None, **pool: Any) -> Serving:
    wanted = {"scheduling": scheduling} if scheduling is not None else {}
    rollout = pool.pop("rollout", {})
    serving = Serving(model={"uri": "file:///m"}, pools=[{"name": "main", **pool, **wanted}], rollout=rollout)
    serving.cluster.settings = Settings(places_gangs=places, installed=installed)
    return serving


def make(serving: Serving) -> Serving:
    """Run passes until the pods of all replicas are there."""
    for _ in range(5):
        serving.cluster.settle_once()
    return serving


def pass_time(serving: Serving, kueue: SmallKueue, rounds: int = 8, seconds: float = 2) -> None:
    """Run rounds of the operator, Kueue, nodes and programs."""
    for _ in range(rounds):
        serving.cluster.settle_once()
        kueue.work()
        serving.live()
        serving.cluster.advance(seconds)
    serving.cluster.settle_once()


def in_quota(quota: int, **pool: Any) -> tuple[Serving, SmallKueue]:
    """A deployment in a queue of Kueue, some time after it was made."""
    serving = world(scheduling=TEAM, **pool)
    kueue = SmallKueue(serving.cluster, quota)
    pass_time(serving, kueue)
    return serving, kueue


def ready_names(serving: Serving) -> set[str]:
    return {pod["metadata"]["name"] for pod in serving.engines() if pod["status"]["phase"] == "Running"}


def groups_of(serving: Serving) -> dict[str, set[str]]:
    """Groups by replica, as the pods name them."""
    found: dict[str, set[str]] = {}
    for pod in serving.engines():
        name = pod["metadata"]["labels"].get("stoker.dev/replica", pod["metadata"]["name"])
        found.setdefault(name, set()).add(pod["metadata"]["labels"][GROUP])
    return found


# The API


def test_a_pool_has_the_choice_of_schedulers_that_a_job_has() -> None:
    assert set(PoolScheduling.model_fields) == set(Scheduling.model_fields)
    for name, field in GangScheduling.model_fields.items():
        for kind in (Scheduling, PoolScheduling):
            found = kind.model_fields[name]
            assert (found.annotation, found.default) == (field.annotation, field.default)


@pytest.mark.parametrize(
    ("scheduling", "backend"), [({"backend": "kueue"}, "kueue"), ({"queueName": "team"}, "stoker")], ids=str
)
def test_a_pool_without_a_queue_that_it_needs_or_with_one_that_has_no_effect_is_refused(
    scheduling: Object, backend: str
) -> None:
    admission = Admission.from_folder(ROOT / "crds")
    admission.admit(world(scheduling=TEAM).cluster.objects[CHAT])
    text = f"queueName is needed with backend kueue, and unknown to stoker, got backend {backend}"
    with pytest.raises(InvalidObject, match=text):
        admission.admit(world(scheduling=scheduling).cluster.objects[CHAT])


def test_a_template_that_was_stored_before_there_was_a_choice_can_be_written_again() -> None:
    """An API server reads it with the default of the new field, so the field is no change."""
    serving = make(world(scheduling={"topology": [{"key": "rack"}]}))
    live = serving.cluster.objects[POOL]
    live["metadata"].pop("creationTimestamp")
    stored = {**live, "spec": {**live["spec"], "revisions": [_older(found) for found in live["spec"]["revisions"]]}}
    Admission.from_folder(ROOT / "crds").admit(live, stored)


def _older(revision: Object) -> Object:
    template = revision["template"]
    scheduling = {name: value for name, value in template["scheduling"].items() if name != "backend"}
    return {**revision, "template": {**template, "scheduling": scheduling}}


# Pods that are as they were


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("scheduling", [None, {}, {"topology": [{"key": "rack", "mode": "Required"}]}], ids=str)
def test_pools_that_name_no_backend_have_the_pods_that_they_had_whatever_is_installed(
    scheduling: Any, places: bool
) -> None:
    def pods(installed: Installed, given: Any) -> list[Object]:
        serving = make(world(installed, places=places, scheduling=given, **WIDE))
        return [
            {"name": pod["metadata"]["name"], "labels": pod["metadata"]["labels"], "spec": pod["spec"]}
            for pod in serving.engines()
        ]

    plain = pods(Installed(), scheduling)
    assert len(plain) == 2
    assert pods(ALL, scheduling) == plain
    if scheduling is not None:
        assert pods(ALL, {**scheduling, "backend": "stoker"}) == plain, "the default, written down, is no new revision"
    assert not any("stoker.dev/scheduler" in pod["labels"] for pod in plain)


def test_a_revision_has_the_name_that_it_had_before_there_were_backends() -> None:
    serving = make(world(scheduling={"topology": [{"key": "rack"}]}))
    wire = InferenceDeploymentSpec.model_validate(serving.cluster.objects[CHAT]["spec"]).to_wire()
    (pool,) = wire["pools"]
    assert pool["scheduling"].pop("backend") == "stoker"
    for name in ("replicas", "maxSurge", "maxUnavailable"):
        del pool[name]
    intent = {"model": wire["model"], "engine": wire["engine"], "pools": [pool], "checkpoint": None}
    assert [found["name"] for found in serving.status["revisions"]] == [f"r{digest_of(intent)}"]


def test_an_upgrade_to_a_version_that_knows_backends_replaces_no_engine() -> None:
    serving = world(ALL, scheduling={"topology": [{"key": "rack"}]}, **WIDE)
    serving.rest(8)
    before = {pod["metadata"]["uid"] for pod in serving.engines()}
    live = serving.cluster.objects[POOL]
    live["spec"]["revisions"] = [_older(found) for found in live["spec"]["revisions"]]
    for pool in serving.cluster.objects[CHAT]["status"]["acceptedSpec"]["pools"]:
        pool["scheduling"].pop("backend", None)
    serving.rest(8)
    assert {pod["metadata"]["uid"] for pod in serving.engines()} == before
    assert len(serving.status["revisions"]) == 1


# What pods say to their scheduler


def test_kueue_gets_each_replica_as_a_group_with_queue_size_and_topology() -> None:
    serving = make(world(places=True, scheduling={**TEAM, "topology": LEVELS}, replicas=2, **WIDE))
    pods = serving.engines()
    assert len(pods) == 4
    assert [len(names) for names in groups_of(serving).values()] == [1, 1]
    assert len(set.union(*groups_of(serving).values())) == 2
    for pod in pods:
        labels = pod["metadata"]["labels"]
        assert labels["kueue.x-k8s.io/queue-name"] == "team"
        assert labels["kueue.x-k8s.io/pod-group-pod-index"] == label_of(pod, "node-rank")
        assert (label_of(pod, "scheduler"), label_of(pod, "pod-group")) == ("kueue", labels[GROUP])
        assert pod["metadata"]["annotations"] == {
            "kueue.x-k8s.io/pod-group-total-count": "2",
            "kueue.x-k8s.io/retriable-in-group": "false",
            "kueue.x-k8s.io/podset-slice-required-topology": "clique",
            "kueue.x-k8s.io/podset-slice-size": "2",
            "kueue.x-k8s.io/podset-required-topology": "zone",
        }
        assert "schedulingGates" not in pod["spec"], "Kueue adds its own gate"
    limited = condition_of(serving.pool_status, "PlacementLimited")
    assert limited["message"] == "kueue is not told these levels of scheduling.topology: rack"


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize(
    ("backend", "installed", "api", "spec"),
    [
        ("volcano", VOLCANO, "scheduling.volcano.sh/v1beta1", {"minMember": 2, "queue": "team"}),
        ("auto", VOLCANO, "scheduling.volcano.sh/v1beta1", {"minMember": 2, "queue": "team"}),
    ],
)
def test_volcano_gets_a_pod_group_before_the_gates_of_its_pods_open(
    backend: str, installed: Installed, api: str, spec: Object, places: bool
) -> None:
    serving = world(installed, places=places, scheduling={"backend": backend, "queueName": "team"}, **WIDE)
    if places:
        serving.cluster.add(ready_node("n0", 0))
    while not serving.engines():
        assert serving.cluster.of_kind("PodGroup") == []
        serving.cluster.settle_once()
    assert all(pod["spec"]["schedulingGates"] for pod in serving.engines())
    plan = serving.cluster.plan(POOL)
    (group,) = plan.apply
    assert {patch.ref.uid for patch in plan.patch} == {pod["metadata"]["uid"] for pod in serving.engines()}
    assert (group["apiVersion"], group["spec"]) == (api, spec)
    leader = serving.engines()[0]
    assert [owner["uid"] for owner in group["metadata"]["ownerReferences"]] == [leader["metadata"]["uid"]]
    serving.cluster.settle_once()
    for pod in serving.engines():
        assert (pod["spec"]["schedulerName"], pod["spec"].get("schedulingGates")) == ("volcano", None)
        assert pod["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": group["metadata"]["name"]}
        assert "nodeAffinity" not in pod["spec"].get("affinity", {}), "Volcano chooses the nodes"
    serving.rest(4)
    assert serving.status["ready"] == "1/1"
    assert serving.cluster.plan(POOL).empty


def test_a_pod_group_goes_with_the_leader_of_its_replica() -> None:
    serving = world(VOLCANO, scheduling={"backend": "volcano"}, **WIDE)
    serving.rest(6)
    (first,) = serving.cluster.of_kind("PodGroup")
    serving.cluster.kill(serving.engines()[1])
    serving.rest(12)
    (second,) = serving.cluster.of_kind("PodGroup")
    assert second["metadata"]["name"] != first["metadata"]["name"]
    assert serving.status["ready"] == "1/1"


def test_kubernetes_own_pod_group_is_used_with_auto_where_no_node_is_seen() -> None:
    serving = make(world(NATIVE, scheduling={"backend": "auto"}, **WIDE))
    (group,) = serving.cluster.of_kind("PodGroup")
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}
    reference = {"podGroupName": group["metadata"]["name"]}
    assert [pod["spec"]["schedulingGroup"] for pod in serving.engines()] == [reference, reference]
    for other in (world(NATIVE, scheduling={"backend": "auto"}), world(NATIVE, scheduling={}, **WIDE)):
        make(other)
        assert other.cluster.of_kind("PodGroup") == []


def test_a_replica_waits_for_a_scheduler_that_is_not_there_while_the_others_serve() -> None:
    serving = world(Installed(), replicas=2)
    serving.rest(6)
    old = ready_names(serving)
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(scheduling=TEAM))
    serving.rest(6)
    text = "spec.pools[main].scheduling.backend kueue: the API server knows no kueue.x-k8s.io"
    assert text in serving.pool_status["message"]
    assert text in serving.status["message"]
    assert condition_of(serving.pool_status, "Ready")["reason"] == "SchedulerMissing"
    assert ready_names(serving) == old
    assert serving.pool_status.get("failures", 0) == 0
    serving.cluster.settings = Settings(installed=KUEUE)
    kueue = SmallKueue(serving.cluster, 8)
    pass_time(serving, kueue, 20)
    assert serving.status["phase"] == "Serving"
    assert not old & ready_names(serving)


def test_a_replica_keeps_the_scheduler_that_it_was_made_for() -> None:
    serving = world(VOLCANO, scheduling={"backend": "auto"}, **WIDE)
    while not serving.engines():
        serving.cluster.settle_once()
    first, second = serving.engines()
    serving.cluster.vanish(second)
    serving.cluster.settings = Settings()
    serving.rest(6)
    assert [pod["spec"].get("schedulerName") for pod in serving.engines()] == ["volcano", "volcano"]
    assert len({label_of(pod, "pod-group") for pod in serving.engines()}) == 1
    assert serving.engines()[0]["metadata"]["uid"] == first["metadata"]["uid"]
    serving.cluster.kill(first)
    serving.rest(12)
    assert [pod["spec"].get("schedulerName") for pod in serving.engines()] == [None, None]


def test_a_replica_whose_pods_are_of_two_groups_is_made_anew() -> None:
    """A leader that was deposed may still make a pod while its successor makes the others."""
    serving = make(world(scheduling=TEAM, **WIDE))
    SmallKueue(serving.cluster, 0).hold()
    serving.engines()[1]["metadata"]["labels"] |= {"stoker.dev/pod-group": "other", GROUP: "other"}
    before = {pod["metadata"]["uid"] for pod in serving.engines()}
    serving.cluster.settle_once()
    serving.cluster.collect()
    make(serving)
    assert "PodGroupSplit" in serving.cluster.events
    assert not before & {pod["metadata"]["uid"] for pod in serving.engines()}
    assert [len(names) for names in groups_of(serving).values()] == [1]


# Queues


def test_a_replica_in_a_queue_is_no_failure_and_the_pool_says_what_it_waits_for() -> None:
    serving, kueue = in_quota(2, replicas=2, **WIDE)
    status = serving.pool_status
    waiting = next(pod for pod in serving.engines() if pod["spec"].get("schedulingGates"))
    text = f"1 of 2 replicas are ready: replica {label_of(waiting, 'replica')} waits for kueue, queue team"
    assert (status["message"], status["queuedReplicas"], status["readyReplicas"]) == (text, 1, 1)
    assert condition_of(status, "Ready")["reason"] == "Queued"
    assert not condition_of(status, "Stalled")
    assert (serving.status["phase"], serving.status["message"]) == ("Starting", text)
    assert status.get("failures", 0) == 0
    before = {pod["metadata"]["uid"] for pod in serving.engines()}
    pass_time(serving, kueue, 3, seconds=3600)
    assert {pod["metadata"]["uid"] for pod in serving.engines()} == before, "it keeps its place in the queue"
    kueue.quota = 4
    pass_time(serving, kueue)
    assert (serving.status["ready"], serving.pool_status["queuedReplicas"]) == ("2/2", 0)
    assert {pod["metadata"]["uid"] for pod in serving.engines()} == before


def test_what_volcano_says_of_a_replica_that_it_holds_back_is_told() -> None:
    serving = make(world(VOLCANO, scheduling={"backend": "volcano", "queueName": "team"}))
    serving.cluster.settle_once()
    (pod,) = serving.engines()
    pod["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "queue is full"}
    ]
    serving.cluster._touch(pod)
    serving.cluster.settle_once()
    line = f"replica {pod['metadata']['name']} waits for volcano, queue team: Unschedulable: queue is full"
    assert serving.pool_status["message"] == f"0 of 1 replicas are ready: {line}"


def test_an_evicted_replica_is_replaced_whole_and_waits_as_a_new_group() -> None:
    serving, kueue = in_quota(4, replicas=2, **WIDE)
    assert serving.status["ready"] == "2/2"
    evicted, stays = kueue.admitted
    kueue.quota = 2
    kueue.evict(evicted)
    pass_time(serving, kueue)
    groups = {name for names in groups_of(serving).values() for name in names}
    assert stays in groups
    assert evicted not in groups
    assert Counter(label_of(pod, "pod-group") for pod in serving.engines()) == dict.fromkeys(groups, 2)
    assert (serving.pool_status["queuedReplicas"], serving.pool_status.get("failures", 0)) == (1, 0)
    assert "PodLost" not in serving.cluster.events
    kueue.quota = 4
    pass_time(serving, kueue)
    assert serving.status["ready"] == "2/2"


def test_scaling_down_drops_the_replica_that_waits() -> None:
    serving, kueue = in_quota(1, replicas=2)
    ready = ready_names(serving)
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=1))
    pass_time(serving, kueue)
    assert ready_names(serving) == ready
    assert (serving.status["ready"], serving.status["phase"]) == ("1/1", "Serving")


def edit(serving: Serving) -> None:
    """Ask for another revision."""
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(env=[{"name": "MORE", "value": "1"}]))


def schedule(serving: Serving, pod: Object) -> None:
    """Give a running pod the time at which it got its node."""
    at = serving.cluster.now.isoformat()
    pod["status"]["conditions"] += [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at}]


def test_an_update_whose_surge_replica_waits_neither_fails_nor_takes_an_old_replica_away() -> None:
    serving, kueue = in_quota(2, replicas=2, rollout={"progressDeadlineSeconds": 60})
    old = ready_names(serving)
    edit(serving)
    pass_time(serving, kueue, 4)
    pass_time(serving, kueue, 8, seconds=600)
    assert ready_names(serving) == old
    assert (serving.status["phase"], serving.condition("Stalled")) == ("Updating", "absent")
    assert "waits for kueue, queue team" in serving.status["message"]
    kueue.quota = 3
    serving.cluster.advance(600)
    serving.cluster.settle_once()
    kueue.work()
    for pod in serving.engines():
        if not pod["spec"].get("schedulingGates"):
            serving.cluster.run(pod, ready=False)
            scheduled = {
                "type": "PodScheduled",
                "status": "True",
                "lastTransitionTime": serving.cluster.now.isoformat(),
            }
            pod["status"]["conditions"] += [scheduled]
    serving.cluster.advance(30)
    serving.cluster.settle_once()
    assert serving.condition("Stalled") == "absent", "the time in the queue counts against no deadline"
    serving.cluster.advance(90)
    serving.cluster.settle_once()
    assert serving.condition("Stalled") == "True", "the time after it does"
    for pod in serving.engines():
        for condition in pod["status"].get("conditions", ()):
            condition["status"] = "True"
        serving.cluster._touch(pod)
    pass_time(serving, kueue, 30)
    assert (serving.status["phase"], serving.status["ready"]) == ("Serving", "2/2")
    assert not old & ready_names(serving)


def test_a_canary_whose_replica_waits_in_a_queue_goes_on_when_it_is_admitted() -> None:
    canary = {"steps": [{"percent": 50, "holdSeconds": 1}, {"percent": 100, "holdSeconds": 1}]}
    rollout = {"type": "canary", "progressDeadlineSeconds": 60, "canary": canary}
    serving, kueue = in_quota(2, replicas=2, rollout=rollout)
    old = ready_names(serving)
    edit(serving)
    pass_time(serving, kueue, 4)
    pass_time(serving, kueue, 8, seconds=600)
    assert ready_names(serving) == old
    assert serving.status["rollout"]["canary"]["phase"] == "Waiting"
    assert "waits for kueue, queue team" in serving.status["message"]
    kueue.quota = 3
    serving.cluster.settle_once()
    kueue.work()
    admitted = [pod for pod in serving.engines() if pod["metadata"]["name"] not in old and not _is_held(pod)]
    for pod in admitted:
        serving.cluster.run(pod)
        schedule(serving, pod)
    assert admitted
    serving.cluster.settle_once()
    serving.cluster.settle_once()
    assert serving.status["rollout"]["canary"]["phase"] == "Holding"


def _is_held(pod: Object) -> bool:
    return GATE in (pod["spec"].get("schedulingGates") or ())


QUEUE_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["pool", "deployment", "run", "collect", "kill engine", "scale", "queue", "evict", "quota", "edit"]
        ),
        st.integers(0, 6),
    ),
    max_size=30,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(QUEUE_EVENTS, st.sampled_from([1, 2]))
def test_in_any_order_of_evictions_and_crashes_groups_are_whole_and_new_and_the_pool_comes_to_rest(
    events: list[tuple[str, int]], size: int
) -> None:
    layout: dict[str, Any] = {"podsPerReplica": size, "parallelism": {"tensor": size}}
    serving = world(scheduling=TEAM, replicas=2, **layout)
    kueue = SmallKueue(serving.cluster, 2 * size)
    members: dict[str, set[str]] = {}
    for event, number in events:
        if event == "queue":
            kueue.work()
        elif event == "evict" and kueue.admitted and kueue.admitted[-1] in kueue.groups():
            kueue.evict(kueue.admitted[-1])
        elif event == "quota":
            kueue.quota = number
        elif event == "edit":
            edit(serving)
        else:
            kueue.hold()
            disturb(serving, event, number)
        kueue.hold()
        for pod in serving.engines():
            members.setdefault(label_of(pod, "pod-group"), set()).add(pod["metadata"]["uid"])
        assert all(len(uids) <= size for uids in members.values()), "a group takes no pod in place of one that is gone"
    kueue.quota = 40
    for _ in range(60):
        pass_time(serving, kueue, 1, seconds=30)
        if all(serving.cluster.plan(key).empty for key in (CHAT, POOL) if key in serving.cluster.objects):
            break
    wanted = serving.cluster.objects[CHAT]["spec"]["pools"][0]["replicas"]
    assert serving.status["ready"] == f"{wanted}/{wanted}"
    assert Counter(label_of(pod, "pod-group") for pod in serving.engines()) == dict.fromkeys(
        {label_of(pod, "pod-group") for pod in serving.engines()}, size
    )
    assert serving.cluster.plan(POOL).empty
