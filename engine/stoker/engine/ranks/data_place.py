"""The place of a core among the data-parallel ranks that share experts: its number, and where they meet.

Told by the program that starts the cores, in their environment. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.engine.config import EngineConfig
from stoker.engine.key_file import read_key
from stoker.engine.ranks.pod_place import LEADER_PORT
from stoker.engine.ranks.pod_share import first_data_rank
from stoker.engine.shared_experts import data_ranks, shares_experts
from stoker.pod.config_file import ConfigError

RANK, MEETING = "STOKER_DATA_RANK", "STOKER_DATA_MEETING"


@dataclass(frozen=True)
class DataPlace:
    """A core's place."""

    rank: int
    size: int
    meeting: Path | tuple[str, int]
    """The socket at which data rank 0 waits for the others; host and port where they are in several pods."""
    key: bytes | None = None
    """By which ranks of several pods know each other."""
    host: str = ""
    """Address that rank 0 listens on, in several pods."""


def data_environment(
    config: EngineConfig, number: int, folder: Path, environment: Mapping[str, str]
) -> Mapping[str, str]:
    """What the environment of a core has beside the pod's; nothing where data-parallel ranks share nothing.

    Raises:
        ConfigError: a variable is missing or wrong.
    """
    if not shares_experts(config):
        return {}
    rank = first_data_rank(config, environment) + number
    if config.replica.data_ranks is None:
        return {RANK: str(rank), MEETING: str(folder / "data")}
    if not environment.get("MASTER_ADDR"):
        raise ConfigError("MASTER_ADDR is missing; data-parallel ranks in several pods need the address of pod 0")
    port = environment.get("MASTER_PORT", str(LEADER_PORT))
    return {RANK: str(rank), MEETING: f"{environment['MASTER_ADDR']}:{port}"}


def find_data_place(config: EngineConfig, environment: Mapping[str, str]) -> DataPlace | None:
    """Read the core's place; None where it shares no experts. Raises ConfigError."""
    if not shares_experts(config):
        return None
    rank, meeting = int(environment[RANK]), environment[MEETING]
    if config.replica.data_ranks is None:
        return DataPlace(rank, data_ranks(config), Path(meeting))
    assert config.replica.key_file is not None, "checked with the pod's share"
    host, _, port = meeting.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"MASTER_PORT must be a whole number, got {port!r}")
    key = read_key(config.replica.key_file, "replica.key_file")
    return DataPlace(rank, data_ranks(config), (host, int(port)), key, config.listen.host)
