"""`kubectl apply -k deploy/`: the objects that it makes, the effect of a second run, the rest after each removal."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.charts.helm import NAMESPACE, REPOSITORY, STOKER, objects, one, rendered
from e2e.charts.plain import FILE
from e2e.charts.release import KubectlFailed, Releases
from e2e.charts.test_install import JOB
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import wait_until_established

DEPLOY = REPOSITORY / "deploy"
DEFINITIONS = [
    f"{plural}.stoker.dev" for plural in ("checkpoints", "enginepools", "inferencedeployments", "trainingjobs")
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Releases]:
    """A control plane of its own, with the controllers that end namespaces and collect garbage, and no node."""
    with ControlPlane(tmp_path_factory.mktemp("plane"), "plain", controllers=True) as plane:
        yield Releases(Path(plane.kubeconfig))


@pytest.fixture
def applied(cluster: Releases) -> Releases:
    """Apply everything as docs/install.md describes; a second run changes nothing."""
    cluster.kubectl("apply", "--server-side", "-k", str(DEPLOY))
    wait_until_established(cluster.kubectl, *(f"crd/{name}" for name in DEFINITIONS))
    return cluster


def test_every_manifest_becomes_an_object(applied: Releases) -> None:
    wanted = objects(applied.kubectl("kustomize", str(DEPLOY)))
    assert len(wanted) > 15
    for item in wanted:
        metadata = item["metadata"]
        group = item["apiVersion"].rpartition("/")[0]
        place = ("--namespace", metadata["namespace"]) if "namespace" in metadata else ()
        live = applied.get(f"{item['kind']}.{group}".rstrip("."), metadata["name"], *place)
        assert subset(item, live), f"{item['kind']} {metadata['name']}"


def test_the_operator_is_the_one_of_the_chart(applied: Releases) -> None:
    """The two are compared in the form that the API server completes."""
    of_chart = dict(one(rendered(STOKER), "Deployment"))
    of_chart["metadata"] = {"name": "of-the-chart", "namespace": NAMESPACE}
    completed = applied.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(of_chart))
    live = applied.get("deployment", "stoker", "--namespace", NAMESPACE)
    assert live["spec"] == json.loads(completed)["spec"]


def test_the_definitions_take_jobs_and_refuse_mistakes(applied: Releases) -> None:
    applied.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(JOB))
    wrong: Any = copy.deepcopy(JOB)
    wrong["spec"]["training"] |= {"globalBatchSize": 3, "microBatchSize": 2}
    with pytest.raises(KubectlFailed, match="globalBatchSize"):
        applied.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(wrong))


def test_a_second_time_it_changes_nothing(applied: Releases) -> None:
    before = generations(applied)
    printed = applied.kubectl("apply", "--server-side", "-k", str(DEPLOY))
    assert generations(applied) == before
    assert len(printed.splitlines()) >= len(before)
    assert applied.kubectl("diff", "--server-side", "-k", str(DEPLOY)) == ""


def test_without_the_operator_definitions_objects_and_key_stay(applied: Releases) -> None:
    applied.kubectl("apply", "-f", "-", stdin=json.dumps(JOB))
    applied.kubectl("create", "secret", "generic", "stoker-control-key", "--namespace", NAMESPACE)
    applied.kubectl("delete", "-f", str(FILE))
    ours = ("--selector", "app.kubernetes.io/part-of=stoker", "-o", "name")
    kinds = "deployments,configmaps,services,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets"
    assert applied.kubectl("get", kinds, "--namespace", NAMESPACE, *ours) == ""
    assert applied.get("trainingjob", "kept", "--namespace", "default")["spec"]["training"]["totalSteps"] == 1
    assert applied.get("secret", "stoker-control-key", "--namespace", NAMESPACE)


def test_removed_as_a_whole_nothing_stays(applied: Releases) -> None:
    """No operator runs here and the job has no finalizer, so the deletion waits for nothing."""
    applied.kubectl("apply", "-f", "-", stdin=json.dumps(JOB))
    applied.list_all_kinds()
    applied.kubectl("delete", "-k", str(DEPLOY), "--timeout=300s")
    assert applied.kubectl("get", "crd", "-o", "name") == ""
    assert applied.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found") == ""
    left = applied.kubectl(
        "get", "clusterroles,clusterrolebindings", "--selector", "app.kubernetes.io/part-of=stoker", "-o", "name"
    )
    assert left == ""


def subset(wanted: Any, live: Any) -> bool:
    """Return whether everything expected is there; the API server adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(subset(value, live.get(name)) for name, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(live, list) and len(wanted) == len(live) and all(map(subset, wanted, live))
    return bool(wanted == live) or (wanted in ("", {}, []) and live is None)


def generations(cluster: Releases) -> dict[str, Any]:
    """Return the numbers that change with a write to a spec, or with any write to an object without a spec."""
    kinds = "deployments,networkpolicies,poddisruptionbudgets,services,configmaps,serviceaccounts,roles,rolebindings"
    found = cluster.get(kinds, "--namespace", NAMESPACE, "--selector", "app.kubernetes.io/part-of=stoker")["items"]
    found += cluster.get("crd,clusterroles,clusterrolebindings", "--selector", "app.kubernetes.io/part-of=stoker")[
        "items"
    ]
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"].get("generation")
        or item["metadata"]["resourceVersion"]
        for item in found
    }
