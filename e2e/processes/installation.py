"""Stoker on an API server alone: charts installed, operators and pods as processes of this machine."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.api.replica import Replica, eventually
from e2e.charts.helm import NAMESPACE
from e2e.charts.release import Releases
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import wait_until_established
from e2e.processes.process_node import process_node

Object = dict[str, Any]

USER = "research"
"""The namespace of jobs and deployments."""
VALUES = {"watch": {"nodes": False}, "config": {"poll": {"interval_s": 0.5}}}
PATIENCE_S = 400
"""Real programs start on a machine with other work."""


@dataclass
class Installation:
    """A cluster in which Stoker works."""

    plane: ControlPlane
    folder: Path
    logs: Path
    replicas: list[Replica] = field(default_factory=list)

    @property
    def releases(self) -> Releases:
        return Releases(Path(self.plane.kubeconfig))

    def install(self, checkout: Path) -> None:
        """Install or upgrade both charts of a checkout."""
        charts = checkout / "charts"
        self.releases.upgrade("stoker-crds", charts / "stoker-crds", NAMESPACE)
        wait_until_established(self.releases.kubectl, "crd", "--all")
        self.releases.upgrade("stoker", charts / "stoker", NAMESPACE, values=VALUES)

    def operator(self, name: str, checkout: Path) -> Replica:
        """Start an operator of a checkout with the configuration that the installed chart gives it."""
        rendered = self.releases.get("configmap", "stoker", "--namespace", NAMESPACE)["data"]["config.json"]
        config = {**json.loads(rendered), "lease": {"duration_s": 6, "renew_deadline_s": 4, "retry_s": 0.5}}
        own = ("namespace", "identity", "api", "listen")
        given = {key: value for key, value in config.items() if key not in own}
        kubeconfig = Path(self.plane.kubeconfig)
        self.replicas.append(Replica(kubeconfig, self.folder, name, NAMESPACE, checkout, **given))
        return self.replicas[-1]

    def all(self, kind: str) -> list[Object]:
        return list(self.releases.get(kind, "--namespace", USER)["items"])

    def one(self, kind: str, name: str) -> Object:
        return self.releases.get(kind, name, "--namespace", USER)

    def apply(self, *manifests: Object) -> None:
        for body in manifests:
            self.releases.kubectl("apply", "--namespace", USER, "-f", "-", stdin=json.dumps(body))

    def wait(self, kind: str, name: str, phase: str) -> Object:
        """Wait for the phase of an object and return it."""

        def reached() -> bool:
            return bool((self.one(kind, name).get("status") or {}).get("phase") == phase)

        self._eventually(reached, f"{kind} {name} is {phase}")
        return self.one(kind, name)

    def is_ready(self, kind: str, name: str) -> None:
        """Wait until an object is Ready: a Checkpoint is verified then."""

        def reached() -> bool:
            conditions = (self.one(kind, name).get("status") or {}).get("conditions", ())
            return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)

        self._eventually(reached, f"{kind} {name} is Ready")

    def router(self) -> tuple[str, int]:
        """Return address and port of the only router."""
        (pod,) = [pod for pod in self.all("pods") if pod["metadata"]["labels"].get("stoker.dev/role") == "router"]
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        return str(pod["status"]["podIP"]), int(ports["http"])

    def picture(self) -> str:
        """Return what to print when a story makes no progress."""
        objects = self.releases.kubectl("get", "tj,ckpt,infd,epool,pods", "--namespace", USER)
        logs = {file.name: file.read_text()[-2000:] for file in self.logs.glob("*.log")}
        operators = {replica.log.name: replica.text[-3000:] for replica in self.replicas}
        return f"{objects}\n{json.dumps({**logs, **operators}, indent=1)}"

    def _eventually(self, reached: Any, what: str) -> None:
        try:
            eventually(reached, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"not in time: {what}\n{self.picture()}") from error

    def end(self) -> None:
        """Kill the operators."""
        for replica in self.replicas:
            with contextlib.suppress(subprocess.TimeoutExpired):
                replica.end(signal.SIGKILL)
            replica.log.close()


@contextlib.contextmanager
def installation(folder: Path, checkout: Path) -> Iterator[Installation]:
    """Install the charts of a checkout, whose programs the pods of the namespace `research` run."""
    with ControlPlane(folder / "control-plane", folder.name[-20:]) as plane:
        for name in (NAMESPACE, USER):
            Releases(Path(plane.kubeconfig)).kubectl("create", "namespace", name)
        with process_node(Path(plane.kubeconfig), USER, folder / "node", checkout) as logs:
            found = Installation(plane, folder, logs)
            found.install(checkout)
            try:
                yield found
            finally:
                found.end()
