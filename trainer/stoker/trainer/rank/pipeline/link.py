"""Messages between neighbouring ranks of a pipeline: one process group for each pair and direction.

A group carries sends one way and the receives of them, in one order on both sides, so no message waits for one of
another kind. Sends and receives run in the background on Gloo and on NCCL alike; `wait` blocks the host on Gloo, the
current stream on NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

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


def open_links(pipelines: Sequence[Sequence[int]], *, is_ring: bool, timeout: timedelta | None = None) -> Links:
    """Open the channels of this rank (collective over the gang: every rank passes the same pipelines).

    Args:
        pipelines: global ranks of each pipeline, in the order of their stages.
        is_ring: the last rank is followed by the first: each rank holds several stages.
        timeout: of one message.
    """
    ends: dict[str, Link] = {}
    for ranks in pipelines:
        for place, rank in enumerate(ranks):
            follower = ranks[(place + 1) % len(ranks)]
            if len(ranks) > 1 and (is_ring or place + 1 < len(ranks)):
                ends |= _open(rank, follower, "activations", timeout)
                ends |= _open(follower, rank, "gradients", timeout)
    names = ("activations_in", "activations_out", "gradients_in", "gradients_out")
    return Links(*(ends.get(name) for name in names))


def _open(sender: int, receiver: int, what: str, timeout: timedelta | None) -> dict[str, Link]:
    """Open one channel; return this rank's end of it, by name."""
    group = dist.new_group([sender, receiver], timeout=timeout)
    if not isinstance(group, dist.ProcessGroup):
        return {}
    here = {sender: f"{what}_out", receiver: f"{what}_in"}[dist_rank()]
    peer = receiver if dist_rank() == sender else sender
    return {here: Link(group, dist.get_group_rank(group, peer))}
