"""A whole control plane with fake nodes for `kube_scale.py`.

It consists of etcd, API server, controller-manager, scheduler and kwok, all of which `make bench-kube` builds.

Fake pods have addresses of a range that is all this machine's in a network of its own, so that one small HTTP server
can be the agent of every one of them. Loopback addresses would serve that too, but no Endpoints may have them: the
endpoint controllers would be refused, and would retry for as long as a Service has such pods.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from e2e.api.access import read_kubeconfig
from e2e.api.api_client import ApiClient, Object
from e2e.cluster import binaries
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import wait_until_established
from e2e.cluster.processes import Program
from e2e.cluster.tools import ETCD, KUBERNETES, KWOK

STAGES = Path(__file__).with_name("kwok_stages.yaml")
CRDS = Path(__file__).parents[2] / "crds"
POD_RANGE, LAST_ADDRESS = "10.64.0.0/10", "10.127.255.254"
ANNOTATION = "kwok.x-k8s.io/node"


def enter_pod_network() -> None:
    """Restart this program in a network of its own, where every address of POD_RANGE is this machine.

    Inside that network it does nothing.

    The network ends with the program.
    """
    if _is_here(LAST_ADDRESS):
        return
    unshare = ["unshare", "--net", *(() if os.geteuid() == 0 else ("--map-root-user",))]
    open_network = f'ip link set lo up && ip route add local {POD_RANGE} dev lo && exec "$@"'
    os.execvp("unshare", [*unshare, "sh", "-c", open_network, "sh", *sys.orig_argv])


class FakeNodes:
    """A control plane with fake nodes as an async context manager; `api` is its client."""

    def __init__(self, folder: Path, count: int, api_server_flags: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.count = count
        self.bin, self.kwok_bin = binaries.find([ETCD, KUBERNETES]), binaries.find_optional(KWOK)
        # on a busy machine heartbeats are late, and a lost node would spoil the count
        patient = ("--node-monitor-grace-period=10m",)
        self.plane = ControlPlane(
            folder / "control-plane",
            "bench",
            controllers=True,
            scheduler=True,
            api_server_flags=api_server_flags,
            controller_flags=patient,
        )
        self.kwok = Program("kwok", folder)

    async def __aenter__(self) -> FakeNodes:
        self.plane.start()
        self.kwok.start(self._kwok_command(), detached=False)
        self.kubectl("apply", "--server-side", "-f", str(CRDS))
        wait_until_established(self.kubectl, "-f", str(CRDS))
        self.api = await ApiClient(read_kubeconfig(self.plane.kubeconfig)).__aenter__()
        for number in range(self.count):
            await self.api.create(node(f"fake-{number:03}"))
        await self._until_ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.api.__aexit__(kind, error, trace)
        self.kwok.stop(grace_s=0)
        self.plane.stop()

    def cpu_s(self) -> dict[str, float]:
        """Return the seconds of processor time of each part of the cluster so far."""
        plane = self.plane
        parts = (plane.etcd, plane.api_server, plane.controller_manager, plane.scheduler, self.kwok)
        return {part.name: cpu_s(part.pid) for part in parts if part.pid is not None}

    def kubectl(self, *given: str) -> str:
        command = [str(self.bin / "kubectl"), "--kubeconfig", str(self.plane.kubeconfig), *given]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def _kwok_command(self) -> list[str]:
        return [
            str(self.kwok_bin / "kwok"),
            f"--kubeconfig={self.plane.kubeconfig}",
            f"--config={STAGES}",
            f"--cidr={POD_RANGE}",
            f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
            "--node-lease-duration-seconds=60",
            "--node-ip=127.0.0.1",
        ]

    async def _until_ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                if sum(map(_is_ready, await self.api.list("Node"))) == self.count:
                    return
                await asyncio.sleep(0.2)


AS_IN_THE_IMAGE = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Variables that images/control.Dockerfile sets for the operator."""


class OperatorProcess:
    """`python -m stoker.operator` in a process of its own, as users run it."""

    def __init__(self, config: Path, folder: Path, profile: str | None = None) -> None:
        self.program = Program("operator", folder)
        profiler = ["-m", "cProfile", "-o", profile] if profile else []
        command = [sys.executable, *profiler, "-m", "stoker.operator", "--config", str(config)]
        sources = [str(CRDS.parent / root) for root in ("model", "operator")]
        environment = {"PYTHONPATH": os.pathsep.join(sources), **AS_IN_THE_IMAGE}
        self.program.start(command, detached=False, environment=environment)

    @property
    def pid(self) -> int:
        """The pid; raises SystemExit when the process has ended."""
        found = self.program.pid
        if found is None:
            raise SystemExit(f"the operator ended: {self.program.tail(20)}")
        return found

    def memory_mib(self, field: str) -> float:
        """Return `VmRSS` now and `VmHWM` at most."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        return next(round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith(field))

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def stop(self) -> None:
        self.program.stop(grace_s=30)


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_here(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def node(name: str) -> Object:
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {ANNOTATION: "fake"}, "labels": labels},
    }


def _is_ready(found: Object) -> bool:
    conditions = found.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
