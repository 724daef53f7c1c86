"""A whole cluster on this machine: control plane, DNS, nodes, shared volumes.

Its state is a folder in the cache, so that any process can find, use and stop it.

with Cluster("demo", default_nodes(2)) as cluster:
    cluster.kubectl("get", "nodes")
"""

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e.cluster import binaries, groups, network, preflight, settings, volumes
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.errors import ClusterError
from e2e.cluster.forward import PortForward
from e2e.cluster.image import busybox_archive
from e2e.cluster.network import MAX_NODES, Network
from e2e.cluster.node import Node
from e2e.cluster.processes import Program
from e2e.cluster.spec import NodeSpec, check_name, default_nodes, parse_nodes
from e2e.cluster.waiting import wait_until
from e2e.images.store import ImageStore

LOST_AFTER_S = 12
"""Silence after which a node is NotReady: six heartbeats, some of which a loaded machine may keep a live node from."""
READY_S = 300.0


class Cluster:
    """A cluster by name; the constructor starts nothing and finds a running one.

    Args:
        name: 1 to 32 letters, digits, dashes; two clusters with different names live side by side.
        nodes: what `up` starts with.
        detached: processes outlive this one, until `down`; otherwise they die with the thread that started them.
        lost_pods_after_s: how long after its node is lost a pod is deleted (the default toleration of pods).
        report: receives each step of the start.
    """

    def __init__(
        self,
        name: str = "stoker",
        nodes: Sequence[NodeSpec] = (),
        *,
        detached: bool = False,
        lost_pods_after_s: int = 5,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        check_name("name", name)
        self.name = name
        self.folder = binaries.cache() / "clusters" / name
        self._claims = binaries.cache() / "clusters" / ".networks"
        self._specs = tuple(nodes) or default_nodes()
        self._detached = detached
        self._lost_pods_after_s = lost_pods_after_s
        self._report = report

    def __enter__(self) -> "Cluster":
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # life

    def up(self) -> None:
        """Start everything and wait until every node is Ready.

        The remains of an earlier run with this name are removed first.

        Raises:
            Unprepared: if the machine lacks something; nothing has been started then.
            ClusterError: if it runs already, or a part does not come up (nothing of it is left then).
        """
        preflight.check()
        if self.running:
            raise ClusterError(f"cluster {self.name} runs already; stop it with: make cluster-down NAME={self.name}")
        self.down()
        binaries.build()
        try:
            self._start()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Stop everything and remove every trace: processes, mounts, cgroups, bridge, routes, state.

        Built programs and images stay in the cache.
        """
        if self.folder.exists():
            network.claim(self._claims, self.name)  # released below; it is there, unless the note was removed
        for node in self.nodes.values():
            node.kill()
        self._dns.stop(grace_s=0)
        if (self.folder / "control-plane").exists():
            self._plane().stop()
        groups.remove(groups.find(f"stoker-{self.name}.*"))
        if (claimed := network.claimed(self._claims, self.name)) is not None:
            network.remove_bridge(claimed)
        for node in self.nodes.values():
            node.remove()
        shutil.rmtree(self.folder, ignore_errors=True)
        network.release(self._claims, self.name)

    @property
    def running(self) -> bool:
        """Return whether the API server runs."""
        return (self.folder / "control-plane").exists() and self._plane().api_server.alive

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        addresses = network.claim(self._claims, self.name)
        network.raise_bridge(addresses)
        archive = busybox_archive(binaries.cache())
        nodes = [self._enlist(spec) for spec in self._specs]
        with ThreadPoolExecutor() as threads:
            stores = [threads.submit(node.prepare, ImageStore.default()) for node in nodes]
            plane = self._plane()
            plane.start_storage()
            for node, store in zip(nodes, stores, strict=True):
                store.result()
                self._report(f"{node.name} has its image store")
                node.open(plane, binaries.bin_folder(), [archive], detached=self._detached)
            plane.start()
            self._report("the control plane answers")
        for node in nodes:
            node.join()
        self._start_dns()
        with self.api() as api:
            volumes.provide(api, self.folder / "volumes")
            self._report("shared volumes are there")
            for node in nodes:
                self._welcome(api, node)
        self._route_services()

    # nodes

    @property
    def nodes(self) -> dict[str, Node]:
        """Return the nodes by name; a killed node stays until it is removed."""
        found = {}
        for file in sorted((self.folder / "nodes").glob("*/spec.json")):
            note = json.loads(file.read_text())
            [spec] = parse_nodes([note["spec"]])
            found[spec.name] = Node(file.parent, self.name, spec, note["slot"], self.network)
        return found

    def add_node(self, spec: NodeSpec) -> Node:
        """Add a node, or replace the machine of a killed one; return once it is Ready and offers its resources."""
        if (earlier := self.nodes.get(spec.name)) is not None:
            if earlier.alive:
                raise ClusterError(f"node {spec.name} is there already")
            self.remove_node(spec.name)
        node = self._enlist(spec)
        try:
            node.prepare(ImageStore.default())
            node.open(
                self._plane(), binaries.bin_folder(), [busybox_archive(binaries.cache())], detached=self._detached
            )
            node.join()
            with self.api() as api:
                self._welcome(api, node)
        except BaseException:
            self.remove_node(spec.name)
            raise
        self._route_services()
        return node

    def kill_node(self, name: str) -> None:
        """End every process of the node at once, as a power cut does; the API server only misses its heartbeats."""
        self._node(name).kill()
        self._route_services()

    def remove_node(self, name: str) -> None:
        """Remove a node for good, with its Node object and its disk."""
        node = self._node(name)
        node.remove()
        with self.api() as api:
            api.delete(f"/api/v1/nodes/{name}")
        self._route_services()

    def _node(self, name: str) -> Node:
        if (node := self.nodes.get(name)) is None:
            raise ClusterError(f"cluster {self.name} has no node {name}; it has {', '.join(self.nodes) or 'none'}")
        return node

    def _enlist(self, spec: NodeSpec) -> Node:
        """Record a new node with the lowest free slot."""
        taken = {node.slot for node in self.nodes.values()}
        slot = next((slot for slot in range(MAX_NODES) if slot not in taken), None)
        if slot is None:
            raise ClusterError(f"cluster {self.name} has {MAX_NODES} nodes, there is no address for another")
        folder = self.folder / "nodes" / spec.name
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(json.dumps({"slot": slot, "spec": dataclasses.asdict(spec)}))
        return Node(folder, self.name, spec, slot, self.network)

    def _welcome(self, api: Api, node: Node) -> None:
        """Wait until the node is Ready, then set labels and extended resources on its Node object."""
        path = f"/api/v1/nodes/{node.name}"
        if not wait_until(lambda: _is_ready(api.get(path)), timeout_s=READY_S, every_s=0.1):
            raise ClusterError(f"node {node.name} is not Ready after {READY_S:.0f} s; {node.trouble()}")
        if node.spec.labels:
            api.merge(path, {"metadata": {"labels": node.spec.labels}})
        if offered := node.spec.extended_resources:
            api.merge(f"{path}/status", {"status": {"capacity": offered, "allocatable": offered}})
        self._report(f"{node.name} is Ready")

    def _route_services(self) -> None:
        """Route this machine's requests to Services through a running node."""
        living = [node.slot for node in self.nodes.values() if node.alive]
        network.route_services(self.network, min(living, default=None))

    # use

    @property
    def network(self) -> Network:
        """Return the cluster's addresses.

        Raises:
            ClusterError: if it does not run.
        """
        found = network.claimed(self._claims, self.name)
        if found is None:
            raise ClusterError(f"cluster {self.name} does not run; start it with: make cluster NAME={self.name}")
        return found

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of an administrator."""
        return self._plane().kubeconfig

    @property
    def plane(self) -> ControlPlane:
        """The control plane: kubeconfigs of other users, restarts of the API server."""
        return self._plane()

    def api(self) -> Api:
        """Return the API as an administrator."""
        return Api(self._plane().url, self.kubeconfig.parent)

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 400) -> str:
        """Run kubectl and return its output.

        Raises:
            ClusterError: if it fails, with its output.
        """
        command = [str(binaries.bin_folder() / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """Return the data of `kubectl get ... -o json`."""
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def volume(self, namespace: str, claim: str) -> Path:
        """Return the folder on this machine behind a bound claim.

        It stays readable after the claim is gone, until `down`.
        """
        name = self.get("persistentvolumeclaim", claim, f"--namespace={namespace}")["spec"].get("volumeName")
        if not name:
            raise ClusterError(f"claim {namespace}/{claim} is not bound yet")
        return self.folder / "volumes" / str(name)

    @contextmanager
    def forward(self, namespace: str, target: str, port: int) -> Iterator[str]:
        """Yield `http://127.0.0.1:...`, the address of a `kubectl port-forward` to `target` (`service/x`, `pod/y`)."""
        command = [str(binaries.bin_folder() / "kubectl"), "--kubeconfig", str(self.kubeconfig)]
        with PortForward(command, namespace, target, port) as tunnel:
            yield tunnel.url

    # parts

    def _plane(self) -> ControlPlane:
        addresses = self.network
        return ControlPlane(
            self.folder / "control-plane",
            self.name,
            address=addresses.gateway,
            service_range=addresses.services,
            controllers=True,
            scheduler=True,
            detached=self._detached,
            api_server_flags=(
                f"--default-not-ready-toleration-seconds={self._lost_pods_after_s}",
                f"--default-unreachable-toleration-seconds={self._lost_pods_after_s}",
            ),
            controller_flags=(f"--node-monitor-grace-period={LOST_AFTER_S}s", "--node-monitor-period=1s"),
        )

    @property
    def _dns(self) -> Program:
        return Program("coredns", self.folder / "dns")

    def _start_dns(self) -> None:
        config = self._plane().kubeconfig_of("cluster-dns", ("system:masters",))
        file = self.folder / "dns" / "Corefile"
        file.parent.mkdir(exist_ok=True)
        file.write_text(settings.corefile(self.network.gateway, config))
        self._dns.start([str(binaries.bin_folder() / "coredns"), "-conf", str(file)], detached=self._detached)


def _is_ready(node: dict[str, Any] | None) -> bool:
    conditions = (node or {}).get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
