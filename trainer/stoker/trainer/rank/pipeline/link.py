"""Messages between neighbouring ranks of a pipeline: one process group for each pair and direction.

A group carries sends one way and the receives of them, in one order on both sides, so no message waits for one of
another kind. Sends and receives run in the background on Gloo and on NCCL alike; `wait` blocks the host on Gloo, the
current stream on NCCL.

A rank's first passes go through the host (`HostLink`). Loading a kernel can wait until the device is idle, and a posted
receive of NCCL keeps it busy until the sender comes, which may itself wait for this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.trainer.rank.communicator import dist_rank


class Transfer(Protocol):
    """A send or a receive in flight."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class Channel(Protocol):
    """One end of a channel for tensors of one direction."""

    def send(self, tensor: Tensor) -> Transfer: ...
    def receive(self, into: Tensor) -> Transfer: ...


class Link:
    """A channel between the devices."""

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


class HostLink:
    """A channel through the host memory of both ends, over a group of Gloo. No work of it waits on the device."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._link = Link(group, peer)

    def send(self, tensor: Tensor) -> Transfer:
        """See `Link`; waits for the tensor."""
        host = tensor.cpu()
        return HostSend(self._link.send(host), host)

    def receive(self, into: Tensor) -> Transfer:
        """See `Link`."""
        host = torch.empty(into.shape, dtype=into.dtype)
        return HostReceive(self._link.receive(host), host, into)


@dataclass(frozen=True, eq=False)
class HostSend:
    """A send in flight, and the tensor that it reads."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> None:
        """Wait until the tensor is sent."""
        self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


@dataclass(frozen=True, eq=False)
class HostReceive:
    """A receive in flight, its memory on the host, and where the message belongs."""

    work: dist.Work
    host: Tensor
    into: Tensor

    def wait(self) -> None:
        """Wait for the message and copy it to its place."""
        self.work.wait()
        self.into.copy_(self.host)

    def is_completed(self) -> bool:
        return self.work.is_completed()


@dataclass(frozen=True)
class Links:
    """The channels of one rank: activations go to the next rank of the pipeline, gradients to the one before."""

    activations_in: Channel | None
    activations_out: Channel | None
    gradients_in: Channel | None
    gradients_out: Channel | None


NO_LINKS = Links(None, None, None, None)


class OpenGroup(Protocol):
    """Opens the groups of a list; returns the one that this rank is in, or None (collective over the gang)."""

    def __call__(self, groups: Sequence[tuple[int, ...]], purpose: str, /) -> dist.ProcessGroup | None: ...


def open_links(
    pipelines: Sequence[Sequence[int]], open_group: OpenGroup, *, is_ring: bool, channel: type[Link | HostLink] = Link
) -> Links:
    """Open the channels of this rank (collective over the gang: every rank passes the same pipelines).

    Args:
        pipelines: global ranks of each pipeline, in the order of their stages.
        open_group: opens process groups.
        is_ring: the last rank is followed by the first: each rank holds several stages.
        channel: what to open.
    """
    size = len(pipelines[0])
    ends: dict[str, Channel] = {}
    for place in range(size if is_ring and size > 1 else size - 1):
        pairs = [(ranks[place], ranks[(place + 1) % size]) for ranks in pipelines]
        ends |= _open(pairs, "activations", open_group, channel)
        ends |= _open([(follower, rank) for rank, follower in pairs], "gradients", open_group, channel)
    return Links(*(ends.get(name) for name in ("activations_in", "activations_out", "gradients_in", "gradients_out")))


def _open(
    pairs: Sequence[tuple[int, int]], what: str, open_group: OpenGroup, channel: type[Link | HostLink]
) -> dict[str, Channel]:
    """Open one channel of each pipeline, from the first rank of a pair to the second; return this rank's end."""
    group = open_group(pairs, what)
    if group is None:
        return {}
    here = dist_rank()
    sender, receiver = next(pair for pair in pairs if here in pair)
    name, peer = (f"{what}_out", receiver) if here == sender else (f"{what}_in", sender)
    return {name: channel(group, dist.get_group_rank(group, peer))}
