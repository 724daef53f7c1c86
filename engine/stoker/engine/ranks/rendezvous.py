"""The ranks' process group: Gloo on the CPU, NCCL on GPUs. They meet over TCP: on the loopback interface where all are
on this machine, else on that over which a rank reaches the leader's pod.

Called once by each rank. The group is torch's default one, so a process holds one engine of several ranks at a time.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT = timedelta(seconds=180)
"""Longest wait for the ranks to meet. Ranks that end or fall silent are noticed earlier, by their links."""
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
"""Longest wait of ranks for each other inside of a step; a step without progress ends the replica earlier."""
NCCL_DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_HIGH_PRIORITY": "1"}
"""Unless the environment has them. NVLink multicast needs a healthy fabric manager, and its failure takes all GPUs of
the host down. Without priority a sum beside the products of the other half waits until they leave it room, and takes
twice as long."""
NCCL_ON_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo"}


class MeetingPoint:
    """The listener at which the ranks meet, open until rank 0 has joined."""

    def __init__(self, host: str = LOOPBACK) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host = host
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]

    def join(self, size: int, device: str) -> ProcessGroup:
        """Join the group as rank 0. Returns when all ranks have joined."""
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self.host,
            self.port,
            world_size=size,
            is_master=True,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        return _group(store, 0, size, device, self.host, 0)

    def close(self) -> None:
        """Close the listener, unless a rank has joined. May be called twice."""
        self._listener.close()


def join(
    rank: int, size: int, device: str, meeting: tuple[str, int], host: str = LOOPBACK, local_rank: int | None = None
) -> ProcessGroup:
    """Join the group as a further rank.

    Args:
        meeting: host and port at which rank 0 waits.
        host: this rank's own address, at which others reach it.
        local_rank: number of its GPU in this pod; None: its rank.
    """
    store = dist.TCPStore(*meeting, world_size=size, is_master=False, timeout=JOIN_TIMEOUT)  # type: ignore[attr-defined]
    return _group(store, rank, size, device, host, rank if local_rank is None else local_rank)


def _group(store: Any, rank: int, size: int, device: str, host: str, local_rank: int) -> ProcessGroup:
    if device == "cuda":
        for name, value in (NCCL_DEFAULTS | (NCCL_ON_LOOPBACK if host == LOOPBACK else {})).items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT, pg_options=_gloo(host)
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _gloo(host: str) -> Any:
    """Options of Gloo for the interface of this address."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = COLLECTIVE_TIMEOUT
    return options
