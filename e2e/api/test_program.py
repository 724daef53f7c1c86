"""`python -m stoker.operator` as a process on a real API server: probes, leader election, hand-over, a clean exit."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.api.plane import Plane
from e2e.api.replica import SHORT_LEASE, Replica, eventually
from testing.operator.bad_manifests import JOB, changed

LONG_LEASE = {"duration_s": 200, "renew_deadline_s": 150, "retry_s": 0.5}
"""No replica loses it by a busy machine."""


@pytest.fixture
def start(plane: Plane, namespace: str, tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    running: list[Replica] = []

    def start(name: str, **given: Any) -> Replica:
        running.append(Replica(plane.kubeconfig, tmp_path, name, namespace, **given))
        return running[-1]

    yield start
    for replica in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            replica.end(signal.SIGKILL)
        replica.log.close()


def test_of_two_replicas_one_works_and_a_clean_end_hands_over_at_once(start: Callable[..., Replica]) -> None:
    one = start("one", lease=LONG_LEASE)
    eventually(one.leads)
    two = start("two", lease=LONG_LEASE)
    eventually(two.is_ready)
    assert two.status()["leader"] == "one"
    assert not two.leads()
    assert one.end() == 0
    assert eventually(two.leads) < LONG_LEASE["duration_s"] / 2
    assert "Traceback" not in one.text


def test_a_killed_leader_is_replaced_when_its_lease_is_over(start: Callable[..., Replica]) -> None:
    one = start("one")
    eventually(one.leads)
    two = start("two")
    eventually(two.is_ready)
    killed_s = time.monotonic()
    one.end(signal.SIGKILL)
    eventually(two.leads)
    assert time.monotonic() - killed_s > SHORT_LEASE["duration_s"] / 2


def test_a_job_gets_its_pods_and_kopf_leaves_nothing_on_it(
    start: Callable[..., Replica], plane: Plane, namespace: str
) -> None:
    one = start("one", wake_ups=["TrainingJob", "Checkpoint", "InferenceDeployment", "EnginePool"])
    eventually(one.leads)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": JOB["spec"]["checkpoint"]["storage"]["claimName"], "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    job = changed(JOB, {"metadata.namespace": namespace, "metadata.name": "run"})
    for body in (claim, job):
        plane.kubectl("create", "-f", "-", stdin=body)

    def pods() -> list[dict[str, Any]]:
        return list(json.loads(plane.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"])

    eventually(lambda: len(pods()) == job["spec"]["workers"].get("replicas", 1))
    stored = json.loads(plane.kubectl("get", "tj", "run", "-n", namespace, "-o", "json"))
    assert "annotations" not in stored["metadata"]
    assert "finalizers" not in stored["metadata"]
    assert stored["status"]["phase"] in ("Starting", "Pending")
    page = one.get("/metrics").text
    assert "stoker_operator_leader 1.0" in page
    assert 'stoker_operator_objects{kind="TrainingJob"} 1.0' in page
    assert 'stoker_operator_reconcile_seconds_count{kind="TrainingJob"}' in page
    eventually(lambda: "stoker_operator_wake_ups_total 0.0" not in one.get("/metrics").text)
    assert one.end() == 0


def test_pods_satisfy_the_restricted_profile(start: Callable[..., Replica], plane: Plane, namespace: str) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    plane.kubectl("label", "namespace", namespace, label)
    test_a_job_gets_its_pods_and_kopf_leaves_nothing_on_it(start, plane, namespace)


def test_what_the_api_server_refuses_is_in_the_status(
    start: Callable[..., Replica], plane: Plane, namespace: str
) -> None:
    one = start("one")
    eventually(one.leads)
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": namespace},
        "spec": {"hard": {"pods": "0"}},
        "status": {"hard": {"pods": "0"}, "used": {"pods": "0"}},
    }
    plane.kubectl("create", "-f", "-", stdin=quota)
    plane.kubectl("replace", "--subresource=status", "-f", "-", stdin=quota)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": JOB["spec"]["checkpoint"]["storage"]["claimName"], "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    for body in (claim, changed(JOB, {"metadata.namespace": namespace, "metadata.name": "run"})):
        plane.kubectl("create", "-f", "-", stdin=body)

    def message() -> str:
        return str(
            json.loads(plane.kubectl("get", "tj", "run", "-n", namespace, "-o", "json"))
            .get("status", {})
            .get("message")
        )

    eventually(lambda: "exceeded quota: none" in message())
    plane.kubectl("delete", "quota", "none", "-n", namespace)
    eventually(lambda: "quota" not in message())
