"""The operator's configuration file: strict, complete without a single key, and passed on to the reconcilers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import BaseModel

from stoker.operator.domain.elastic import Pace
from stoker.operator.domain.lost_nodes import NodeLimits
from stoker.operator.domain.settings import NetworkPolicies, Settings
from stoker.operator.main import main
from stoker.operator.service.config import OperatorConfig
from stoker.pod.config_file import ConfigError, parse


def test_an_empty_file_means_the_defaults_of_the_settings() -> None:
    assert parse(OperatorConfig, {}).settings() == Settings(sees_secrets=False)


def test_what_is_configured_reaches_the_reconcilers() -> None:
    config = parse(
        OperatorConfig,
        {
            "images": {"runtime": "r:1", "control": "c:1", "pull_policy": "Never", "pull_secrets": ["registry"]},
            "poll": {"interval_s": 0.5},
            "tasks": {"resources": {"limits": {"memory": "1Gi"}}, "deadline_s": 60},
            "watch": {"secrets": False},
            "pods": {"node_lost_s": 3, "node_outage_share": 0.25, "node_outage_nodes": 7, "elastic_rest_s": 9},
        },
    )
    settings = config.settings()
    assert (settings.runtime_image, settings.control_image, settings.image_pull_policy) == ("r:1", "c:1", "Never")
    assert settings.image_pull_secrets == ("registry",)
    assert settings.poll_interval_s == 0.5
    assert settings.task_resources == {"limits": {"memory": "1Gi"}}
    assert settings.task_deadline_s == 60
    assert not settings.sees_secrets
    assert settings.node_limits == NodeLimits(lost_s=3, outage_share=0.25, outage_nodes=7, zone_outage_s=900)
    assert settings.elastic_pace == Pace(patience_s=60, rest_s=9)


FIXED = {
    "operator_version",
    "python",
    "control_public_keys",  # from the key ring
    "control_keys_config_map",
    "network_policies",  # from `OperatorConfig.policies`, with the operator's own namespace
    "places_gangs",  # from the clusters that the loop is given
    "installed",  # schedulers of gangs, by discovery
    "agent_port",
    "rendezvous_port",
    "engine_port",
    "transfer_port",
    "router_port",
    "router_acknowledge_s",
}
"""Settings that no installation chooses."""


def test_every_other_setting_can_be_configured() -> None:
    """`OperatorConfig.settings` copies field by field; a missing copy would leave the default."""
    amounts = {"limits": {"memory": "3Gi"}}
    config = parse(
        OperatorConfig,
        {
            "images": {"runtime": "r:1", "control": "c:1", "pull_policy": "Never", "pull_secrets": ["registry"]},
            "poll": {"interval_s": 1.5, "timeout_s": 1.5},
            "api": {"max_requests": 3},
            "routers": {"resources": amounts},
            "tasks": {"resources": amounts, "deadline_s": 61},
            "watch": {"secrets": False},
            "pods": {
                "drain_timeout_s": 3,
                "node_lost_s": 3,
                "node_outage_share": 0.25,
                "node_outage_nodes": 7,
                "zone_outage_s": 3,
                "elastic_patience_s": 3,
                "elastic_rest_s": 3,
                "model_cache_path": "/models",
            },
            "workers": 3,
            "resync_interval_s": 3,
        },
    )
    chosen, default = config.settings(), Settings()
    same = {field.name for field in fields(Settings) if getattr(chosen, field.name) == getattr(default, field.name)}
    assert same == FIXED


def test_network_policies_are_off_until_they_are_configured() -> None:
    assert parse(OperatorConfig, {}).policies("stoker-system") is None
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    config = parse(OperatorConfig, {"network_policies": {"enabled": True, "metrics_from": [peer]}})
    assert config.policies("stoker-system") == NetworkPolicies(operator_namespace="stoker-system", metrics_from=(peer,))


def leaves(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from leaves(section)
        else:
            yield name


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operator.md").read_text(encoding="utf-8")
    missing = [name for name in leaves(OperatorConfig) if not re.search(rf"[`.]{name}`", page)]
    assert missing == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"lease": {"duration": 3}}, "unknown key lease.duration"),
        ({"lease": {"renew_deadline_s": 20}}, "is needed, got retry_s 2, renew_deadline_s 20, duration_s 15"),
        ({"namespaces": ["No Such"]}, r"namespaces\.0"),
        ({"api": {"qps": 0}}, r"api\.qps"),
        ({"tasks": {"resources": {"request": {}}}}, r"tasks\.resources"),
        ({"pods": {"node_outage_share": 50}}, r"pods\.node_outage_share: .*less than or equal to 1 \(got 50\)"),
        ({"pods": {"node_outage_nodes": 0}}, r"pods\.node_outage_nodes: .*greater than or equal to 1 \(got 0\)"),
        ({"images": {"pull_policy": "Sometimes"}}, r"images\.pull_policy"),
    ],
)
def test_a_wrong_key_is_named(given: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(OperatorConfig, given)


def test_the_program_ends_with_the_code_for_a_wrong_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"api": {"kubeconfig": str(tmp_path / "none")}, "listen": {"port": 0}}))
    assert main(["--config", str(file)]) == 64
    assert "namespace is missing" in caplog.text
