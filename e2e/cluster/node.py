"""One node: containerd, runc, kubelet and kube-proxy in namespaces and cgroups of their own.

Killing it is losing the machine.

The node's folder holds its configuration, logs, the kubelet's state and containerd's store; `node_init.py` is its first
process.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from e2e.cluster import groups, network, settings
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.errors import ClusterError
from e2e.cluster.keys import Authority
from e2e.cluster.network import MAX_NODES, Network
from e2e.cluster.processes import Program, started_at, wait_for_program
from e2e.cluster.spec import NodeSpec
from e2e.cluster.waiting import wait_until
from e2e.images.store import ImageStore

BOX = Path(__file__).with_name("node_init.py")


class Node:
    """Node of `cluster` in `folder`; `slot` gives its addresses."""

    def __init__(self, folder: Path, cluster: str, spec: NodeSpec, slot: int, addresses: Network) -> None:
        self.folder = folder
        self.spec = spec
        self.slot = slot
        self._network = addresses
        self._group = f"stoker-{cluster}.{spec.name}"
        self._program = Program("node", folder)

    @property
    def name(self) -> str:
        """The node's name in the cluster."""
        return self.spec.name

    @property
    def alive(self) -> bool:
        """Return whether its first process runs."""
        return self._program.alive

    @property
    def pid(self) -> int:
        """The pid of its first process on this machine; `nsenter -t PID -a` enters the node."""
        return int((self.folder / "opened").read_text())

    def prepare(self, images: ImageStore) -> None:
        """Clone the common image store for the node; needs no control plane and may run in a thread."""
        self.folder.mkdir(parents=True, exist_ok=True)
        images.clone_to(self.folder / "containerd")

    def open(self, plane: ControlPlane, bin_folder: Path, archives: Sequence[Path], *, detached: bool) -> None:
        """Open its namespaces, connect it, start containerd and import the images `archives`.

        `join` starts the kubelet.
        """
        config = self._write_configuration(plane, bin_folder, archives)
        self._program.start([sys.executable, "-I", str(BOX), "open", str(config)], detached=detached)
        wait_for_program(
            self._program, (self.folder / "opened").exists, what=f"node {self.name} opens its namespaces", timeout_s=240
        )
        network.connect(self._network, self.slot, self.pid)
        (self.folder / "connected").touch()

    def join(self) -> None:
        """Start the kubelet and kube-proxy; call it once the API server answers."""
        (self.folder / "joinable").touch()

    def kill_kubelet(self) -> None:
        """Kill the kubelet; the node starts it again, and its containers run on."""
        own = f"--config={self.folder / 'kubelet.yaml'}".encode()
        for found in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # a process that has ended meanwhile
                program, *arguments = found.read_bytes().split(b"\0")
                if program.endswith(b"/kubelet") and own in arguments:
                    os.kill(int(found.parent.name), signal.SIGKILL)

    def kill(self) -> None:
        """Kill every process of the node at once, as a power cut does; its disk stays."""
        inner = started_at(self.pid) if (self.folder / "opened").exists() else None
        self._program.stop(grace_s=0)
        if inner is not None and not wait_until(lambda: started_at(self.pid) != inner, timeout_s=120):
            raise ClusterError(f"node {self.name}: process {self.pid} does not end")
        network.disconnect(self._network, self.slot)
        groups.remove(groups.find(self._group))

    def remove(self) -> None:
        """Kill the node and remove its disk."""
        self.kill()
        if mounts := [
            line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if f"{self.folder}/" in line
        ]:
            raise ClusterError(f"node {self.name} has left a mount on this machine: {mounts[0]}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def trouble(self) -> str:
        """Return the ends of its logs on one line, for an error message."""
        names = ("node", "containerd", "kubelet")
        return "; ".join(f"{name}: {Program(name, self.folder).tail(2)}" for name in names)

    def _write_configuration(self, plane: ControlPlane, bin_folder: Path, archives: Sequence[Path]) -> Path:
        """Write every file that the node's programs read; an existing store stays as it is."""
        for note in ("opened", "connected", "joinable"):
            (self.folder / note).unlink(missing_ok=True)
        address, gateway = self._network.node(self.slot), self._network.gateway
        keys = Authority(self.folder.parent.parent / "control-plane" / "keys")
        runc = shutil.which("runc")
        assert runc is not None, "the preflight check asks for runc"
        networks = self.folder / "networks"
        networks.mkdir(exist_ok=True)
        (networks / "10-pods.conflist").write_text(json.dumps(settings.pod_network(self._network.pods_of(self.slot))))
        (self.folder / "containerd.toml").write_text(settings.containerd_toml(bin_folder, runc, networks))
        serving = keys.server(f"system:node:{self.name}", [self.name, address], ("system:nodes",))
        kubelet = settings.kubelet(self.spec, address, gateway, keys.pair.certificate, serving, self.folder)
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))
        config = {
            "folder": str(self.folder),
            "name": self.name,
            "address": address,
            "gateway": gateway,
            "services": self._network.services,
            "routes": [
                (self._network.pods_of(slot), self._network.node(slot))
                for slot in range(MAX_NODES)
                if slot != self.slot
            ],
            "groups": [str(group) for group in groups.make(self._group)],
            "archives": [str(archive) for archive in archives],
            "bin": str(bin_folder),
            "programs": self._programs(plane, bin_folder),
        }
        path = self.folder / "node.json"
        path.write_text(json.dumps(config, indent=1))
        return path

    def _programs(self, plane: ControlPlane, bin_folder: Path) -> dict[str, list[str]]:
        kubelet = plane.kubeconfig_of(f"system:node:{self.name}", ("system:nodes",))
        proxy = plane.kubeconfig_of("system:kube-proxy")
        labels = {"kubernetes.io/hostname": self.name}
        return {
            "containerd": [str(bin_folder / "containerd"), "--config", str(self.folder / "containerd.toml")],
            "kubelet": [
                str(bin_folder / "kubelet"),
                f"--config={self.folder / 'kubelet.yaml'}",
                f"--kubeconfig={kubelet}",
                f"--hostname-override={self.name}",
                f"--node-ip={self._network.node(self.slot)}",
                f"--node-labels={','.join(f'{key}={value}' for key, value in labels.items())}",
                *([f"--register-with-taints={','.join(self.spec.taints)}"] if self.spec.taints else []),
            ],
            "kube-proxy": [
                str(bin_folder / "kube-proxy"),
                f"--kubeconfig={proxy}",
                f"--hostname-override={self.name}",
                "--proxy-mode=iptables",
                f"--cluster-cidr={self._network.pods}",
                # requests to Services also come from this machine, which is no node
                "--masquerade-all=true",
                "--iptables-min-sync-period=100ms",
                # the connection table's size is the whole machine's
                "--conntrack-max-per-core=0",
                "--conntrack-tcp-timeout-established=0s",
                "--conntrack-tcp-timeout-close-wait=0s",
            ],
        }
