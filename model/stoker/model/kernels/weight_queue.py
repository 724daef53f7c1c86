"""Weight gradients that are computed after the backward pass: the seam for pipelines that split backward in two.

While a queue collects, the products' backward passes hand over the product for a weight's gradient instead of running
it; autograd then goes on with the gradient of the input alone. The owner of the queue runs the products later. Without
a queue, and while it does not collect, nothing changes.

Set by the trainer's pipeline stages; read by `linear` of every set of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor

Product = Callable[[], Tensor]
"""Computes one gradient. It holds the product's input and the gradient of its output."""
Later = Callable[[Product], bool]
"""Takes a product for later; False: the caller has to run it now."""


class LateGradient(NamedTuple):
    """The gradient of a weight that is still to be computed."""

    weight: Tensor
    product: Product


class WeightQueue:
    """Collects products in the order of the backward pass. One for all weights of a stage."""

    def __init__(self) -> None:
        self._take: Callable[[LateGradient], None] | None = None

    @contextmanager
    def collect(self) -> Iterator[list[LateGradient]]:
        """Collect the products of the backward passes that run inside, in the list."""
        collected: list[LateGradient] = []
        with self.hand_over(collected.append):
            yield collected

    @contextmanager
    def hand_over(self, take: Callable[[LateGradient], None]) -> Iterator[None]:
        """Give the products of the backward passes that run inside to `take`."""
        assert self._take is None, "a queue collects for one backward pass at a time"
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def offer(self, weight: Tensor, product: Product) -> bool:
        """Take the product of a weight's gradient; False while the queue does not collect."""
        if self._take is None:
            return False
        self._take(LateGradient(weight, product))
        return True


def set_weight_queue(parameter: Tensor, queue: WeightQueue) -> None:
    """Let a queue take the later gradients of `parameter`. It holds the queue for as long as it lives."""
    parameter.weight_queue = queue  # type: ignore[attr-defined]  # read below alone


def later(weight: Tensor) -> Later | None:
    """Return where a weight's gradient may be put off, or None.

    Ask in forward: a recomputed backward pass sees a copy of the weight.
    """
    queue: WeightQueue | None = getattr(weight, "weight_queue", None)
    return None if queue is None else partial(queue.offer, weight)


def now_or_later(put_off: Later | None, product: Product) -> Tensor | None:
    """Return the gradient, or None where it was put off."""
    return None if put_off is not None and put_off(product) else product()
