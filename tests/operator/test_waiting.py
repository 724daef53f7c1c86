"""The message that gives the reason why a pod does not run."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.operator.domain.pods import waiting_reason
from stoker.operator.domain.waiting import condensed, missing_volume, mounting, waiting

SCHEDULER = (
    "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, "
    "2 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/3 nodes are available: "
    "1 Preemption is not helpful for scheduling, 2 No preemption victims found for incoming pod."
)


def pod(state: dict[str, Any] | None = None, *, conditions: list[dict[str, str]] | None = None) -> dict[str, Any]:
    statuses = [{"name": "main", "state": {"waiting": state}}] if state else []
    return {"status": {"phase": "Pending", "containerStatuses": statuses, "conditions": conditions or []}, "spec": {}}


def unscheduled(message: str, reason: str = "Unschedulable") -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}])


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            SCHEDULER,
            "2 of 3 nodes lack nvidia.com/gpu, 1 had untolerated taint {node-role.kubernetes.io/control-plane: }",
        ),
        (
            "0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient memory.",
            "1 of 1 nodes lack cpu, 1 of 1 nodes lack memory",
        ),
        (
            "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. preemption: "
            "0/2 nodes are available: 2 Preemption is not helpful for scheduling.",
            "2 didn't match Pod's node affinity/selector",
        ),
        (
            "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            "pod has unbound immediate PersistentVolumeClaims",
        ),
        ("no nodes available to schedule pods", "no nodes available to schedule pods"),
        ('persistentvolumeclaim "runs" not found', 'persistentvolumeclaim "runs" not found'),
    ],
)
def test_what_the_scheduler_says_is_condensed_to_what_is_missing(message: str, line: str) -> None:
    assert condensed(message) == line


def test_gpus_have_a_reason_of_their_own() -> None:
    found = waiting(unscheduled(SCHEDULER))
    assert found is not None
    assert found.reason == "WaitingForGPUs"
    assert found.line.startswith("WaitingForGPUs: 2 of 3 nodes lack nvidia.com/gpu")
    assert not found.stuck
    of_mig = waiting(unscheduled(SCHEDULER.replace("nvidia.com/gpu", "nvidia.com/mig-1g.10gb")))
    assert of_mig is not None
    assert of_mig.reason == "WaitingForGPUs"


def test_a_pull_that_fails_is_one_line_while_its_reason_alternates() -> None:
    error = 'failed to pull and unpack image "none:1": not found'
    first = waiting(pod({"reason": "ErrImagePull", "message": error}))
    then = waiting(
        pod({"reason": "ImagePullBackOff", "message": f'Back-off pulling image "none:1": ErrImagePull: {error}'})
    )
    assert first == then
    assert first is not None
    assert first.line == f"ImagePullBackOff: {error}"
    assert first.stuck


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "InvalidImageName", "ErrImageNeverPull"])
def test_what_waiting_cannot_help_is_stuck(reason: str) -> None:
    found = waiting(pod({"reason": reason, "message": 'secret "none"\n  not found'}))
    assert found is not None
    assert found.stuck
    assert found.message == 'secret "none" not found'


def test_a_container_that_is_being_made_is_nothing_to_speak_of() -> None:
    assert waiting(pod({"reason": "ContainerCreating"})) is None
    assert waiting_reason(pod({"reason": "ContainerCreating"})) == "waiting for the pod to start"
    assert waiting_reason({"status": {"phase": "Running"}}) is None


def test_init_containers_are_looked_at_first() -> None:
    found = pod({"reason": "PodInitializing"})
    found["status"]["initContainerStatuses"] = [{"state": {"waiting": {"reason": "InvalidImageName", "message": "x"}}}]
    assert waiting_reason(found) == "InvalidImageName: x"


def test_a_volume_without_its_object_is_named() -> None:
    spec = {
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "any", "secret": {"secretName": "gone", "optional": True}},
            {"name": "settings", "configMap": {"name": "unknown"}},
            {"name": "keys", "secret": {"secretName": "api-keys"}},
        ]
    }
    assert missing_volume(spec, {"Secret": {"other"}}) == "Secret api-keys does not exist (volume keys)"
    assert missing_volume(spec, {"Secret": {"api-keys"}}) is None
    assert missing_volume(spec, {}) is None


def test_a_scheduled_pod_that_cannot_be_prepared_says_what_has_to_be_mounted() -> None:
    spec = {
        "volumes": [
            {"name": "stoker-config", "configMap": {"name": "ours"}},
            {"name": "keys", "secret": {"secretName": "api", "items": [{"key": "missing", "path": "keys"}]}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "models"}},
        ]
    }
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "PodReadyToStartContainers", "status": "False"},
    ]
    line = "waiting for the node to mount Secret api (key missing), PersistentVolumeClaim models"
    assert mounting(pod(conditions=conditions), spec) == line
    assert mounting(pod(conditions=conditions), {}) is None
    assert mounting(pod(conditions=conditions[:1]), spec) is None
    assert mounting(unscheduled(SCHEDULER), spec) is None
