"""The process group that joins this rank with the others, Gloo on the CPU and NCCL on GPUs, and the device and threads of this rank."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.rank_info import RankInfo


def choose_device(config: TrainerConfig) -> torch.device:
    """The agent shows each rank one GPU, so a GPU is always number 0. Raises ConfigError when one is asked for and none is there."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device cuda: no GPU is visible (allowed here: cpu, auto)")
    return torch.device("cuda", 0)


def set_threads(config: TrainerConfig) -> None:
    """One intra-op thread in the deterministic modes: the order of large sums depends on the number of threads. On GPUs torch and our kernels then choose the ordered variant of each."""
    if config.training.deterministic == "Off":
        return
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it writes every fresh buffer once more


NCCL_DEFAULTS = {"NCCL_NVLS_ENABLE": "0"}
"""NVLink multicast stays off unless the environment turns it on: our collectives (all-to-all, all-gather) gain nothing from it, it needs a healthy fabric manager, and where it fails it takes the host's GPUs with it."""


@contextmanager
def process_group(
    config: TrainerConfig, info: RankInfo, device: torch.device, listener: socket.socket | None
) -> Iterator[None]:
    """Join the other ranks. `listener`: the rendezvous socket, on global rank 0, when the agent has opened it. No group for one rank."""
    if info.world_size == 1:
        yield
        return
    set_network(info)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        info.master_addr,
        info.master_port,
        world_size=info.world_size,
        is_master=info.rank == 0,
        timeout=timedelta(seconds=config.deadlines.load_s),
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=collective_timeout(config),
        device_id=device if device.type == "cuda" else None,
    )
    yield
    # Not after an error: NCCL's ranks leave together, and the others are in the middle of a step. A process that ends leaves by itself.
    dist.destroy_process_group()


def set_network(info: RankInfo) -> None:
    """What the backends read from the environment, where nobody has said otherwise."""
    if _is_loopback(info.master_addr):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)


def collective_timeout(config: TrainerConfig) -> timedelta:
    """The agent judges progress and kills; a collective only must not give up before it."""
    phases = config.deadlines
    return timedelta(
        seconds=2 * max(phases.load_s, phases.first_step_s, phases.step_s, phases.save_s, phases.validation_s)
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except OSError:
        return False
