"""One namespace of a real cluster in a story: commands of users, objects, and waiting for them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.cluster.api import Api
from e2e.cluster.cluster import Cluster
from e2e.cluster.errors import ClusterError
from e2e.cluster.groups import limit_processor
from testing.stories.object_views import Object as Object
from testing.stories.stage import Stage
from testing.stories.waits import TIMEOUT_S

PATHS = {
    "TrainingJob": "apis/stoker.dev/v1alpha1/{}trainingjobs",
    "Checkpoint": "apis/stoker.dev/v1alpha1/{}checkpoints",
    "InferenceDeployment": "apis/stoker.dev/v1alpha1/{}inferencedeployments",
    "EnginePool": "apis/stoker.dev/v1alpha1/{}enginepools",
    "Pod": "api/v1/{}pods",
    "Service": "api/v1/{}services",
    "ConfigMap": "api/v1/{}configmaps",
    "Secret": "api/v1/{}secrets",
    "Event": "api/v1/{}events",
    "PersistentVolumeClaim": "api/v1/{}persistentvolumeclaims",
    "PodDisruptionBudget": "apis/policy/v1/{}poddisruptionbudgets",
    "NetworkPolicy": "apis/networking.k8s.io/v1/{}networkpolicies",
    "Deployment": "apis/apps/v1/{}deployments",
    "Lease": "apis/coordination.k8s.io/v1/{}leases",
}
STORY = "stoker.dev/story"
"""Label of a story's namespace."""
OURS = ("TrainingJob", "Checkpoint", "InferenceDeployment", "EnginePool")
CHILDREN = ("Pod", "Service", "ConfigMap", "Secret", "PodDisruptionBudget", "NetworkPolicy")
"""Kinds of the objects that the operator makes for them."""


class Story(Stage):
    """A namespace that begins and ends with the story."""

    PAUSE_S = 0.2

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.api: Api = cluster.api()

    def begin(self) -> None:
        """Make the namespace, enforce the restricted profile, and wait until it accepts pods."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted", STORY: "yes"}
        path = f"/api/v1/namespaces/{self.namespace}"
        self.wait_until(lambda: self.api.get(path) is None, "an earlier namespace of this name gone")
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace, "labels": labels}}
        self.api.apply(path, namespace)
        account = f"{path}/serviceaccounts/default"
        self.wait_until(lambda: self.api.get(account), "the namespace has its service account")

    def end(self) -> None:
        """Delete every object of the product, which must go by itself, then the namespace (see `namespaces_gone`).

        Raises:
            AssertionError: something does not go.
        """
        try:
            self._delete_contents()
        finally:
            self.api.delete(f"/api/v1/namespaces/{self.namespace}")

    def _delete_contents(self) -> None:
        for kind in (*OURS, "Pod"):
            self.api.delete(f"/{self._path(kind)}")
        self.nothing_left()
        self.wait_until(lambda: not self.pods(), "the story's own pods deleted")
        # a namespace that still finds a claim with a finalizer in it looks again after five seconds
        self.api.delete(f"/{self._path('PersistentVolumeClaim')}")
        self.wait_until(lambda: not self.all("PersistentVolumeClaim"), "claims deleted")

    def close(self) -> None:
        """Close the connection to the API server."""
        self.api.close()

    # Commands of users

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Run `kubectl apply`; a refusal fails the story."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def refused(self, *objects: Mapping[str, Any]) -> str:
        """Run `kubectl apply` and return the refusal's message."""
        try:
            self.apply(*objects)
        except ClusterError as error:
            return str(error)
        raise AssertionError(f"not refused: {[found['metadata']['name'] for found in objects]}")

    def patch(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        """Patch the spec (`kubectl patch --type=merge`)."""
        self.api.merge(f"/{self._path(kind)}/{name}", {"spec": dict(spec)})

    def delete(self, kind: str, name: str) -> None:
        """Delete an object (`kubectl delete --wait=false`)."""
        self.api.delete(f"/{self._path(kind)}/{name}")

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 400) -> str:
        """Run kubectl in the story's namespace."""
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, stdin=stdin, timeout_s=timeout_s)

    def url(self, service: str) -> str:
        """Return a Service's own address, which this machine reaches as a pod does."""
        spec = self.get("Service", service)["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    # Objects, logs and folders

    def all(self, kind: str, **labels: str) -> list[Object]:
        """Return the objects of a kind by labels below `stoker.dev/` (underscores for dashes), sorted by name."""
        selector = ",".join(f"stoker.dev/{name.replace('_', '-')}={value}" for name, value in labels.items())
        listed = self.api.get(f"/{self._path(kind)}?labelSelector={selector.replace('=', '%3D').replace(',', '%2C')}")
        assert listed is not None, kind
        found = [{**item, "kind": kind} for item in listed["items"]]
        return sorted(found, key=lambda item: str(item["metadata"]["name"]))

    def find(self, kind: str, name: str) -> Object | None:
        return self.api.get(f"/{self._path(kind)}/{name}")

    def log(self, pod: Mapping[str, Any]) -> str:
        """Return the log of a pod's main container; empty if there is none."""
        try:
            return self.kubectl("logs", pod["metadata"]["name"], "--tail=400")
        except ClusterError:
            return ""

    def folder(self, claim: str) -> Path:
        """Return the folder with a claim's data on this machine."""
        return self.cluster.volume(self.namespace, claim)

    def left(self) -> list[str]:
        """Return the operator's objects that are left in this namespace."""
        found = [(kind, item) for kind in (*OURS, *CHILDREN) for item in self.all(kind)]
        return [f"{kind}/{item['metadata']['name']}" for kind, item in found if kind in OURS or _is_ours(item)]

    def nothing_left(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the operator's children have gone after their resources.

        Raises:
            AssertionError: naming what is still there.
        """
        deadline = time.monotonic() + timeout_s
        while left := self.left():
            assert time.monotonic() < deadline, f"left after {timeout_s:g} s: {left}\n{self.picture()}"
            time.sleep(0.2)

    # Harm

    def kill(self, pod: Mapping[str, Any]) -> None:
        """Kill every process of a pod's container at once."""
        for pid in _processes(pod):
            os.kill(pid, signal.SIGKILL)

    def slow_down(self, pod: Mapping[str, Any], share: float) -> None:
        """Leave a pod's container this share of one processor, as a node does that is too hot."""
        limit_processor(_processes(pod)[0], share)

    # Waiting

    def picture(self, kind: str = "", name: str = "") -> str:
        """Return the state to print when a story makes no progress."""
        lines = []
        if kind and (found := self.find(kind, name)) is not None:
            status = {
                key: value for key, value in (found.get("status") or {}).items() if key not in ("pinned", "router")
            }
            lines += [json.dumps(status, indent=1), json.dumps(self.events(kind, name), indent=1)]
        for pod in self.pods():
            status = {
                key: pod["status"].get(key) for key in ("phase", "reason", "message", "conditions", "containerStatuses")
            }
            lines += [f"--- {pod['metadata']['name']}: {json.dumps(status)}", self.log(pod)[-1500:]]
        lines += ["--- nodes", self.cluster.kubectl("get", "nodes", "-o", "wide")]
        operator = (
            "--namespace=stoker-system",
            "logs",
            "--selector=app.kubernetes.io/component=operator",
            "--tail=30",
            "--prefix",
        )
        lines += ["--- operator", self.cluster.kubectl(*operator)]
        return "\n".join(lines)

    def _path(self, kind: str) -> str:
        return PATHS[kind].format(f"namespaces/{self.namespace}/")


def namespaces_gone(api: Api) -> bool:
    """Return whether the namespaces of all stories have ended."""
    listed = api.get(f"/api/v1/namespaces?labelSelector={STORY}")
    assert listed is not None
    return not listed["items"]


def _is_ours(item: Mapping[str, Any]) -> bool:
    labels = item["metadata"].get("labels") or {}
    return any(name.startswith("stoker.dev/") for name in labels)


def _processes(pod: Mapping[str, Any]) -> list[int]:
    """Return the process ids of a pod's container on this machine."""
    container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    found = [pid for pid, text in _cgroups() if container in text]
    assert found, f"no process of {pod['metadata']['name']} runs"
    return found


def _cgroups() -> list[tuple[int, str]]:
    """Return the cgroups of every process of this machine, by process id."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found.append((int(entry.name), (entry / "cgroup").read_text()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    return found
