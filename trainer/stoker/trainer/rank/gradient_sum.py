"""One bucket's fp32 gradient over the micro-batches of a step, summed on this rank.

Owned by a ZeRO bucket (`zero`), for steps in which this rank sums its micro-batches before a reduction. Backward adds
to it, micro-batch by micro-batch. No communication here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from stoker.trainer.rank.bucket import Bucket


class Gradients(Protocol):
    """Collects the gradients of a bucket's parameters, micro-batch by micro-batch."""

    def begin_step(self, num_micro_batches: int) -> None: ...

    def grad_destination(self, index: int) -> Tensor | None:
        """The memory where the gradient of parameter `index` may be written before `add`;

        None when it needs memory of its own.
        """
        ...

    def add(self, index: int, grad: Tensor) -> bool:
        """Add the gradient of the bucket's `index`-th parameter; True when it was the last one of this micro-batch."""
        ...

    def end_micro_batch(self) -> Tensor:
        """Close this micro-batch and return the flat sum so far. A parameter without a gradient counts as zero."""
        ...


class GradientSum:
    """Adds the gradients in fp32, one micro-batch after the other, in one of two orders.

    Serial: a running sum in one buffer. Tree: recursive halving of the micro-batch index, so that a run of
    micro-batches makes the same subtree sum on whichever rank it lies; costs up to log2(micro-batches) more buffers.
    """

    def __init__(self, bucket: Bucket, tree: bool) -> None:
        self._bucket = bucket
        self._tree = tree
        self._free: list[Tensor] = []
        self._stack: list[Tensor] = []
        self._views: list[Tensor] = []
        self._merges: Iterator[int] = iter(())
        self._further_merges = 0
        self._adds = False
        self._seen: set[int] = set()

    def begin_step(self, num_micro_batches: int) -> None:
        self._free += self._stack
        self._stack = []
        self._merges = iter(merges_after(num_micro_batches) if self._tree else [0] + [1] * (num_micro_batches - 1))
        self._begin_micro_batch()

    def _begin_micro_batch(self) -> None:
        merges = next(self._merges, None)
        if merges is None:
            return
        # The last leaf of a pair is added right onto the first: the same sum as a merge, without a buffer.
        self._adds = merges > 0
        self._further_merges = max(0, merges - 1)
        if not self._adds:
            self._stack.append(self._buffer())
        self._views = list(self._bucket.views(self._stack[-1]))
        self._seen.clear()

    def grad_destination(self, index: int) -> Tensor | None:
        view = self._views[index]
        writable = not self._adds and view.dtype == self._bucket.dtype
        return view.view(view.shape) if writable else None

    def add(self, index: int, grad: Tensor) -> bool:
        view = self._views[index]
        if self._adds:
            view.add_(grad)
        elif view.data_ptr() != grad.data_ptr():
            view.copy_(grad)
        self._seen.add(index)
        return len(self._seen) == self._bucket.num_trainable

    def end_micro_batch(self) -> Tensor:
        if not self._adds:
            for index in set(range(len(self._views))) - self._seen:
                self._views[index].zero_()
        for _ in range(self._further_merges):
            right = self._stack.pop()
            self._stack[-1].add_(right)
            self._free.append(right)
        total = self._stack[0]
        self._begin_micro_batch()
        return total

    @property
    def buffers(self) -> int:
        """Number of gradient buffers allocated so far."""
        return len(self._free) + len(self._stack)

    def _buffer(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.zeros(self._bucket.plan.numel, dtype=torch.float32, device=self._bucket.device)


def merges_after(leaves: int) -> list[int]:
    """The number of pairs to merge after each leaf of a sum by recursive halving.

    The middle is `first + (last - first) // 2`.
    """
    merges = [0] * leaves

    def visit(first: int, end: int) -> None:
        if end - first > 1:
            middle = first + (end - first) // 2
            visit(first, middle)
            visit(middle, end)
            merges[end - 1] += 1

    visit(0, leaves)
    return merges
