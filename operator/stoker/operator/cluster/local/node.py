"""This machine as the one node of the embedded cluster: what all its pods share.

Made once by the supervisor, passed to each pod's task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.operator.cluster.local.addresses import Addresses
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.gpus import Gpus
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.local.probes import Ask
from stoker.operator.cluster.local.process import ProcessRunner
from stoker.operator.domain.clock import Clock, timestamp


@dataclass(frozen=True)
class Node:
    """Everything that the life of a pod needs from outside."""

    objects: ObjectStore
    runner: ProcessRunner
    ask: Ask
    addresses: Addresses
    folders: StateFolders
    clock: Clock
    gpus: Gpus
    capacity: Mapping[str, str]
    """Cores (`cpu`) and `memory` of the machine. No pod may ask for more; together they may."""
    environment: Mapping[str, str]
    """Variables that every pod inherits."""
    python: str
    """The interpreter that replaces `python` in a command."""

    def now(self) -> str:
        return timestamp(self.clock.now())
