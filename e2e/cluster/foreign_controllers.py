"""Controllers of others beside a ControlPlane, as processes of this machine: Kueue, JobSet, Flux, Traefik.

Their definitions and webhooks come from their own modules (`Tool.files`). The API server calls the webhooks of Kueue
and JobSet at a loopback address; their certificates are signed by the cluster's authority.

    with ControlPlane(folder, controllers=True) as plane, running(plane, kueue(plane)):
        ...
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import binaries, tools
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import wait_until_established
from e2e.cluster.processes import Program, wait_for_program
from e2e.cluster.tools import Tool
from testing.free_port import free_port

Object = dict[str, Any]


@dataclass(frozen=True)
class ForeignController:
    """One controller of others: how it is started, and what must be in the cluster before."""

    tool: Tool
    folder: Path
    ready: str
    """URL that answers with 200 once it works."""
    webhook_port: int | None = None
    """Port of its webhooks; None: it has none."""
    config: Object | None = None
    """File of its flag `--config`; None: it has flags alone."""
    flags: tuple[str, ...] = ()
    objects: tuple[Object, ...] = ()
    """What must be in the cluster before."""
    definitions: str = "bases"
    """Folder of its definitions below `files/`."""


def kueue(plane: ControlPlane) -> ForeignController:
    """Kueue for groups of plain pods.

    It manages certificates itself, or takes those of its metrics from `/etc`, which only root could write. So it may
    manage those of webhooks that no API server calls; the ones that are called have certificates of ours.
    """
    webhook, health = free_port(), free_port()
    folder = plane.folder / "kueue"
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta1",
        "kind": "Configuration",
        "namespace": "kueue-system",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": "kueue-webhook-service",
            "webhookSecretName": "kueue-webhook-server-cert",
        },
        "clientConnection": {"qps": 300, "burst": 600},
        "integrations": {"frameworks": ["pod"]},
        "featureGates": {"VisibilityOnDemand": False},
    }
    idle = [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": f"{kind}WebhookConfiguration",
            "metadata": {"name": f"kueue-{kind.lower()}-webhook-configuration"},
            "webhooks": [_idle_webhook()],
        }
        for kind in ("Mutating", "Validating")
    ]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "kueue-webhook-server-cert", "namespace": "kueue-system"},
    }
    return ForeignController(
        tools.KUEUE, folder, f"http://127.0.0.1:{health}/readyz", webhook, config, objects=(namespace, secret, *idle)
    )


def jobset(plane: ControlPlane) -> ForeignController:
    """JobSet's controller."""
    webhook, health = free_port(), free_port()
    config = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhook},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": 500, "burst": 500},
    }
    return ForeignController(
        tools.JOBSET, plane.folder / "jobset", f"http://127.0.0.1:{health}/readyz", webhook, config
    )


def kustomize_controller(plane: ControlPlane) -> ForeignController:
    """Flux's controller for Kustomizations, which here take their manifests from ExternalArtifacts."""
    health = free_port()
    flags = (
        f"--health-addr=127.0.0.1:{health}",
        "--metrics-addr=0",
        "--requeue-dependency=1s",
        "--interval-jitter-percentage=0",
        "--feature-gates=ExternalArtifact=true,CancelHealthCheckOnNewRevision=true",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    )
    folder = plane.folder / "kustomize-controller"
    return ForeignController(
        tools.KUSTOMIZE_CONTROLLER, folder, f"http://127.0.0.1:{health}/readyz", flags=flags, definitions=""
    )


def traefik(plane: ControlPlane, port: int) -> ForeignController:
    """Traefik as a gateway of Gateway API that listens on a port of loopback."""
    health = free_port()
    flags = (
        "--providers.kubernetesgateway=true",
        f"--entrypoints.web.address=127.0.0.1:{port}",
        f"--entrypoints.traefik.address=127.0.0.1:{health}",
        "--ping=true",
        "--global.checknewversion=false",
        "--global.sendanonymoususage=false",
        "--log.level=INFO",
    )
    folder = plane.folder / "traefik"
    return ForeignController(
        tools.TRAEFIK, folder, f"http://127.0.0.1:{health}/ping", flags=flags, definitions="standard"
    )


def volcano(plane: ControlPlane) -> ForeignController:
    """Volcano's scheduler for PodGroups that exist; its controllers and webhooks are not needed for those."""
    health = free_port()
    flags = (
        f"--kubeconfig={plane.kubeconfig}",
        "--leader-elect=false",
        "--enable-healthz=true",
        f"--healthz-address=127.0.0.1:{health}",
        f"--listen-address=127.0.0.1:{free_port()}",
        "--schedule-period=200ms",
    )
    folder = plane.folder / "volcano"
    return ForeignController(tools.VOLCANO, folder, f"http://127.0.0.1:{health}/healthz", flags=flags, definitions="")


@contextlib.contextmanager
def running(plane: ControlPlane, controller: ForeignController) -> Iterator[Program]:
    """Install the controller's definitions and webhooks and run it.

    Raises:
        MissingBinaries: it is not built.
        ClusterError: it ends, or is not ready in time; with the end of its log.
    """
    built = binaries.find_optional(controller.tool)
    definitions = str(built / "files" / controller.definitions)
    _write_files(plane, controller)
    _apply(plane, *controller.objects)
    _kubectl(plane, "apply", "--server-side", "-f", definitions)
    wait_until_established(partial(_kubectl, plane), "-f", definitions)
    program = Program(controller.tool.name, plane.folder / "log")
    config = () if controller.config is None else (f"--config={controller.folder / 'config.json'}",)
    command = [str(built / controller.tool.name), *config, *controller.flags]
    environment = {"KUBECONFIG": str(plane.kubeconfig), "TMPDIR": str(controller.folder)}
    program.start(command, detached=False, environment=environment)
    try:
        wait_for_program(
            program, lambda: _answers(controller.ready), what=f"{controller.tool.name} is ready", timeout_s=300
        )
        with _webhooks(plane, controller, program, built / "files" / "manifests.yaml"):
            yield program
    finally:
        program.stop(grace_s=2)


@contextlib.contextmanager
def _webhooks(plane: ControlPlane, controller: ForeignController, program: Program, manifests: Path) -> Iterator[None]:
    """Have the API server call the controller's webhooks, if it has any."""
    if (port := controller.webhook_port) is None:
        yield
        return
    wait_for_program(program, lambda: _listens(port), what="its webhooks listen", timeout_s=240)
    called = tuple(_called_webhooks(plane, controller, manifests))
    _apply(plane, *called)
    try:
        yield
    finally:  # what is refused for want of its webhooks could never be made again
        for body in called:
            _kubectl(plane, "delete", "--ignore-not-found", body["kind"], body["metadata"]["name"])


def _write_files(plane: ControlPlane, controller: ForeignController) -> None:
    """Configuration and certificate; without `certDir` a controller looks below TMPDIR."""
    controller.folder.mkdir(parents=True, exist_ok=True)
    if controller.config is not None:
        (controller.folder / "config.json").write_text(json.dumps(controller.config))
    if controller.webhook_port is None:
        return
    pair = plane.authority.server(controller.tool.name, ["localhost", "127.0.0.1"])
    default = controller.folder / "k8s-webhook-server" / "serving-certs"
    for folder in (controller.folder, default):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(pair.certificate, folder / "tls.crt")
        shutil.copy(pair.key, folder / "tls.key")


def _called_webhooks(plane: ControlPlane, controller: ForeignController, manifests: Path) -> Iterator[Object]:
    """The webhook configurations of the module, with addresses of this machine and our authority."""
    bundle = base64.b64encode(plane.authority.pair.certificate.read_bytes()).decode()
    for body in yaml.safe_load_all(manifests.read_text()):
        for webhook in body["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            url = f"https://127.0.0.1:{controller.webhook_port}{path}"
            webhook["clientConfig"] = {"url": url, "caBundle": bundle}
        yield {**body, "metadata": {"name": f"{controller.tool.name}-{body['metadata']['name']}-here"}}


def _idle_webhook() -> Object:
    """A webhook that is called for nothing."""
    rule = {"apiGroups": ["none.invalid"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["nothings"]}
    return {
        "name": "idle.kueue.x-k8s.io",
        "clientConfig": {"url": "https://127.0.0.1/"},
        "rules": [rule],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }


def _apply(plane: ControlPlane, *objects: Object) -> None:
    for body in objects:
        _kubectl(plane, "apply", "-f", "-", stdin=json.dumps(body))


def _kubectl(plane: ControlPlane, *given: str, stdin: str | None = None) -> None:
    program = str(binaries.bin_folder() / "kubectl")
    command = [program, "--kubeconfig", str(plane.kubeconfig), *given]
    subprocess.run(command, input=stdin, check=True, stdout=subprocess.DEVNULL, text=True)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
