"""The operator process with exactly the rights and the configuration of the chart, on a real API server.

It can do all of its work, and no request is refused.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.charts.helm import CRDS, NAMESPACE, STOKER, one, rendered
from e2e.charts.release import Releases
from e2e.cluster.control_plane import ControlPlane
from testing.stories.manifests import adopted, claim, corpus, deployment, job

PLACE = "research"
TIMES = re.compile(r'"time": "[^"]*"')
"""Of a line's begin: their digits say nothing about answers."""
CASES: dict[str, Mapping[str, Any]] = {
    "everywhere": {},
    "one namespace": {
        "watch": {"namespaces": [PLACE], "nodes": False, "secrets": False},
        "rbac": {"aggregateRoles": False},
    },
}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_the_operator_does_its_work_with_the_rights_of_the_chart(tmp_path: Path, values: Mapping[str, Any]) -> None:
    with ControlPlane(tmp_path / "plane", "rights") as plane:
        releases = Releases(Path(plane.kubeconfig))
        for name in (PLACE, NAMESPACE):
            releases.kubectl("create", "namespace", name)
        releases.upgrade("stoker-crds", CRDS, NAMESPACE)
        releases.upgrade("stoker", STOKER, NAMESPACE, values={"replicas": 1, **values})
        account = f"system:serviceaccount:{NAMESPACE}:stoker"
        kubeconfig = plane.kubeconfig_of(account, ("system:serviceaccounts", "system:authenticated"))

        with operator(tmp_path, kubeconfig, values) as log:
            works(releases)

        text = log.read_text()
        assert "orbidden" not in text, text
        assert not re.search(r"\b403\b", TIMES.sub("", text)), text
        assert "resource.k8s.io/v1" in text, "the devices that gangs claim were found"


def works(releases: Releases) -> None:
    """Let the operator make, patch and delete an object of every kind that it owns."""
    wanted = [
        claim("checkpoints"),
        claim("logs"),
        corpus(),
        job("runs"),
        job("ends", {"run.cancel": True}),
        adopted("taken", "checkpoints", "runs", "step-00000001.0a1b2c3d"),
        deployment("serves", {"uri": "pvc://checkpoints/model"}),
    ]
    apply(releases, *wanted)
    until(lambda: names(releases, "pods", "stoker.dev/role") >= {"trainer", "task", "engine", "router"}, "pods")
    until(lambda: releases.get("secrets", "--namespace", NAMESPACE)["items"], "the control key")
    assert names(releases, "poddisruptionbudgets", "stoker.dev/pool") == {"main"}
    assert names(releases, "enginepools", "stoker.dev/pool") == {"main"}
    until(
        lambda: names(releases, "networkpolicies", "stoker.dev/role") == {"trainer", "engine", "router"},
        "a NetworkPolicy for each kind of pod",
    )
    until(lambda: phase(releases, "tj/ends") == "Cancelled", "a cancelled job")
    assert releases.kubectl("get", "events", "--namespace", PLACE, "-o", "name")

    releases.kubectl("delete", "infd/serves", "ckpt/taken", "--namespace", PLACE, "--wait=false")
    apply(releases, job("runs", {"run.cancel": True}))
    until(lambda: "trainer" not in names(releases, "pods", "stoker.dev/role"), "end of the workers")


@contextmanager
def operator(folder: Path, kubeconfig: Path, values: Mapping[str, Any]) -> Iterator[Path]:
    """Run the operator while the context is entered; yield its log."""
    config = json.loads(one(rendered(STOKER, values), "ConfigMap")["data"]["config.json"])
    config["api"]["kubeconfig"] = str(kubeconfig)
    config["listen"] = {"host": "127.0.0.1", "port": 0}
    file, log = folder / "operator.json", folder / "operator.log"
    file.write_text(json.dumps(config))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "stoker.operator", "--config", str(file)], stdout=output, stderr=output
        )
        try:
            yield log
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait(timeout=240)


def apply(releases: Releases, *objects: Mapping[str, Any]) -> None:
    whole = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    releases.kubectl("apply", "--namespace", PLACE, "-f", "-", stdin=whole)


def names(releases: Releases, kind: str, label: str) -> set[str]:
    """Return the values of a label among the objects of a kind."""
    found = releases.get(kind, "--namespace", PLACE)["items"]
    return {item["metadata"].get("labels", {}).get(label, "") for item in found}


def phase(releases: Releases, name: str) -> str:
    return str(releases.get(name, "--namespace", PLACE).get("status", {}).get("phase", ""))


def until(holds: Callable[[], object], what: str, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"no {what} after {timeout_s:g} s"
        time.sleep(0.3)
