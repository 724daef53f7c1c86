"""The process group of all ranks (Gloo on the CPU, NCCL on GPUs), and device and threads of this one.

Called once by the rank's `main`, which also ends the group. Every other module gets the group passed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.rank_info import RankInfo


def choose_device(config: TrainerConfig) -> torch.device:
    """The device of this rank. The agent makes one GPU visible to each rank, so it is always number 0.

    Raises:
        ConfigError: a GPU is configured and none is visible.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device cuda: no GPU is visible (allowed here: cpu, auto)")
    return torch.device("cuda", 0)


def order_launches(config: TrainerConfig, environment: MutableMapping[str, str]) -> None:
    """Let the device start kernels in the order of their launches, where tokens travel beside products.

    With several queues a product that was launched behind an exchange takes the whole device first. To be called before
    CUDA starts; the environment may name another number of queues.
    """
    if config.parallelism.tensor > 1 and config.parallelism.sequence_parallel:
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_threads(config: TrainerConfig) -> None:
    """Use one intra-op thread in deterministic modes, because the order of large sums depends on their number.

    On GPUs it also makes torch and our kernels choose the ordered variant of each operation.
    """
    if config.training.deterministic == "Off":
        return
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # would write every new buffer once more


NCCL_DEFAULTS = {"NCCL_NVLS_ENABLE": "0"}
"""NVLink multicast is off unless the environment turns it on.

Our collectives (all-to-all, all-gather) do not gain from it. It needs a healthy fabric manager, and its failure takes
all GPUs of the host down.
"""


@contextmanager
def process_group(
    config: TrainerConfig, info: RankInfo, device: torch.device, listener: socket.socket | None
) -> Iterator[None]:
    """Join the other ranks; a single rank needs no group.

    `listener`: the rendezvous socket that the agent opened, on global rank 0.
    """
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
    # Not after an error: NCCL destroys groups together, and the other ranks are in the middle of a step. The exit of
    # the process does it.
    dist.destroy_process_group()


def set_network(info: RankInfo) -> None:
    """Set the network variables of the backends, unless the environment has them."""
    if _is_loopback(info.master_addr):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)


def collective_timeout(config: TrainerConfig) -> timedelta:
    """The timeout of collectives: longer than any deadline, because only the agent ends a run without progress."""
    phases = config.deadlines
    return timedelta(
        seconds=2 * max(phases.load_s, phases.first_step_s, phases.step_s, phases.save_s, phases.validation_s)
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except OSError:
        return False
