"""The way to the tiers below the host tier, as configured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from stoker.engine.config import EngineConfig
from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_folder import file_bytes
from stoker.engine.core.disk.cold_tier import ColdTier
from stoker.engine.core.disk.cold_traffic import ColdTraffic
from stoker.engine.core.disk.disk_tier import DiskTier
from stoker.engine.core.host_index import HostIndex
from stoker.engine.core.tier_costs import TierCosts
from stoker.pod.config_file import ConfigError


def open_cold_traffic(
    config: EngineConfig, identity: BlockIdentity, index: HostIndex, slots_SN: np.ndarray, costs: TierCosts,
    clock: Callable[[], float],
) -> ColdTraffic:  # fmt: skip
    """Begin to open the configured tiers. `slots_SN`: the host tier's memory.

    Raises:
        ConfigError: a size does not hold one block.
    """
    tiers: list[ColdTier] = []
    if config.cache.disk is not None:
        max_blocks = count_disk_blocks(config, identity)
        tiers.append(DiskTier(Path(config.cache.disk.path), identity, max_blocks, slots_SN, clock))
    layout = identity.layout
    return ColdTraffic(index, tiers, costs, layout.block_size, layout.block_bytes, clock)


def count_disk_blocks(config: EngineConfig, identity: BlockIdentity) -> int:
    """Blocks that one core may keep on the disk."""
    disk, size = config.cache.disk, file_bytes(identity)
    assert disk is not None, "there is one"
    share = disk.bytes // config.parallelism.data
    if share < size:
        copies = f" for each of {config.parallelism.data} cores" if config.parallelism.data > 1 else ""
        raise ConfigError(f"cache.disk.bytes must hold a file of {size} bytes{copies}, got {disk.bytes}")
    return share // size
