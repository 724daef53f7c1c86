"""Where the blocks and the landing zone of a rank are, for its ports and its store."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from stoker.engine.core.handover.device_store import DeviceStore
from stoker.engine.core.handover.host_store import HostStore
from stoker.engine.core.handover.office import BlockStore
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.transfer.cuda_memory import CudaMemory, DeviceBlocks
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.intake import Sums
from stoker.engine.transfer.layout import BlockLayout, Grid
from stoker.engine.transfer.local_blocks import LocalBlocks
from stoker.engine.transfer.rank_zone import DeviceRankZone, RankZone
from stoker.engine.transfer.zone_memory import SharedZone


class CellStore(Protocol):
    """One rank's part of the cache and of the landing zone."""

    def copy_cells(self, slots: Sequence[int], blocks: Sequence[int], cells: Grid) -> Sums: ...
    def cell_sums(self, blocks: Sequence[int], cells: Grid) -> Sums: ...


class BlockMemory(NamedTuple):
    """Where the blocks of an engine of one rank are."""

    local: np.ndarray | LocalBlocks
    zone: SharedZone
    store: BlockStore
    nvlinks: int = 0
    """Active NVLinks of the device."""


class RankMemory(NamedTuple):
    """Where those of one of several ranks are."""

    local: np.ndarray | LocalBlocks
    zone: SharedZone
    store: CellStore
    nvlinks: int = 0


def open_memory(
    runner: Runner, layout: BlockLayout, zone_blocks: int, plan: EnginePlan, clock: Callable[[], float]
) -> BlockMemory:
    """The memory of an engine's cache, with a zone beside it. Raises DeviceError."""
    cache_BN = _rows(runner)
    if plan.device == "cpu":
        zone = SharedZone(zone_blocks, layout.block_bytes, clock=clock, named=True)
        return BlockMemory(cache_BN.numpy(), zone, HostStore(zone.memory_SN, cache_BN.numpy(), layout))
    memory = CudaMemory(cache_BN.device, host_id())
    device_zone = DeviceZone(zone_blocks, layout.block_bytes, memory, clock=clock)
    return BlockMemory(
        DeviceBlocks(cache_BN, memory),
        device_zone,
        _device_store(memory, device_zone, cache_BN, layout, plan),
        memory.nvlinks,
    )


def open_rank_memory(runner: Runner, layout: BlockLayout, zone_blocks: int, plan: EnginePlan) -> RankMemory:
    """As `open_memory`, for one of several ranks: its leader keeps the states of the slots. Raises DeviceError."""
    cache_BN = _rows(runner)
    if plan.device == "cpu":
        zone = RankZone(zone_blocks, layout.block_bytes)
        return RankMemory(cache_BN.numpy(), zone, HostStore(zone.memory_SN, cache_BN.numpy(), layout))
    memory = CudaMemory(cache_BN.device, host_id())
    device_zone = DeviceRankZone(zone_blocks, layout.block_bytes, memory)
    return RankMemory(
        DeviceBlocks(cache_BN, memory),
        device_zone,
        _device_store(memory, device_zone, cache_BN, layout, plan),
        memory.nvlinks,
    )


def _rows(runner: Runner) -> torch.Tensor:
    """[blocks, block_bytes] uint8."""
    data = runner.cache.data
    return data.view(data.shape[0], -1).view(torch.uint8)


def _device_store(
    memory: CudaMemory, zone: DeviceZone, cache_BN: torch.Tensor, layout: BlockLayout, plan: EnginePlan
) -> DeviceStore:
    zone_SN = memory.tensor(zone.address, zone.num_slots, zone.slot_bytes)
    return DeviceStore(zone_SN, cache_BN, layout, fused=plan.kernels == "fused")


def host_id() -> str:
    """The same for all processes of one running system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
