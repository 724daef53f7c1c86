"""The names and ports of a pod inside the cluster. Pure.

Called wherever a pod is reached: `local_cluster`, `pod_life`, and the Services.
"""

from __future__ import annotations

from stoker.operator.cluster.local.addresses import Host
from stoker.operator.domain.plan import Object


def host_of(pod: Object) -> Host:
    """The pod's name in DNS."""
    metadata = pod["metadata"]
    return Host("pod", metadata["namespace"], pod["spec"].get("hostname") or metadata["name"])


def container_port(pod: Object, port: int | str) -> int:
    """A port given by number or by name.

    Raises:
        ValueError: the container has no port of that name.
    """
    if isinstance(port, int) or port.isdigit():
        return int(port)
    for known in pod["spec"]["containers"][0].get("ports") or ():
        if known.get("name") == port:
            return int(known["containerPort"])
    raise ValueError(f"pod {pod['metadata']['name']} has no port named {port!r}")
