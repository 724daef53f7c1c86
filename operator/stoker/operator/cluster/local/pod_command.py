"""The command of a pod as this machine runs it: volumes made, paths and names rewritten, devices chosen.

Called by `pod_life` at each start of a container. It writes the pod's volumes and starts no process.
"""

from __future__ import annotations

from pathlib import Path

from stoker.operator.cluster.local.gpus import wanted_gpus
from stoker.operator.cluster.local.node import Node
from stoker.operator.cluster.local.pod_address import host_of
from stoker.operator.cluster.local.pod_environment import container_command, container_environment, with_interpreter
from stoker.operator.cluster.local.process import Command
from stoker.operator.cluster.local.rewrite import Rewriter
from stoker.operator.cluster.local.volumes import PodVolumes
from stoker.operator.domain.plan import Object


def prepare_command(pod: Object, node: Node, volumes: PodVolumes) -> Command:
    """Make the pod's volumes, working folder and empty log; return what to start.

    Raises:
        MountError: a ConfigMap, Secret, claim or key is missing.
        OSError: a folder or file cannot be written.
    """
    rewriter = pod_rewriter(pod, node, volumes)
    volumes.prepare(rewriter.file)
    folder = node.folders.pod(pod) / "cwd"
    folder.mkdir(mode=0o700, exist_ok=True)
    own = container_environment(pod, node.addresses.ip(host_of(pod)), node.objects.find, int(node.capacity["cpu"]))
    working = pod["spec"]["containers"][0].get("workingDir")
    return Command(
        argv=with_interpreter([rewriter.text(word) for word in container_command(pod, own)], node.python),
        environment={**node.environment, **_machine_environment(pod, node), **rewriter.environment(own)},
        folder=Path(rewriter.text(working)) if working else folder,
        log=_empty_log(pod, node),
    )


def pod_rewriter(pod: Object, node: Node, volumes: PodVolumes) -> Rewriter:
    """Build the rewriter of the pod's paths and of the names that it may use."""
    namespace = pod["metadata"]["namespace"]
    services = node.objects.of_kind("Service", namespace)
    return Rewriter(
        namespace=namespace,
        own=host_of(pod),
        paths=volumes.paths(),
        addresses=node.addresses,
        subdomain=pod["spec"].get("subdomain", ""),
        services=frozenset(service["metadata"]["name"] for service in services),
    )


def _machine_environment(pod: Object, node: Node) -> dict[str, str]:
    """Variables that the node decides: devices, and the interface between pods."""
    metadata = pod["metadata"]
    devices = node.gpus.take(metadata["uid"], wanted_gpus(pod)) or ()
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HOSTNAME": metadata["name"],
        "PYTHONUNBUFFERED": "1",
    }


def _empty_log(pod: Object, node: Node) -> Path:
    metadata = pod["metadata"]
    file = node.folders.log(metadata["namespace"], metadata["name"])
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    return file
