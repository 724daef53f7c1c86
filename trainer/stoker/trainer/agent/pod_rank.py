"""The ranks of this pod: their numbers in the gang, the rendezvous address, and the environment of each.

Values that never change, made by `program` at the start of a pod.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import TrainerConfig

MASTER_PORT = 29500
EVERYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class PodRank:
    """This pod's number in the gang, its ranks and the rendezvous address. Constant for the pod's life."""

    node_rank: int
    nodes: int
    ranks_per_node: int
    pod_uid: str
    master_addr: str
    master_port: int

    @property
    def first_rank(self) -> int:
        return self.node_rank * self.ranks_per_node

    @property
    def ranks(self) -> range:
        """Global ranks of this pod's processes."""
        return range(self.first_rank, self.first_rank + self.ranks_per_node)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def find_pod_rank(config: TrainerConfig, environment: Mapping[str, str]) -> PodRank:
    """Read this pod's numbers from the environment.

    A run of one pod needs no variable; its `master_port` is then 0, for any free port.

    Raises:
        ConfigError: a variable is missing or does not fit `gang`.
    """
    alone = config.gang.nodes == 1
    host = "127.0.0.1" if config.listen.host in EVERYWHERE else config.listen.host
    node_rank = _number(environment, "STOKER_NODE_RANK", 0 if alone else None)
    if node_rank >= config.gang.nodes:
        raise ConfigError(
            f"STOKER_NODE_RANK is {node_rank}, gang.nodes {config.gang.nodes} allows 0 to {config.gang.nodes - 1}"
        )
    if not alone and "MASTER_ADDR" not in environment:
        raise ConfigError(f"MASTER_ADDR is missing; gang.nodes {config.gang.nodes} needs the address of node 0")
    return PodRank(
        node_rank=node_rank,
        nodes=config.gang.nodes,
        ranks_per_node=config.gang.ranks_per_node,
        pod_uid=environment.get("STOKER_POD_UID", ""),
        master_addr=environment.get("MASTER_ADDR", host),
        master_port=_number(environment, "MASTER_PORT", 0 if alone else MASTER_PORT),
    )


def open_rendezvous(config: TrainerConfig, pod: PodRank) -> socket.socket | None:
    """The rendezvous socket of the gang, on node 0; None on other nodes.

    It is bound to `listen.host`, because torch's own socket would listen on every address.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if pod.node_rank != 0:
        return None
    family = socket.AF_INET6 if ":" in config.listen.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.listen.host, pod.master_port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the rendezvous cannot listen on {config.listen.host}:{pod.master_port}: {error.strerror}"
        ) from error
    listener.listen(2048)
    return listener


def rank_environment(
    config: TrainerConfig, pod: PodRank, local_rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one rank: the agent's own, its rank numbers, its share of GPUs and cores.

    Raises:
        ConfigError: the pod has fewer GPUs than ranks.
    """
    own = {
        "RANK": str(pod.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(pod.world_size),
        "LOCAL_WORLD_SIZE": str(pod.ranks_per_node),
        "MASTER_ADDR": pod.master_addr,
        "MASTER_PORT": str(pod.master_port),
        "STOKER_NODE_RANK": str(pod.node_rank),
        "PYTHONUNBUFFERED": "1",
    }
    threads = max(1, _usable_cores() // pod.ranks_per_node)
    gpu = _gpu(config, pod, local_rank, environment)
    return {
        "OMP_NUM_THREADS": str(threads),
        **environment,
        **own,
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
    }


def _gpu(config: TrainerConfig, pod: PodRank, local_rank: int, environment: Mapping[str, str]) -> str | None:
    """`CUDA_VISIBLE_DEVICES` of one rank, one GPU for each; None leaves it unset (a machine without GPUs)."""
    if config.device == "cpu":
        return ""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank) if config.device == "cuda" or Path("/dev/nvidia0").exists() else None
    devices = [device for device in visible.split(",") if device]
    if not devices and config.device == "auto":
        return ""
    if len(devices) < pod.ranks_per_node:
        raise ConfigError(
            f"workers.ranksPerPod {pod.ranks_per_node} needs as many GPUs, CUDA_VISIBLE_DEVICES has {devices}"
        )
    return devices[local_rank]


def _usable_cores() -> int:
    """Cores that this pod may use: its affinity, cut by the limit of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.is_file():
        quota, period = limit.read_text().split()[:2]
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _number(environment: Mapping[str, str], name: str, default: int | None) -> int:
    value = environment.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"{name} is missing; a gang of several pods needs it")
        return default
    if not value.isdecimal():
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return int(value)
