"""Gloo groups of one process that share one network thread, for worlds of ranks that keep many groups open.

torch gives each group a thread of its own, which wakes a hundred times a second also while nothing arrives. Eight ranks
that keep fifty groups each for the rows of a table occupy a processor with that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

LOOPBACK = "127.0.0.1"


def share_network() -> None:
    """Let every Gloo group that this process opens from now on use the same network thread."""
    devices = dist.Backend.backend_capability[dist.Backend.GLOO]
    kind = dist.ProcessGroup.BackendType.GLOO
    dist.Backend.register_backend("gloo", _create, extended_api=True, devices=devices, _backend_type=kind)


@cache
def _device() -> Any:
    return ProcessGroupGloo.create_device(hostname=LOOPBACK)


def _create(found: Any, _backend_options: object) -> ProcessGroupGloo:
    """Return the group that torch asks for; `found` has its store, ranks and timeout."""
    gloo: Any = ProcessGroupGloo  # torch declares no types for its options
    options = gloo._Options()
    options._devices, options._timeout = [_device()], found.timeout
    options.global_ranks_in_group, options.group_name = found.global_ranks_in_group, found.group_id
    return gloo(found.store, found.group_rank, found.group_size, options)  # type: ignore[no-any-return]
