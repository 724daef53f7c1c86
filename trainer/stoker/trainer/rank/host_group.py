"""Process groups for tensors in host memory, beside those of the device.

A default group that is bound to a GPU makes further groups by splitting its communicator, in which ranks outside of the
new group take part. In torch 2.11 they did so for groups of Gloo, too, whose members split nothing: with three GPUs
and more a pair's group was waited for without end. So the default group is unbound while one of Gloo is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


def new_host_group(ranks: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """A Gloo group of these ranks; None on other ranks (collective over the gang). `timeout`: of one collective."""
    with _unbound():
        group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def _unbound() -> Iterator[None]:
    """Within the block the default group belongs to no device, so that no group is made by splitting it."""
    default = dist.group.WORLD
    assert default is not None, "the gang has its group"
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device
