"""One bucket's gradient of one micro-batch in the compute dtype, on its way to the other ranks.

Owned by a ZeRO bucket (`zero`), for steps in which each micro-batch's gradient is sent alone. Backward fills a borrowed
buffer, and the reduction returns it; `communicator` sends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.communicator import Pending


class GradientWire:
    """Collects the gradients of one micro-batch in a buffer that it borrows while it is filled and sent."""

    def __init__(self, bucket: Bucket, buffers: WireBuffers) -> None:
        self._bucket = bucket
        self._buffers = buffers
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._seen: set[int] = set()

    def begin_step(self, num_micro_batches: int) -> None:  # noqa: ARG002  each micro-batch is sent by itself
        self._seen.clear()

    def grad_destination(self, index: int) -> Tensor | None:
        self._open()
        return self._views[index].detach()

    def add(self, index: int, grad: Tensor) -> bool:
        self._open()
        view = self._views[index]
        if view.data_ptr() != grad.data_ptr():
            view.copy_(grad)
        self._seen.add(index)
        return len(self._seen) == self._bucket.num_trainable

    def end_micro_batch(self) -> Tensor:
        flat = self._open()
        for index in set(range(len(self._views))) - self._seen:
            self._views[index].zero_()
        self._flat = None
        self._seen.clear()
        return flat

    def _open(self) -> Tensor:
        if self._flat is None:
            self._flat = self._buffers.borrow(self._bucket)
            self._views = list(self._bucket.views(self._flat))
        return self._flat


@dataclass(frozen=True, eq=False)
class Loan:
    """A buffer that a reduction reads."""

    bucket: Bucket
    buffer: Tensor
    reading: Pending


class WireBuffers:
    """Buffers that buckets of one layout share.

    With a `depth` there are at most that many of each layout. When all are lent, the oldest is reused: the current
    stream, not the host, waits for its reduction. Without a depth there are as many as are in use.
    """

    def __init__(self, depth: int | None) -> None:
        self._depth = depth
        self._free: dict[object, list[Tensor]] = {}
        self._lent: dict[object, deque[Loan]] = {}

    def borrow(self, bucket: Bucket) -> Tensor:
        """A buffer of the bucket's length and dtype. Its padding is zero, the rest undefined."""
        lent, free = self._lent.setdefault(_layout(bucket), deque()), self._free.setdefault(_layout(bucket), [])
        if free:
            return free.pop()
        if self._depth is None or len(lent) < self._depth:
            return torch.zeros(bucket.plan.numel, dtype=bucket.dtype, device=bucket.device)
        oldest = lent.popleft()
        oldest.reading.wait()
        return oldest.buffer

    def lend(self, bucket: Bucket, buffer: Tensor, reading: Pending) -> Loan:
        loan = Loan(bucket, buffer, reading)
        self._lent[_layout(bucket)].append(loan)
        return loan

    def give_back(self, loan: Loan) -> None:
        """Free the buffer of a reduction that has ended. A buffer that was reused meanwhile stays lent."""
        lent = self._lent[_layout(loan.bucket)]
        if loan in lent:
            lent.remove(loan)
            self._free[_layout(loan.bucket)].append(loan.buffer)


def _layout(bucket: Bucket) -> object:
    """Key of buckets that may share a buffer: same dtype, length and padding."""
    return bucket.dtype, bucket.plan.numel, tuple((item.offset, item.numel) for item in bucket.plan.ranges)
