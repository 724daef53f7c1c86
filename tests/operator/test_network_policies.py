"""Pods are reachable from their peers alone: policies per job, pool and deployment, where the setting is on."""

from __future__ import annotations

from typing import Any

from stoker.operator.api.metadata import read
from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import NetworkPolicies, Settings
from stoker.operator.render.network_policy import trainer_policies
from testing.operator.bad_manifests import JOB, changed
from testing.operator.serving_world import Serving
from testing.operator.training_world import Run

PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
SETTINGS = Settings(network_policies=NetworkPolicies(operator_namespace="stoker-system", metrics_from=(PROMETHEUS,)))
OPERATOR = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "stoker-system"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "stoker", "app.kubernetes.io/component": "operator"}},
}


def on(port: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port}]


def policies(objects: dict[Any, Object]) -> dict[str, Object]:
    """Return the only policy of each role."""
    found = [item for item in objects.values() if item["kind"] == "NetworkPolicy"]
    by_role = {item["metadata"]["labels"]["stoker.dev/role"]: item for item in found}
    assert len(by_role) == len(found)
    return by_role


def job() -> Object:
    return changed(JOB, {"metadata": {"name": "x", "namespace": "default", "uid": "u-1"}})


def test_ranks_are_reached_by_their_job_and_their_agents_by_operator_and_metrics() -> None:
    (policy,) = trainer_policies(read(TrainingJob, job()), job(), SETTINGS)
    ranks = {"matchLabels": {"stoker.dev/job-uid": "u-1", "stoker.dev/role": "trainer"}}
    assert policy["spec"] == {
        "podSelector": ranks,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": ranks}]}, {"ports": on(8080), "from": [OPERATOR, PROMETHEUS]}],
    }
    assert policy["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_without_the_setting_there_is_no_policy() -> None:
    assert trainer_policies(read(TrainingJob, job()), job(), Settings()) == ()


def test_a_jobs_policy_is_there_before_its_pods() -> None:
    run = Run()
    run.cluster.settings = SETTINGS
    run.cluster.settle_once()
    while not run.cluster.pods("trainer"):
        before = policies(run.cluster.objects)
        run.cluster.settle_once()
    assert set(before) == {"trainer"}
    assert set(policies(run.cluster.objects)) == {"trainer"}


def test_engines_are_reached_by_their_routers_and_routers_by_everyone() -> None:
    serving = Serving()
    serving.cluster.settings = SETTINGS
    serving.checkpoint(10)
    serving.rest()
    found = policies(serving.cluster.objects)
    assert set(found) == {"engine", "router"}
    (engine,) = serving.engines()
    labels = engine["metadata"]["labels"]
    selector = found["engine"]["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= labels.items()
    uid = labels["stoker.dev/deployment-uid"]
    routers = {"podSelector": {"matchLabels": {"stoker.dev/deployment-uid": uid, "stoker.dev/role": "router"}}}
    tasks = {"podSelector": {"matchLabels": {"stoker.dev/deployment-uid": uid, "stoker.dev/role": "task"}}}
    assert found["engine"]["spec"]["ingress"] == [{"ports": on(8000), "from": [routers, tasks, OPERATOR, PROMETHEUS]}]
    assert found["router"]["spec"]["podSelector"] == routers["podSelector"]
    assert found["router"]["spec"]["ingress"] == [{"ports": on(8000)}]
    for router in serving.cluster.pods("router"):
        assert routers["podSelector"]["matchLabels"].items() <= router["metadata"]["labels"].items()
    writes = serving.cluster.writes
    serving.cluster.settle_once()
    assert serving.cluster.writes == writes
