"""The charts and the plain manifests on a real API server: accepted, least privilege, upgrade, uninstall."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.charts.helm import CRDS, NAMESPACE, REPOSITORY, STOKER, HelmFailed, rendered
from e2e.charts.release import KubectlFailed, Releases
from e2e.cluster.definitions import wait_until_established

ACCOUNT = f"{NAMESPACE}:stoker"
JOB = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "kept", "namespace": "default"},
    "spec": {
        "modelFrom": {"huggingFace": {"path": "/none"}},
        "training": {"totalSteps": 1, "globalBatchSize": 1, "microBatchSize": 1, "sequenceLength": 8},
        "data": {"sources": [{"name": "none", "path": "/none"}]},
        "checkpoint": {"storage": {"claimName": "none"}},
    },
}


@pytest.fixture(scope="module")
def installed(releases: Releases) -> Releases:
    """Both charts with their default values, in a namespace that enforces the restricted profile."""
    releases.kubectl("create", "namespace", NAMESPACE)
    releases.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    releases.upgrade("stoker-crds", CRDS, NAMESPACE)
    releases.upgrade("stoker", STOKER, NAMESPACE)
    return releases


def test_the_api_server_takes_both_charts(installed: Releases) -> None:
    deployment = installed.get("deployment", "stoker", "--namespace", NAMESPACE)
    assert deployment["spec"]["replicas"] == 2
    assert len(installed.get("crd")["items"]) == 4


def test_a_second_upgrade_changes_nothing(installed: Releases) -> None:
    before = generations(installed)
    installed.upgrade("stoker-crds", CRDS, NAMESPACE)
    installed.upgrade("stoker", STOKER, NAMESPACE)
    assert generations(installed) == before


def test_the_lease_has_the_priority_of_leaders_and_pods_have_not(installed: Releases) -> None:
    schema = installed.get("flowschema", f"{NAMESPACE}-stoker-leases")
    assert {found["type"]: found["status"] for found in schema["status"]["conditions"]} == {"Dangling": "False"}
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/stoker"
    assert installed.flow_schema(ACCOUNT, lease) == schema["metadata"]["uid"]
    others = installed.get("flowschema", "service-accounts")
    assert installed.flow_schema(ACCOUNT, f"/api/v1/namespaces/{NAMESPACE}/pods") == others["metadata"]["uid"]


@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_pods_of_the_chart_pass_the_restricted_profile(installed: Releases, kind: str) -> None:
    (item,) = [item for item in rendered(STOKER) if item["kind"] == kind]
    spec = item["spec"]["template"]["spec"] if kind == "Deployment" else item["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "profile", "namespace": NAMESPACE}, "spec": spec}
    installed.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(KubectlFailed, match="violates PodSecurity"):
        installed.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "name", "allowed"),
    [
        ("patch", "trainingjobs.stoker.dev", "", "", True),
        ("create", "trainingjobs.stoker.dev", "", "", False),
        ("create", "checkpoints.stoker.dev", "", "", True),
        ("create", "pods", "", "", True),
        ("create", "pods/exec", "", "", False),
        ("list", "secrets", "", "", False),
        ("get", "secrets", "default", "", False),
        ("get", "secrets", NAMESPACE, "stoker-control-key", True),
        ("get", "secrets", NAMESPACE, "another", False),
        ("update", "leases.coordination.k8s.io", NAMESPACE, "stoker", True),
        ("update", "leases.coordination.k8s.io", NAMESPACE, "another", False),
        ("update", "leases.coordination.k8s.io", "default", "stoker", False),
        ("watch", "nodes", "", "", True),
        ("patch", "nodes", "", "", False),
        ("delete", "persistentvolumeclaims", "", "", False),
        ("get", "customresourcedefinitions.apiextensions.k8s.io", "", "", False),
        ("list", "namespaces", "", "", False),
        ("create", "clusterroles.rbac.authorization.k8s.io", "", "", False),
    ],
    ids=lambda value: str(value) if value != "" else "-",
)
def test_the_operator_may_do_what_it_does_and_no_more(
    installed: Releases, verb: str, resource: str, namespace: str, name: str, allowed: bool
) -> None:
    assert installed.may(ACCOUNT, verb, resource, namespace, name) is allowed


def test_an_operator_of_one_namespace_has_no_rights_elsewhere(installed: Releases) -> None:
    installed.kubectl("create", "namespace", "research")
    values = {"watch": {"namespaces": ["research"], "nodes": False}, "rbac": {"aggregateRoles": False}}
    installed.upgrade("small", STOKER, "small", values=values)
    account = "small:small-stoker"
    assert installed.may(account, "create", "pods", "research")
    assert not installed.may(account, "create", "pods", "default")
    assert not installed.may(account, "list", "nodes")
    installed.uninstall("small", "small")


def test_editors_of_a_namespace_may_apply_jobs_and_not_pools(installed: Releases) -> None:
    installed.kubectl("create", "clusterrolebinding", "ann", "--clusterrole=edit", "--serviceaccount=default:ann")
    rules = [
        rule for rule in installed.get("clusterrole", f"{NAMESPACE}:stoker-edit")["rules"] if "create" in rule["verbs"]
    ]
    assert [rule["resources"] for rule in rules] == [["trainingjobs", "checkpoints", "inferencedeployments"]]


def test_an_upgrade_that_keeps_ones_values_takes_those_that_are_new(releases: Releases, tmp_path: Path) -> None:
    """The commands are those of docs/install.md, from a version without `workloads.nodeOutageShare`."""
    releases.upgrade(
        "later", without_value(tmp_path, "workloads", "nodeOutageShare"), "later", values={"log": {"level": "debug"}}
    )
    releases.upgrade("later", STOKER, "later", "--reset-then-reuse-values")
    config = json.loads(releases.get("configmap", "later-stoker", "--namespace", "later")["data"]["config.json"])
    assert (config["log_level"], config["pods"]["node_outage_share"]) == ("debug", 0.5)
    assert "--reset-then-reuse-values" in (REPOSITORY / "docs" / "install.md").read_text()
    releases.uninstall("later", "later")


def test_an_upgrade_applies_changed_definitions_and_uninstalling_keeps_them(releases: Releases, tmp_path: Path) -> None:
    """The version before had one property less; a job made with it remains after upgrade and uninstall."""
    for name in ("stoker", "stoker-crds"):
        if name in releases.kubectl("get", "secrets", "--namespace", NAMESPACE, "--ignore-not-found", "-o", "name"):
            releases.uninstall(name, NAMESPACE)
    releases.list_all_kinds()
    releases.kubectl("delete", "crd", "--all", "--wait=true")
    releases.upgrade("stoker-crds", version_before(tmp_path), NAMESPACE)
    wait_until_established(releases.kubectl, "crd", "--all")
    releases.kubectl("apply", "-f", "-", stdin=json.dumps(JOB))
    assert "ttlSecondsAfterFinished" not in run_properties(releases)

    releases.upgrade("stoker-crds", CRDS, NAMESPACE)
    assert "ttlSecondsAfterFinished" in run_properties(releases)

    kept = releases.uninstall("stoker-crds", NAMESPACE)
    assert "kept" in kept
    assert releases.get("trainingjob", "kept", "--namespace", "default")["spec"]["training"]["totalSteps"] == 1
    releases.upgrade("stoker-crds", CRDS, NAMESPACE)  # and it can be installed again over what was kept


def test_older_definitions_are_refused_with_a_line(releases: Releases, tmp_path: Path) -> None:
    """A downgrade would drop stored values; it is possible on purpose, and no object is lost by the refusal."""
    releases.upgrade("stoker-crds", CRDS, NAMESPACE)
    wait_until_established(releases.kubectl, "crd", "--all")
    releases.kubectl("apply", "-f", "-", stdin=json.dumps(JOB))
    before = version_before(tmp_path)
    with pytest.raises(HelmFailed, match=r"the older 0\.0\.9 would drop values that are stored"):
        releases.upgrade("stoker-crds", before, NAMESPACE)
    assert "ttlSecondsAfterFinished" in run_properties(releases)
    releases.upgrade("stoker-crds", before, NAMESPACE, "--set", "allowDowngrade=true")
    assert "ttlSecondsAfterFinished" not in run_properties(releases)
    releases.upgrade("stoker-crds", CRDS, NAMESPACE)
    assert releases.get("trainingjob", "kept", "--namespace", "default")["spec"]["training"]["totalSteps"] == 1


def version_before(folder: Path) -> Path:
    """Return the chart of the definitions as it was without `run.ttlSecondsAfterFinished`."""
    chart = folder / "stoker-crds"
    shutil.copytree(CRDS, chart)
    meta = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**meta, "version": "0.0.9"}))
    file = chart / "files" / "stoker.dev_trainingjobs.yaml"
    definition = yaml.safe_load(file.read_text())
    del schema_of_run(definition)["ttlSecondsAfterFinished"]
    file.write_text(json.dumps(definition))
    return chart


def without_value(folder: Path, section: str, name: str) -> Path:
    """Return the chart as it was without that value."""
    chart = folder / "stoker"
    shutil.copytree(STOKER, chart)
    values = yaml.safe_load((chart / "values.yaml").read_text())
    del values[section][name]
    (chart / "values.yaml").write_text(yaml.safe_dump(values))
    return chart


def run_properties(releases: Releases) -> dict[str, Any]:
    return schema_of_run(releases.get("crd", "trainingjobs.stoker.dev"))


def schema_of_run(definition: dict[str, Any]) -> dict[str, Any]:
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return dict.__getitem__(schema["properties"]["spec"]["properties"]["run"], "properties")


def generations(releases: Releases) -> dict[str, int]:
    """Return the generation of each object that the charts made, by kind/name."""
    listed = releases.get("deployments,networkpolicies,poddisruptionbudgets", "--namespace", NAMESPACE)["items"]
    listed += releases.get("crd")["items"]
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["generation"] for item in listed}
