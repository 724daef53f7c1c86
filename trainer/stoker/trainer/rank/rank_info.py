"""The numbers of one rank in its gang, from the environment that the agent sets.

Immutable. Read once by the rank's `main`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import TrainerConfig


@dataclass(frozen=True)
class RankInfo:
    """The numbers of one rank in its gang, and where the gang meets."""

    rank: int
    world_size: int
    ranks_per_node: int
    master_addr: str
    master_port: int


def find_rank_info(config: TrainerConfig, environment: Mapping[str, str]) -> RankInfo:
    """Read the variables that the agent sets. Without them: the only rank of a run.

    Raises:
        ConfigError: a variable is no number, or does not fit `gang`.
    """
    try:
        info = RankInfo(
            rank=int(environment.get("RANK", "0")),
            world_size=int(environment.get("WORLD_SIZE", "1")),
            ranks_per_node=config.gang.ranks_per_node,
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(environment.get("MASTER_PORT", "0")),
        )
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers: {error}") from error
    if info.world_size != config.gang.world_size or not 0 <= info.rank < info.world_size:
        raise ConfigError(
            f"RANK {info.rank} of WORLD_SIZE {info.world_size} does not fit workers: {config.gang.nodes} replicas x "
            f"{config.gang.ranks_per_node} ranksPerPod = {config.gang.world_size}"
        )
    return info
