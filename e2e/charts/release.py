"""Charts installed into one cluster, and kubectl on it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.charts.helm import helm
from e2e.cluster import binaries, tools

FLOW_SCHEMA = re.compile(r"X-Kubernetes-Pf-Flowschema-Uid: *\[?\"?([0-9a-f-]+)", re.IGNORECASE)
"""In what kubectl tells of an answer's headers."""


class KubectlFailed(RuntimeError):
    """Raised when kubectl fails; the text is its output."""


class Releases:
    """Helm and kubectl on one cluster, as its administrator."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def upgrade(
        self, name: str, chart: Path, namespace: str, *options: str, values: Mapping[str, Any] | None = None
    ) -> str:
        """Run `helm upgrade --install`."""
        arguments = ["upgrade", "--install", name, str(chart), "--namespace", namespace, "--create-namespace", *options]
        return helm(*arguments, kubeconfig=self.kubeconfig, values=values)

    def uninstall(self, name: str, namespace: str) -> str:
        return helm("uninstall", name, "--namespace", namespace, "--wait", kubeconfig=self.kubeconfig)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return its output.

        Raises:
            KubectlFailed: exit status other than 0.
        """
        done = self._run(*arguments, stdin=stdin)
        if done.returncode:
            raise KubectlFailed(f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def _run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(binaries.find([tools.KUBERNETES]) / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=400, check=False)

    def flow_schema(self, account: str, path: str) -> str:
        """Return the uid of the FlowSchema by which the API server treats a read of the service account."""
        names = ["--as", f"system:serviceaccount:{account}", "--as-group", "system:serviceaccounts"]
        done = self._run("get", "--raw", path, *names, "--as-group", "system:authenticated", "-v", "8")
        return found[1] if (found := FLOW_SCHEMA.search(done.stderr)) else ""

    def list_all_kinds(self) -> None:
        """List the objects of every definition.

        Call it before deleting definitions. If the storage of one is not up yet, the API server cannot delete its
        objects, and it retries only after minutes.
        """
        for definition in self.kubectl("get", "crd", "-o", "name").split():
            self.kubectl("get", definition.rpartition("/")[2], "--all-namespaces")

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return the objects of `kubectl get ... -o json`."""
        return dict(json.loads(self.kubectl("get", *arguments, "-o", "json")))

    def may(self, account: str, verb: str, resource: str, namespace: str = "", name: str = "") -> bool:
        """Return whether the service account `NAMESPACE:NAME` has that right.

        `resource` is PLURAL[.GROUP][/SUBRESOURCE]; an empty namespace means all.
        """
        plural, _, subresource = resource.partition("/")
        plural, _, group = plural.partition(".")
        attributes = {
            "verb": verb,
            "group": group,
            "resource": plural,
            "subresource": subresource,
            "namespace": namespace,
            "name": name,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{account}",
                "groups": ["system:serviceaccounts", "system:authenticated"],
                "resourceAttributes": attributes,
            },
        }
        answer = json.loads(self.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))
        return bool(answer["status"]["allowed"])
