"""Committed output of the charts for chosen values, so that a template's change shows its effect on each case.

python -m e2e.charts.snapshots --write    write e2e/charts/rendered/
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from e2e.charts.helm import STOKER, rendered

FOLDER = Path(__file__).parent / "rendered"

CASES: dict[str, Mapping[str, Any]] = {
    "default": {},
    "namespaced": {
        "watch": {"namespaces": ["research", "production"], "nodes": False, "secrets": False},
        "rbac": {"aggregateRoles": False},
        "controlKey": {"existingSecret": "stoker-key"},
        "replicas": 1,
    },
    "everything": {
        "images": {
            "control": {"repository": "registry.example.com/control", "digest": f"sha256:{'0' * 64}"},
            "runtime": {"repository": "registry.example.com/runtime", "tag": "1.2.3"},
            "pullPolicy": "Always",
            "pullSecrets": ["registry"],
        },
        "workloads": {
            "imagePullSecrets": ["registry"],
            "nodeLostSeconds": 30,
            "nodeOutageShare": 0.75,
            "nodeOutageNodes": 5,
        },
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "podMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        },
        "networkPolicy": {
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "egress": {"enabled": True},
        },
        "gateway": {
            "enabled": True,
            "namespace": "research",
            "audiences": ["stoker"],
            "impersonate": {"groups": ["research"], "extras": ["scopes.example.com/only"]},
            "prometheusUrl": "http://prometheus.monitoring:9090",
            "from": [{"namespaceSelector": {}}],
        },
        "serviceAccount": {"name": "stoker-operator", "annotations": {"example.com/role": "stoker"}},
        "podAnnotations": {"example.com/team": "models"},
        "podLabels": {"example.com/tier": "control"},
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "config": {"lease": {"duration_s": 30}, "workers": 4},
    },
}
"""Name -> values."""

API_VERSIONS = ("--api-versions", "monitoring.coreos.com/v1", "--api-versions", "stoker.dev/v1alpha1")


def snapshot(name: str) -> str:
    """Return the chart's output for one case, in the committed form."""
    found = rendered(STOKER, CASES[name], *API_VERSIONS)
    return "---\n".join(yaml.safe_dump(item, sort_keys=False, width=140) for item in found)


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status: 0 written, 2 wrong command line."""
    if arguments != ["--write"]:
        print(__doc__, file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        (FOLDER / f"{name}.yaml").write_text(snapshot(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
