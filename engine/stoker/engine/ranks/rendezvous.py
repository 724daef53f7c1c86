"""The ranks' process group: Gloo on the CPU, NCCL on GPUs. They meet over TCP on this machine's loopback interface.

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

HOST = "127.0.0.1"
JOIN_TIMEOUT = timedelta(seconds=180)
"""Longest wait for the ranks to meet. Ranks that end or fall silent are noticed earlier, by their links."""
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
"""Longest wait of ranks for each other inside of a step; a step without progress ends the replica earlier."""
NCCL_DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
"""Unless the environment has them. NVLink multicast needs a healthy fabric manager, and its failure takes all GPUs of
the host down."""


class MeetingPoint:
    """The listener at which the ranks meet, open until rank 0 has joined."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]

    def join(self, size: int, device: str) -> ProcessGroup:
        """Join the group as rank 0. Returns when all ranks have joined."""
        store = dist.TCPStore(  # type: ignore[attr-defined]
            HOST,
            self.port,
            world_size=size,
            is_master=True,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        return _group(store, 0, size, device)

    def close(self) -> None:
        """Close the listener, unless a rank has joined. May be called twice."""
        self._listener.close()


def join(rank: int, size: int, device: str, port: int) -> ProcessGroup:
    """Join the group as a further rank."""
    store = dist.TCPStore(HOST, port, world_size=size, is_master=False, timeout=JOIN_TIMEOUT)  # type: ignore[attr-defined]
    return _group(store, rank, size, device)


def _group(store: Any, rank: int, size: int, device: str) -> ProcessGroup:
    if device == "cuda":
        for name, value in NCCL_DEFAULTS.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT, pg_options=_loopback()
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _loopback() -> Any:
    """Options of Gloo for this machine's loopback interface."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = COLLECTIVE_TIMEOUT
    return options
