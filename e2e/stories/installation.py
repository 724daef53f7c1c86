"""The product in a cluster, as a user installs it: both charts with the images of this checkout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.charts.helm import CRDS, NAMESPACE, STOKER
from e2e.charts.release import Releases
from e2e.cluster.cluster import Cluster
from e2e.cluster.spec import NodeSpec
from e2e.cluster.waiting import wait_until
from e2e.stories.story import namespaces_gone

IMAGES = {
    "control": {"repository": "localhost/stoker/control", "tag": "e2e"},
    "runtime": {"repository": "localhost/stoker/runtime", "tag": "e2e"},
}
CONTROL_NODE = "control"
_ROLE = "node-role.kubernetes.io/control"
RACK = "topology.stoker.dev/rack"

NODES = (
    NodeSpec(name=CONTROL_NODE, labels={_ROLE: ""}, taints=(f"{_ROLE}=:NoSchedule",)),
    NodeSpec(name="node-a", gpus=4, labels={RACK: "rack-0"}),
    NodeSpec(name="node-b", gpus=4, labels={RACK: "rack-1"}),
)
"""The operator runs on a node of its own, so that a story may kill any of the others."""

ELASTIC = {"patienceSeconds": 5, "restSeconds": 15}
VALUES: dict[str, Any] = {
    "images": IMAGES,
    "replicas": 2,
    "nodeSelector": {_ROLE: ""},
    "tolerations": [{"key": _ROLE, "operator": "Exists"}],
    "workloads": {"nodeLostSeconds": 4, "elastic": ELASTIC},
    "config": {"poll": {"interval_s": 0.5}},
}


def install(cluster: Cluster, values: dict[str, Any] | None = None) -> Releases:
    """Install both charts into `stoker-system` and wait until the operator is ready.

    The namespace enforces the restricted profile.
    """
    releases = Releases(cluster.kubeconfig)
    releases.kubectl("create", "namespace", NAMESPACE)
    releases.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    releases.upgrade("stoker-crds", CRDS, NAMESPACE)
    releases.upgrade("stoker", STOKER, NAMESPACE, "--wait", "--timeout=300s", values={**VALUES, **(values or {})})
    return releases


@contextmanager
def installed(cluster: Cluster) -> Iterator[Releases]:
    """Have both charts installed; at the end wait until every namespace of a story is gone.

    Raises:
        AssertionError: a namespace does not go.
    """
    found = Releases(cluster.kubeconfig)
    there = found.kubectl("get", "namespaces", NAMESPACE, "--ignore-not-found", "-o", "name")
    yield found if there else install(cluster)
    with cluster.api() as api:
        assert wait_until(lambda: namespaces_gone(api), timeout_s=300, every_s=0.5)
