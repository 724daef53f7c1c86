"""The way to the tiers below the host tier, as configured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stoker.engine.config import EngineConfig, StoreConfig
from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_files import BlockFiles
from stoker.engine.core.disk.block_folder import file_bytes
from stoker.engine.core.disk.cold_tier import ColdTier
from stoker.engine.core.disk.cold_traffic import ColdTraffic, WaitForAny, wait_for_any
from stoker.engine.core.disk.disk_tier import DiskTier
from stoker.engine.core.disk.lane_home import disk_tier
from stoker.engine.core.disk.rank_files import RankFiles
from stoker.engine.core.disk.rank_lanes import RankLanes, rank_lanes_tier
from stoker.engine.core.disk.shared_home import SharedHome
from stoker.engine.core.disk.shared_index import SharedIndex
from stoker.engine.core.disk.store_tier import StoreTier
from stoker.engine.core.host_index import HostIndex
from stoker.engine.core.tier_costs import TierCosts
from stoker.engine.transfer.fingerprint import digest_of
from stoker.pod.config_file import ConfigError


def open_cold_traffic(
    config: EngineConfig, identity: BlockIdentity, index: HostIndex, carrier: Callable[[], BlockFiles],
    costs: TierCosts, clock: Callable[[], float], wait: WaitForAny = wait_for_any,
) -> ColdTraffic:  # fmt: skip
    """Begin to open the configured tiers. `carrier`: makes what carries blocks to and from the files of one volume.

    Raises:
        ConfigError: a size does not hold one block.
    """
    tiers: list[ColdTier] = []
    if config.cache.disk is not None:
        tiers.append(own_disk(config, Path(config.cache.disk.path), identity, carrier(), clock))
    if config.cache.store is not None:
        tiers.append(store_tier(config.cache.store, identity, carrier, clock))
    layout = identity.layout
    return ColdTraffic(index, tiers, costs, layout.block_size, layout.block_bytes, clock, wait)


def own_disk(
    config: EngineConfig, path: Path, identity: BlockIdentity, blocks: BlockFiles, clock: Callable[[], float]
) -> DiskTier:
    """Begin to open the disk of this engine, or those of its pods. Raises ConfigError: one does not hold a block."""
    if config.replica.pods == 1:
        return disk_tier(path, identity, count_disk_blocks(config, file_bytes(identity, blocks.parts)), blocks, clock)
    assert isinstance(blocks, RankFiles), "several pods have several ranks"
    lanes = RankLanes(blocks.calls, blocks.layouts, blocks.root)
    size = lanes.file_bytes(identity, config.replica.pods)
    return rank_lanes_tier(path, identity, lanes, count_disk_blocks(config, size), size, clock)


def store_name(store: StoreConfig, identity: BlockIdentity) -> str:
    """The name of the blocks that an engine can use in its store: equal for engines that share them."""
    return digest_of({"root": identity.root.hex(), "paths": sorted(store.paths)})[:16]


def count_disk_blocks(config: EngineConfig, size: int) -> int:
    """Blocks of a size that one core may keep on the disk."""
    disk = config.cache.disk
    assert disk is not None, "there is one"
    share = disk.bytes // config.parallelism.data
    if share < size:
        copies = f" for each of {config.parallelism.data} cores" if config.parallelism.data > 1 else ""
        raise ConfigError(f"cache.disk.bytes must hold a file of {size} bytes{copies}, got {disk.bytes}")
    return share // size


def store_tier(
    store: StoreConfig, identity: BlockIdentity, carrier: Callable[[], BlockFiles], clock: Callable[[], float]
) -> StoreTier:
    """Begin to open the volumes that engines share. Raises ConfigError: a size does not hold one block."""
    volumes = {path: volume(Path(path), store, identity, carrier(), clock) for path in store.paths}
    return StoreTier(volumes, store.replicas)


def volume(
    path: Path, store: StoreConfig, identity: BlockIdentity, blocks: BlockFiles, clock: Callable[[], float]
) -> DiskTier:
    """Begin to open one of them. Raises ConfigError."""
    size = file_bytes(identity, blocks.parts)
    if store.bytes < size:
        raise ConfigError(f"cache.store.bytes must hold a file of {size} bytes, got {store.bytes}")
    max_blocks = store.bytes // size
    home = SharedHome(path, identity, max_blocks, store.ttl_s)
    return DiskTier(home, SharedIndex(max_blocks), blocks, size, clock)
