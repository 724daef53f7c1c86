"""The share of a pod in a replica of several pods with data-parallel ranks.

A pod has several whole data ranks, or several pods have one. The pods of a data rank are what `pod_place` knows as the
pods of a replica: their first one answers requests, so the replica has as many endpoints as pods with a leader.

Pure; called by the program of a pod before anything else.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.engine.config import EngineConfig
from stoker.pod.config_file import ConfigError


def share_of_pod(config: EngineConfig) -> EngineConfig:
    """Return the configuration of the data ranks that this pod has, or has a part of.

    Raises:
        ConfigError: the pods cannot share the data ranks evenly.
    """
    pods, data = config.replica.pods, config.parallelism.data
    if pods == 1 or data == 1:
        return config
    if data % pods and pods % data:
        raise ConfigError(
            f"parallelism.data must be a divisor or a multiple of replica.pods with replica.pods {pods}, got {data}"
        )
    if config.replica.key_file is None:
        raise ConfigError(f"replica.key_file is needed with replica.pods {pods}")
    parallelism = config.parallelism.model_copy(update={"data": max(data // pods, 1)})
    replica = config.replica.model_copy(update={"pods": max(pods // data, 1), "data_ranks": data})
    return config.model_copy(update={"parallelism": parallelism, "replica": replica})


def first_data_rank(config: EngineConfig, environment: Mapping[str, str]) -> int:
    """The number of this pod's first data rank in the replica. `config`: of the share."""
    if config.replica.data_ranks is None:
        return 0
    number = environment.get("STOKER_NODE_RANK", "")
    if not number.isdecimal():
        raise ConfigError(f"STOKER_NODE_RANK must be a whole number, got {number!r}")
    return int(number) * config.parallelism.data // config.replica.pods
