"""Whether data-parallel ranks share experts, and how many there are. Pure; asked by the plan and by `ranks`."""

from __future__ import annotations

from stoker.engine.config import EngineConfig


def data_ranks(config: EngineConfig) -> int:
    """The data-parallel ranks of the replica, those in other pods included."""
    return config.replica.data_ranks or config.parallelism.data


def shares_experts(config: EngineConfig) -> bool:
    """Whether experts are dealt out over the data-parallel ranks, so that these compute the same steps."""
    return data_ranks(config) > 1 and config.parallelism.expert > config.parallelism.tensor
