"""Rights of the operator in the plain manifests: all it needs and no more (e2e/charts tests the chart's values)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stoker.operator.cluster.kinds import KINDS
from stoker.operator.service.config import OperatorConfig

ROOT = Path(__file__).parents[2]
MADE = ("Pod", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy")
"""Kinds that the operator makes in the namespaces of its resources."""


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / "operator.yaml").read_text(encoding="utf-8")))


def rules() -> Iterator[dict[str, Any]]:
    for found in documents():
        if found["kind"] in ("Role", "ClusterRole"):
            yield from found["rules"]


def test_no_secret_can_be_listed_and_only_the_control_key_can_be_read() -> None:
    """The first rule is for the keys of prefill and decode pools, the others are for the control key."""
    of_secrets = [rule for rule in rules() if "secrets" in rule["resources"]]
    assert [(rule["verbs"], rule.get("resourceNames")) for rule in of_secrets] == [
        (["create"], None),
        (["create"], None),
        (["get", "update", "patch"], ["stoker-control-key"]),
    ]


def test_the_operator_may_make_what_it_renders() -> None:
    allowed = {
        (group, resource)
        for rule in rules()
        if {"get", "list", "watch", "create", "patch", "delete"} <= set(rule["verbs"])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for name in MADE:
        group = KINDS[name].api_version.rpartition("/")[0]
        assert (group, KINDS[name].plural) in allowed


def test_the_configuration_is_narrow_by_default() -> None:
    (text,) = (found["data"]["config.json"] for found in documents() if found["kind"] == "ConfigMap")
    config = OperatorConfig.model_validate(json.loads(text), strict=False)
    assert not config.watch.secrets
    assert config.network_policies.enabled
    assert config.settings().task_resources["limits"] == {"memory": "2Gi"}
