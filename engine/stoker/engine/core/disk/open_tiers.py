"""The way to the tiers below the host tier, as configured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from stoker.engine.config import EngineConfig, StoreConfig
from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_folder import file_bytes
from stoker.engine.core.disk.cold_tier import ColdTier
from stoker.engine.core.disk.cold_traffic import ColdTraffic
from stoker.engine.core.disk.disk_tier import DiskTier
from stoker.engine.core.disk.lane_home import disk_tier
from stoker.engine.core.disk.shared_home import SharedHome
from stoker.engine.core.disk.shared_index import SharedIndex
from stoker.engine.core.disk.store_tier import StoreTier
from stoker.engine.core.host_index import HostIndex
from stoker.engine.core.tier_costs import TierCosts
from stoker.engine.transfer.fingerprint import digest_of
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
        tiers.append(disk_tier(Path(config.cache.disk.path), identity, max_blocks, slots_SN, clock))
    if config.cache.store is not None:
        tiers.append(store_tier(config.cache.store, identity, slots_SN, clock))
    layout = identity.layout
    return ColdTraffic(index, tiers, costs, layout.block_size, layout.block_bytes, clock)


def store_name(store: StoreConfig, identity: BlockIdentity) -> str:
    """The name of the blocks that an engine can use in its store: equal for engines that share them."""
    return digest_of({"root": identity.root.hex(), "paths": sorted(store.paths)})[:16]


def count_disk_blocks(config: EngineConfig, identity: BlockIdentity) -> int:
    """Blocks that one core may keep on the disk."""
    disk, size = config.cache.disk, file_bytes(identity)
    assert disk is not None, "there is one"
    share = disk.bytes // config.parallelism.data
    if share < size:
        copies = f" for each of {config.parallelism.data} cores" if config.parallelism.data > 1 else ""
        raise ConfigError(f"cache.disk.bytes must hold a file of {size} bytes{copies}, got {disk.bytes}")
    return share // size


def store_tier(
    store: StoreConfig, identity: BlockIdentity, slots_SN: np.ndarray, clock: Callable[[], float]
) -> StoreTier:
    """Begin to open the volumes that engines share. Raises ConfigError: a size does not hold one block."""
    size = file_bytes(identity)
    if store.bytes < size:
        raise ConfigError(f"cache.store.bytes must hold a file of {size} bytes, got {store.bytes}")
    max_blocks = store.bytes // size
    homes = {path: SharedHome(Path(path), identity, max_blocks, store.ttl_s) for path in store.paths}
    volumes = {path: DiskTier(home, SharedIndex(max_blocks), identity, slots_SN, clock) for path, home in homes.items()}
    return StoreTier(volumes, store.replicas)
