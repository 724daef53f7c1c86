"""The parts of an object that the operator keeps in memory."""

from __future__ import annotations

import json

from stoker.operator.domain.plan import Object
from stoker.operator.loop.object_pruning import pruned


def thing(kind: str, **parts: object) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": "one", "uid": "u", "resourceVersion": "1"}, **parts}


def test_our_own_resources_are_kept_whole() -> None:
    job = thing("TrainingJob", spec={"model": {"layers": [1, 2.5, None, True]}}, status={"phase": "Running"})
    assert pruned(job) == job


def test_what_configuration_and_secrets_hold_is_not_kept() -> None:
    for kind in ("ConfigMap", "Secret"):
        held = pruned(thing(kind, data={"password": "c2VjcmV0"}, stringData={"a": "secret"}, binaryData={"b": "AA=="}))
        assert held == thing(kind)


def test_of_a_pod_remain_its_place_its_gates_and_its_status() -> None:
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    gates = [{"name": "stoker.dev/placement"}]
    pod = thing(
        "Pod", spec={"nodeName": "n", "schedulingGates": gates, "containers": [{"name": "main"}]}, status=status
    )
    assert pruned(pod) == thing("Pod", spec={"nodeName": "n", "schedulingGates": gates}, status=status)


def test_the_bookkeeping_of_other_tools_goes() -> None:
    found = thing("Service")
    found["metadata"] = {**found["metadata"], "managedFields": [{}], "annotations": {"a": "b"}}
    found["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"] = "{...}"
    assert pruned(found)["metadata"] == {"name": "one", "uid": "u", "resourceVersion": "1", "annotations": {"a": "b"}}


def test_equal_short_texts_are_one_in_memory() -> None:
    first, second = (pruned(json.loads(json.dumps(thing("Service", spec={"clusterIP": "None!"})))) for _ in range(2))
    assert first["spec"]["clusterIP"] is second["spec"]["clusterIP"]
    assert next(iter(first["spec"])) is next(iter(second["spec"]))


def test_the_given_object_is_left_as_it_is() -> None:
    pod = thing("Pod", spec={"containers": []})
    before = json.dumps(pod)
    pruned(pod)
    assert json.dumps(pod) == before


def test_what_has_not_changed_stays_where_it_is() -> None:
    old = pruned(thing("TrainingJob", spec={"a": [1, {"b": 2}]}, status={"step": 1, "pinned": {"c": [3]}}))
    new = pruned(thing("TrainingJob", spec={"a": [1, {"b": 2}]}, status={"step": 2, "pinned": {"c": [3]}}), old)
    assert new["status"] == {"step": 2, "pinned": {"c": [3]}}
    assert new["spec"] is old["spec"]
    assert new["status"]["pinned"] is old["status"]["pinned"]
    assert old["status"]["step"] == 1


def test_of_a_pods_status_remains_what_it_waits_for_and_how_it_ended() -> None:
    ended = {"terminated": {"exitCode": 1, "message": "{}"}}
    status = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "hostIP": "10.1.0.1",
        "qosClass": "Burstable",
        "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": None, "lastTransitionTime": "t"}],
        "containerStatuses": [
            {"name": "main", "imageID": "sha", "state": {"running": {"startedAt": "t"}}},
            {"name": "other", "imageID": "sha", "state": ended},
        ],
    }
    held = pruned(thing("Pod", status=status))["status"]
    assert held == {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": "main", "state": {"running": {}}}, {"name": "other", "state": ended}],
    }


def test_of_a_container_remains_the_digest_of_its_image_once_for_all_pods() -> None:
    def held(number: int) -> Object:
        image_id = f"ghcr.io/a/runtime@sha256:{'0' * 60}{number}"
        found = thing("Pod", status={"containerStatuses": [{"name": "main", "imageID": image_id, "state": {}}]})
        return dict(pruned(found)["status"]["containerStatuses"][0])

    assert held(1) == {"name": "main", "imageID": f"ghcr.io/a/runtime@sha256:{'0' * 60}1", "state": {}}
    assert held(1)["imageID"] is held(1)["imageID"]


def test_of_a_node_remains_whether_it_is_heard_of_and_its_zone() -> None:
    conditions = [{"type": "Ready", "status": "Unknown", "lastHeartbeatTime": "h", "lastTransitionTime": "t"}]
    node = thing("Node", spec={"podCIDR": "x"}, status={"images": ["many"], "conditions": conditions})
    node["metadata"] |= {"annotations": {"a": "b"}, "labels": {"topology.kubernetes.io/zone": "z", "c": "d"}}
    wanted = thing("Node", status={"conditions": [{"type": "Ready", "status": "Unknown"}]})
    wanted["metadata"]["labels"] = {"topology.kubernetes.io/zone": "z"}
    assert pruned(node) == wanted


def test_what_is_kept_is_kept_the_same_again() -> None:
    pod = thing("Pod", spec={"nodeName": "n"}, status={"phase": "Pending", "conditions": []})
    assert pruned(pruned(pod)) == pruned(pod)


def test_of_a_trainers_pod_remain_the_times_of_its_start_too() -> None:
    times = [{"type": name, "status": "True", "lastTransitionTime": "t"} for name in ("Ready", "PodScheduled")]
    container = {"name": "main", "imageID": "sha", "state": {"running": {"startedAt": "t"}}}
    pod = thing("Pod", status={"conditions": times, "containerStatuses": [container]})
    pod["metadata"]["labels"] = {"stoker.dev/role": "trainer"}
    held = pruned(pod)["status"]
    assert held["conditions"] == [{"type": "Ready", "status": "True"}, times[1]]
    assert held["containerStatuses"] == [{"name": "main", "state": container["state"]}]
    assert pruned(pruned(pod)) == pruned(pod)
