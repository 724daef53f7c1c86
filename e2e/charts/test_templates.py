"""The rendered charts, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from e2e.charts.helm import CRDS, REPOSITORY, STOKER, HelmFailed, helm, one, rendered
from e2e.charts.plain import FILE, plain
from e2e.charts.snapshots import API_VERSIONS, CASES, FOLDER, snapshot
from e2e.images.recipe import CONTROL, RUNTIME
from stoker.gateway.config import ApiServerConfig, GatewayConfig
from stoker.operator.service.config import OperatorConfig


def test_dashboards_and_alerts_are_the_files_of_the_chart() -> None:
    values = {"metrics": {"dashboards": {"enabled": True}, "prometheusRule": {"enabled": True}}}
    found = rendered(STOKER, values, "--api-versions", "monitoring.coreos.com/v1")
    (boards,) = (item for item in found if item["metadata"]["name"] == "stoker-dashboards")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = {f"stoker-{path.name}": path.read_text() for path in (STOKER / "files" / "dashboards").glob("*.json")}
    assert boards["data"] == files
    (rule,) = (item for item in found if item["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((STOKER / "files" / "alerts.yaml").read_text())


@pytest.mark.parametrize("chart", [STOKER, CRDS], ids=["stoker", "stoker-crds"])
def test_helm_finds_nothing_to_criticise(chart: Any) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(chart))


@pytest.mark.parametrize("name", CASES)
def test_the_chart_gives_what_the_snapshot_shows(name: str) -> None:
    message = "the chart gives something else: look at it, then python -m e2e.charts.snapshots --write"
    assert snapshot(name) == (FOLDER / f"{name}.yaml").read_text(), message


def test_the_plain_manifests_are_what_the_chart_gives() -> None:
    assert plain() == FILE.read_text(), "python -m e2e.charts.plain --write"


def test_the_definitions_come_through_helm_unchanged_and_are_kept() -> None:
    found = rendered(CRDS)
    version = yaml.safe_load((CRDS / "Chart.yaml").read_text())["version"]
    assert len(found) == 4
    for definition in found:
        kept = {"helm.sh/resource-policy": "keep", "stoker.dev/chart-version": version}
        assert definition["metadata"].pop("annotations") == kept
        assert definition["metadata"].pop("labels")
        source = REPOSITORY / "crds" / f"stoker.dev_{definition['spec']['names']['plural']}.yaml"
        assert definition == yaml.safe_load(source.read_text())


def test_definitions_are_removed_where_keep_is_off() -> None:
    (first, *_) = rendered(CRDS, {"keep": False})
    assert "helm.sh/resource-policy" not in first["metadata"]["annotations"]


@pytest.mark.parametrize("name", CASES)
def test_the_operator_takes_the_configuration_that_the_chart_writes(name: str) -> None:
    text = one(rendered(STOKER, CASES[name]), "ConfigMap")["data"]["config.json"]
    config = OperatorConfig.model_validate_json(text, strict=False)
    assert config.namespaces == tuple(CASES[name].get("watch", {}).get("namespaces", ()))
    assert config.lease.name == "stoker"


def test_the_gateway_takes_the_configuration_that_the_chart_writes() -> None:
    maps = [item for item in rendered(STOKER, CASES["everything"]) if item["kind"] == "ConfigMap"]
    (text,) = (item["data"]["config.json"] for item in maps if item["metadata"]["name"] == "stoker-gateway")
    config = GatewayConfig.model_validate_json(text, strict=False)
    assert isinstance(config.cluster, ApiServerConfig)
    assert (config.namespace, config.cluster.audiences, config.cluster.passed_extras) == (
        "research",
        ("stoker",),
        ("scopes.example.com/only",),
    )
    rights = [
        rule
        for item in rendered(STOKER, CASES["everything"])
        if item["kind"] == "ClusterRole" and item["metadata"]["name"].endswith("-gateway")
        for rule in item["rules"]
    ]
    assert {verb for rule in rights for verb in rule["verbs"]} == {"create", "impersonate"}
    assert [rule["resources"] for rule in rights if rule["verbs"] == ["create"]] == [["tokenreviews"]]


def test_values_of_config_have_the_last_word() -> None:
    text = one(rendered(STOKER, {"config": {"lease": {"duration_s": 30}}}), "ConfigMap")["data"]["config.json"]
    assert json.loads(text)["lease"] == {"duration_s": 30, "name": "stoker", "renew_deadline_s": 10, "retry_s": 2}


def test_roles_ports_and_namespaces_follow_the_values_of_config() -> None:
    config = {
        "namespace": "own",
        "namespaces": ["research"],
        "lease": {"name": "mine"},
        "control_key": {"secret": "signing"},
        "listen": {"port": 9090},
        "watch": {"secrets": True, "nodes": False},
    }
    found = rendered(STOKER, {"config": config, "metrics": {"podMonitor": {"enabled": True}}}, *API_VERSIONS)
    own = next(item for item in found if item["kind"] == "Role" and item["metadata"]["name"] == "stoker-own")
    assert own["metadata"]["namespace"] == "own"
    assert [rule["resourceNames"] for rule in own["rules"] if "resourceNames" in rule] == [["mine"], ["signing"]]
    workloads = one(found, "Role", "stoker-workloads")
    assert workloads["metadata"]["namespace"] == "research"
    assert ["list", "watch"] in [rule["verbs"] for rule in workloads["rules"] if "secrets" in rule["resources"]]
    assert not [item for item in found if item["metadata"]["name"].endswith(("-nodes", "-leases"))]
    (container,) = one(found, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": 9090}]
    assert one(found, "PodMonitor", "stoker-workloads")["spec"]["namespaceSelector"] == {"matchNames": ["research"]}


def test_a_changed_configuration_restarts_the_operator() -> None:
    digests = {
        one(rendered(STOKER, {"log": {"level": level}}), "Deployment")["spec"]["template"]["metadata"]["annotations"][
            "stoker.dev/config-digest"
        ]
        for level in ("info", "debug")
    }
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"fullnameOverride": "my.stoker"}, "fullnameOverride"),
        ({"nameOverride": "1st"}, "nameOverride"),
        ({"watch": {"namespaces": ["Research"]}}, "namespaces"),
        ({"images": {"control": {"repository": "a", "digest": "sha256:short"}}}, "digest"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"log": {"level": "loud"}}, "level"),
        ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "interval"),
        ({"controlKey": {"secret": ""}}, "secret"),
        ({"workloads": {"nodeOutageShare": 50}}, "nodeOutageShare"),
        ({"workloads": {"nodeOutageNodes": 0}}, "nodeOutageNodes"),
        ({"podDisruptionBudget": {"minAvailable": "abc"}}, "minAvailable"),
        ({"podDisruptionBudget": {"minAvailable": "1"}}, "minAvailable"),
        ({"podDisruptionBudget": {"minAvailable": -1}}, "minAvailable"),
        ({"podDisruptionBudget": {"minAvailable": "101%"}}, "minAvailable"),
        ({"leaderElection": {"renewDeadlineSeconds": 15}}, "leaderElection.*got 2, 15 and 15"),
        ({"leaderElection": {"retrySeconds": 20}}, "leaderElection.*got 20, 10 and 15"),
        ({"config": {"lease": {"duration_s": 5}}}, "leaderElection.*got 2, 10 and 5"),
        ({"podLabels": {"app.kubernetes.io/name": "mine"}}, "podLabels: the chart itself sets app.kubernetes.io/name"),
        ({"podAnnotations": {"stoker.dev/config-digest": "x"}}, "podAnnotations: .* stoker.dev/config-digest"),
        ({"metrics": {"dashboards": {"enabled": True, "labels": {"helm.sh/chart": "x"}}}}, "metrics.dashboards.labels"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_values_that_mean_nothing_are_refused_by_name(values: Mapping[str, Any], says: str) -> None:
    with pytest.raises(HelmFailed, match=says):
        rendered(STOKER, values)


def test_a_release_with_dots_in_its_name_has_services_without() -> None:
    text = helm("template", "team.a", str(STOKER), values={"gateway": {"enabled": True}})
    services = [item for item in yaml.safe_load_all(text) if item and item["kind"] == "Service"]
    assert sorted(item["metadata"]["name"] for item in services) == ["team-a-stoker-gateway", "team-a-stoker-metrics"]


@pytest.mark.parametrize(
    "values",
    [{}, {"gateway": {"enabled": True}, "metrics": {"service": {"enabled": False}}}],
    ids=["metrics", "gateway"],
)
def test_a_release_that_begins_with_a_digit_is_refused_where_it_names_a_service(values: Mapping[str, Any]) -> None:
    with pytest.raises(HelmFailed, match=r"use another release name than 2nd, or set fullnameOverride"):
        helm("template", "2nd", str(STOKER), values=values)
    for fitting in ({"fullnameOverride": "stoker-2nd"}, {"metrics": {"service": {"enabled": False}}}):
        helm("template", "2nd", str(STOKER), values=fitting)


def test_labels_annotations_and_shares_of_ones_own_are_taken() -> None:
    values = {
        "podLabels": {"team": "a", "app.kubernetes.io/version": "b"},
        "podAnnotations": {"note": "b"},
        "podDisruptionBudget": {"minAvailable": "50%"},
        "leaderElection": {"durationSeconds": 60, "renewDeadlineSeconds": 40, "retrySeconds": 5},
    }
    found = rendered(STOKER, values)
    metadata = one(found, "Deployment")["spec"]["template"]["metadata"]
    assert (metadata["labels"]["team"], metadata["annotations"]["note"]) == ("a", "b")
    assert one(found, "PodDisruptionBudget")["spec"]["minAvailable"] == "50%"


def test_a_service_account_of_ones_own_needs_a_name() -> None:
    with pytest.raises(HelmFailed, match=r"serviceAccount\.name is needed"):
        rendered(STOKER, {"serviceAccount": {"create": False}})


@pytest.mark.parametrize("name", CASES)
def test_every_pod_keeps_to_the_restricted_profile(name: str) -> None:
    specs = [item["spec"] for item in rendered(STOKER, CASES[name]) if item["kind"] == "Pod"]
    specs += [
        item["spec"]["template"]["spec"] for item in rendered(STOKER, CASES[name]) if item["kind"] == "Deployment"
    ]
    assert len(specs) == 2 + ("gateway" in CASES[name])
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]


def test_no_role_asks_for_everything_and_secrets_are_read_only_where_they_are_named() -> None:
    for rule in rules(rendered(STOKER)):
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if "secrets" in rule["resources"] and "get" in rule["verbs"]:
            assert rule["resourceNames"] == ["stoker-control-key"]


def test_an_operator_of_namespaces_has_no_cluster_wide_rights() -> None:
    found = rendered(STOKER, CASES["namespaced"], "--skip-tests")
    kinds = {item["kind"] for item in found}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding"}
    assert [item["metadata"]["namespace"] for item in found if item["kind"] == "Role"] == [
        "production",
        "research",
        "stoker-system",
    ]
    assert [rule["verbs"] for rule in rules(found) if "secrets" in rule["resources"]] == [["create"], ["create"]]


def test_a_service_monitor_is_made_only_where_the_cluster_knows_it() -> None:
    values = {"metrics": {"serviceMonitor": {"enabled": True}}}
    assert not [item for item in rendered(STOKER, values) if item["kind"] == "ServiceMonitor"]
    known = rendered(STOKER, values, "--api-versions", "monitoring.coreos.com/v1")
    assert [item for item in known if item["kind"] == "ServiceMonitor"]


@pytest.mark.parametrize(("monitor", "service"), [("stoker", "stoker-metrics"), ("stoker-gateway", "stoker-gateway")])
def test_a_service_monitor_selects_each_service_with_metrics(monitor: str, service: str) -> None:
    values = {"metrics": {"serviceMonitor": {"enabled": True}}, "gateway": {"enabled": True}}
    found = rendered(STOKER, values, *API_VERSIONS)
    wanted = one(found, "ServiceMonitor", monitor)["spec"]
    labels = [item["metadata"]["labels"] for item in found if item["kind"] == "Service"]
    assert [own for own in labels if wanted["selector"]["matchLabels"].items() <= own.items()] == [
        one(found, "Service", service)["metadata"]["labels"]
    ]
    assert wanted["endpoints"][0]["port"] == one(found, "Service", service)["spec"]["ports"][0]["name"]


@pytest.mark.parametrize("chart", [STOKER, CRDS], ids=["stoker", "stoker-crds"])
def test_the_readme_lists_every_value_with_its_default(chart: Any) -> None:
    text = (chart / "README.md").read_text()
    for path, default in leaves(yaml.safe_load((chart / "values.yaml").read_text())):
        assert f"| `{path}` | `{json.dumps(default)}` |" in text, f"{path}: {json.dumps(default)}"


def test_both_charts_have_the_version_of_the_program() -> None:
    versions = [yaml.safe_load((chart / "Chart.yaml").read_text()) for chart in (STOKER, CRDS)]
    assert len({(chart["version"], chart["appVersion"]) for chart in versions}) == 1
    assert f'version = "{versions[0]["appVersion"]}"' in (REPOSITORY / "pyproject.toml").read_text()


def test_the_values_for_a_cluster_of_this_machine_name_the_images_that_are_built() -> None:
    images = yaml.safe_load((REPOSITORY / "e2e" / "values.yaml").read_text())["images"]
    assert {f"{image['repository']}:{image['tag']}" for image in images.values()} == {CONTROL.name, RUNTIME.name}
    assert rendered(STOKER, {"images": images})


def rules(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every rule of every role."""
    return [rule for item in found if item["kind"] in ("Role", "ClusterRole") for rule in item["rules"]]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, default) of every value.

    Maps of resources and images are followed; empty maps are values.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value and key not in ("requests", "limits"):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_a_role_that_is_bound_to_nobody_may_read_what_the_cluster_page_counts() -> None:
    found = rendered(STOKER, {"gateway": {"enabled": True}})
    role = one(found, "ClusterRole", "stoker-system:stoker-capacity-view")
    read = {name for rule in role["rules"] for name in rule["resources"] if "list" in rule["verbs"]}
    assert read == {"nodes", "pods", "trainingjobs", "inferencedeployments", "resourceslices", "resourceclaims"}
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list"}
    assert not [item for item in found if item.get("roleRef", {}).get("name") == "stoker-system:stoker-capacity-view"]
