"""Messages between neighbouring ranks of a pipeline: one process group for each pair and direction.

A group carries sends one way and the receives of them, in one order on both sides, so no message waits for one of
another kind. Sends and receives run in the background on Gloo and on NCCL alike; `wait` blocks the host on Gloo, the
current stream on NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from stoker.trainer.rank.communicator import dist_rank


class Link:
    """One end of a channel for tensors of one direction."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        """`peer`: the other end's rank within the group."""
        self._group = group
        self._peer = peer

    def send(self, tensor: Tensor) -> dist.Work:
        """Start to send. The tensor must live unchanged until the work has ended."""
        work = dist.isend(tensor, group=self._group, group_dst=self._peer)
        assert work is not None
        return work

    def receive(self, into: Tensor) -> dist.Work:
        """Post the receive of the next message."""
        work = dist.irecv(into, group=self._group, group_src=self._peer)
        assert work is not None
        return work


@dataclass(frozen=True)
class Links:
    """The channels of one rank: activations go to the next rank of the pipeline, gradients to the one before."""

    activations_in: Link | None
    activations_out: Link | None
    gradients_in: Link | None
    gradients_out: Link | None


NO_LINKS = Links(None, None, None, None)


class OpenGroup(Protocol):
    """Opens the groups of a list; returns the one that this rank is in, or None (collective over the gang)."""

    def __call__(self, groups: Sequence[tuple[int, ...]], purpose: str) -> dist.ProcessGroup | None: ...


def open_links(pipelines: Sequence[Sequence[int]], open_group: OpenGroup, *, is_ring: bool) -> Links:
    """Open the channels of this rank (collective over the gang: every rank passes the same pipelines).

    Args:
        pipelines: global ranks of each pipeline, in the order of their stages.
        open_group: opens process groups.
        is_ring: the last rank is followed by the first: each rank holds several stages.
    """
    size = len(pipelines[0])
    ends: dict[str, Link] = {}
    for place in range(size if is_ring and size > 1 else size - 1):
        pairs = [(ranks[place], ranks[(place + 1) % size]) for ranks in pipelines]
        ends |= _open(pairs, "activations", open_group)
        ends |= _open([(follower, rank) for rank, follower in pairs], "gradients", open_group)
    return Links(*(ends.get(name) for name in ("activations_in", "activations_out", "gradients_in", "gradients_out")))


def _open(pairs: Sequence[tuple[int, int]], what: str, open_group: OpenGroup) -> dict[str, Link]:
    """Open one channel of each pipeline, from the first rank of a pair to the second; return this rank's end."""
    group = open_group(pairs, what)
    if group is None:
        return {}
    here = dist_rank()
    sender, receiver = next(pair for pair in pairs if here in pair)
    name, peer = (f"{what}_out", receiver) if here == sender else (f"{what}_in", sender)
    return {name: Link(group, dist.get_group_rank(group, peer))}
