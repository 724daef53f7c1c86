"""The place of a core among the data-parallel ranks that share experts: its number, and where they meet.

Told by the program that starts the cores, in their environment. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.engine.config import EngineConfig

RANK, MEETING = "STOKER_DATA_RANK", "STOKER_DATA_MEETING"


@dataclass(frozen=True)
class DataPlace:
    """A core's place."""

    rank: int
    size: int
    meeting: Path
    """The socket at which data rank 0 waits for the others."""


def shares_experts(config: EngineConfig) -> bool:
    """Whether experts are dealt out over the data-parallel ranks, so that these compute the same steps."""
    return config.parallelism.data > 1 and config.parallelism.expert > config.parallelism.tensor


def data_environment(config: EngineConfig, number: int, folder: Path) -> Mapping[str, str]:
    """What a core's environment has beside others; nothing where data-parallel ranks share nothing."""
    return {RANK: str(number), MEETING: str(folder / "data")} if shares_experts(config) else {}


def find_data_place(config: EngineConfig, environment: Mapping[str, str]) -> DataPlace | None:
    """Read the core's place; None where it shares no experts."""
    if not shares_experts(config):
        return None
    return DataPlace(int(environment[RANK]), config.parallelism.data, Path(environment[MEETING]))
