"""Exchanges between the ranks of a context-parallel group, without autograd: `context_attend` pairs them.

All move bytes, because Gloo does not take every dtype; sums are made by the receiver in float32, in the order of the
ranks, so they repeat bitwise. T tokens of all ranks, t tokens of one, C ranks, N heads, n = N / C, H head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_rows(x_tNH: Tensor, group: ProcessGroup) -> Tensor:
    """Return the ranks' rows one after another, x_TNH."""
    x_tNH = x_tNH.contiguous()
    whole_TNH = x_tNH.new_empty(dist.get_world_size(group) * x_tNH.shape[0], *x_tNH.shape[1:])
    dist.all_gather_into_tensor(raw(whole_TNH), raw(x_tNH), group=group)
    return whole_TNH


def sum_rows(x_TNH: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks of this rank's rows, x_tNH in float32."""
    received = swap(x_TNH, group)
    total = received[0].float()
    for part in received[1:]:
        total = total + part
    return total


def heads_to_tokens(x_tNH: Tensor, group: ProcessGroup) -> Tensor:
    """All heads of this rank's tokens to a part of the heads of all tokens, x_TnH."""
    ranks = dist.get_world_size(group)
    num_tokens, num_heads, head_dim = x_tNH.shape
    by_rank = x_tNH.reshape(num_tokens, ranks, num_heads // ranks, head_dim).transpose(0, 1)
    return swap(by_rank.flatten(0, 1), group).flatten(0, 1)


def tokens_to_heads(x_TnH: Tensor, group: ProcessGroup) -> Tensor:
    """The way back: x_tNH."""
    return swap(x_TnH, group).transpose(0, 1).flatten(1, 2)


def swap(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send the i-th of C equal runs of rows to rank i; return what the ranks sent, [C, rows, ...]."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(raw(received), raw(x), group=group)
    return received.view(dist.get_world_size(group), -1, *x.shape[1:])


class RingShift:
    """Tensors on their way to the next rank of the ring, and those of the rank before on their way here."""

    def __init__(self, sent: Sequence[Tensor], group: ProcessGroup) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._sent = [x.contiguous() for x in sent]
        self._received = [torch.empty_like(x) for x in self._sent]
        operations = []
        for x, y in zip(self._sent, self._received, strict=True):
            operations.append(dist.P2POp(dist.isend, raw(x), group=group, group_peer=(rank + 1) % size))
            operations.append(dist.P2POp(dist.irecv, raw(y), group=group, group_peer=(rank - 1) % size))
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """Return what the rank before has sent; on a GPU only the stream waits."""
        for work in self._works:
            work.wait()
        return self._received


def raw(x: Tensor) -> Tensor:
    """The same memory as bytes, in one dim."""
    return x.view(-1).view(torch.uint8)
