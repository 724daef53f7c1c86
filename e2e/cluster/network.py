"""The addresses of one cluster: a /16 of its own, claimed while the cluster lives, with one bridge on this machine.

10.N.0.1          this machine's end of the bridge: the API server and the cluster's DNS
10.N.0.10+slot    nodes
10.N.64+slot.0/24 the pods of a node
10.N.128.0/20     Services
"""

import ipaddress
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

FIRST, LAST = 200, 231
MAX_NODES = 32


@dataclass(frozen=True)
class Network:
    """Names and addresses of the cluster with the second number `octet`; no I/O."""

    octet: int

    @property
    def everything(self) -> str:
        """The whole range."""
        return f"10.{self.octet}.0.0/16"

    @property
    def bridge(self) -> str:
        """The bridge's name on this machine."""
        return f"stk{self.octet}"

    @property
    def gateway(self) -> str:
        """This machine's address in the cluster."""
        return f"10.{self.octet}.0.1"

    @property
    def services(self) -> str:
        """The range of Service addresses."""
        return f"10.{self.octet}.128.0/20"

    @property
    def pods(self) -> str:
        """The range of all pods."""
        return f"10.{self.octet}.64.0/18"

    def node(self, slot: int) -> str:
        """Return a node's address."""
        return f"10.{self.octet}.0.{10 + slot}"

    def pods_of(self, slot: int) -> str:
        """Return the pod range of one node."""
        return f"10.{self.octet}.{64 + slot}.0/24"

    def link(self, slot: int) -> str:
        """Return the name of this machine's end of a node's cable."""
        return f"{self.bridge}-{slot}"


def claim(folder: Path, cluster: str) -> Network:
    """Claim a network for `cluster` by a file in `folder`, until `release`.

    Raises:
        ClusterError: if all are taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (mine := claimed(folder, cluster)) is not None:
        return mine
    taken = _routed()
    for octet in range(FIRST, LAST + 1):
        network = Network(octet)
        if any(ipaddress.ip_network(network.everything).overlaps(other) for other in taken):
            continue
        try:
            with (folder / str(octet)).open("x") as file:
                file.write(cluster)
        except FileExistsError:
            continue
        return network
    raise ClusterError(f"every network from 10.{FIRST}.0.0/16 to 10.{LAST}.0.0/16 is taken; claims are in {folder}")


def claimed(folder: Path, cluster: str) -> Network | None:
    """Return the network of `cluster`, or None."""
    return next(
        (Network(octet) for octet in range(FIRST, LAST + 1) if _claimed_by(folder / str(octet)) == cluster), None
    )


def release(folder: Path, cluster: str) -> None:
    """Release the cluster's network."""
    if (mine := claimed(folder, cluster)) is not None:
        (folder / str(mine.octet)).unlink()


def raise_bridge(network: Network) -> None:
    """Create the bridge, with this machine on it.

    Addresses without a node are unreachable and do not leave by the default route.
    """
    _ip("link", "add", network.bridge, "type", "bridge")
    _ip("address", "add", f"{network.gateway}/24", "dev", network.bridge)
    _ip("link", "set", network.bridge, "up")
    _ip("route", "replace", "unreachable", network.everything, "metric", "4000")


def remove_bridge(network: Network) -> None:
    """Remove the bridge and, with it, every route over it."""
    for arguments in (
        ("link", "delete", network.bridge),
        ("route", "delete", "unreachable", network.everything, "metric", "4000"),
    ):
        subprocess.run(["ip", *arguments], capture_output=True, check=False)


def connect(network: Network, slot: int, pid: int) -> None:
    """Connect the bridge with the network namespace of process `pid` (there: `eth0`) and route the node's pods."""
    _ip("link", "add", network.link(slot), "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _ip("link", "set", network.link(slot), "master", network.bridge, "up")
    _ip("route", "replace", network.pods_of(slot), "via", network.node(slot), "dev", network.bridge)


def disconnect(network: Network, slot: int) -> None:
    """Remove the work of `connect`; missing parts are no error."""
    for arguments in (("link", "delete", network.link(slot)), ("route", "delete", network.pods_of(slot))):
        subprocess.run(["ip", *arguments], capture_output=True, check=False)


def route_services(network: Network, slot: int | None) -> None:
    """Route this machine's requests to Services through one node, or through none."""
    if slot is None:
        subprocess.run(["ip", "route", "delete", network.services], capture_output=True, check=False)
    else:
        _ip("route", "replace", network.services, "via", network.node(slot), "dev", network.bridge)


def _routed() -> list[ipaddress.IPv4Network]:
    routes = json.loads(_ip("-json", "-4", "route", "show"))
    return [ipaddress.IPv4Network(route["dst"], strict=False) for route in routes if route["dst"] != "default"]


def _claimed_by(file: Path) -> str | None:
    try:
        return file.read_text()
    except FileNotFoundError:
        return None


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
