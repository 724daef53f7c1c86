"""The place of a pod in a replica of several: its number, its ranks, the leader's address. Values that never change.

Pod 0 is the leader: it has rank 0, which answers requests. Called by the programs of all pods; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.engine.config import EngineConfig
from stoker.engine.key_file import read_key
from stoker.pod.config_file import ConfigError

LEADER_PORT = 29500


@dataclass(frozen=True)
class PodPlace:
    """A pod's place in its replica."""

    number: int
    pods: int
    ranks_per_pod: int
    leader: tuple[str, int]
    """Host and port at which the leader waits for the ranks of other pods."""
    host: str
    """Address that the leader listens on."""
    key: bytes
    name: str
    """The pod's name, for messages."""

    @property
    def ranks(self) -> range:
        """Numbers of this pod's ranks."""
        first = self.number * self.ranks_per_pod
        return range(first, first + self.ranks_per_pod)

    @property
    def others(self) -> range:
        """Numbers of the ranks that are not the leader's."""
        return range(self.ranks_per_pod, self.pods * self.ranks_per_pod)


def find_place(config: EngineConfig, environment: Mapping[str, str]) -> PodPlace | None:
    """Read this pod's place from configuration and environment; None for a replica of one pod.

    Of a replica with data-parallel ranks it is the place among the pods of one of them (`pod_share`).

    Raises:
        ConfigError: a field or a variable is missing or wrong.
    """
    pods, tensor, pipeline = config.replica.pods, config.parallelism.tensor, config.parallelism.pipeline
    if pods == 1:
        return None
    if tensor * pipeline % pods:
        ranks = f"parallelism.tensor {tensor} x parallelism.pipeline {pipeline} = {tensor * pipeline} ranks"
        raise ConfigError(f"replica.pods {pods} does not divide {ranks}")
    if config.replica.key_file is None:
        raise ConfigError(f"replica.key_file is needed with replica.pods {pods}")
    number = _number(environment, "STOKER_NODE_RANK")
    if config.replica.data_ranks is not None:
        number %= pods
    if number >= pods:
        raise ConfigError(f"STOKER_NODE_RANK is {number}, replica.pods {pods} allows 0 to {pods - 1}")
    if not environment.get("MASTER_ADDR"):
        raise ConfigError(f"MASTER_ADDR is missing; replica.pods {pods} needs the address of pod 0")
    return PodPlace(
        number=number,
        pods=pods,
        ranks_per_pod=tensor * pipeline // pods,
        leader=(environment["MASTER_ADDR"], _number(environment, "MASTER_PORT", LEADER_PORT)),
        host=config.listen.host,
        key=read_key(config.replica.key_file, "replica.key_file"),
        name=environment.get("HOSTNAME", "") or f"pod {number}",
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name, "" if default is None else str(default))
    if not value.isdecimal():
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return int(value)
