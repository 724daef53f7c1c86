"""Gradients on their way: the holder of each buffer at each moment, and gradients written to their final place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stoker.model.kernels.grad_destination import grad_destination, set_grad_destination
from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.communicator import Pending
from stoker.trainer.rank.gradient_wire import GradientWire, WireBuffers


def bucket(*shapes: tuple[int, ...], name: str = "b") -> Bucket:
    made = Bucket(name, [(str(i), nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)], shards=2)
    made.adopt(made.master_copy())
    return made


class Reading:
    """A reduction that records whether a caller waited for it."""

    def __init__(self) -> None:
        self.waited = 0
        self.pending = Pending(self.wait)

    def wait(self) -> None:
        self.waited += 1


def test_a_bounded_ring_waits_for_the_oldest_reduction_and_takes_its_buffer() -> None:
    buffers, one = WireBuffers(depth=2), bucket((30, 40))
    lent, readings = [], [Reading() for _ in range(3)]
    for reading in readings[:2]:
        lent.append(buffers.borrow(one))
        buffers.lend(one, lent[-1], reading.pending)
    third = buffers.borrow(one)
    assert third.data_ptr() == lent[0].data_ptr()
    assert [reading.waited for reading in readings] == [1, 0, 0]


def test_buffers_are_shared_by_buckets_of_one_layout_only_and_a_late_return_is_ignored() -> None:
    buffers, one, twin, other = WireBuffers(depth=1), bucket((30, 40)), bucket((30, 40)), bucket((30, 41))
    first = buffers.borrow(one)
    loan = buffers.lend(one, first, Reading().pending)
    assert buffers.borrow(other).data_ptr() != first.data_ptr()
    again = buffers.borrow(twin)
    assert again.data_ptr() == first.data_ptr()
    buffers.lend(twin, again, Reading().pending)
    buffers.give_back(loan)  # its buffer is the twin's now
    reading = buffers.borrow(one)
    assert reading.data_ptr() == first.data_ptr()


def test_without_a_depth_buffers_are_kept_for_the_next_step() -> None:
    buffers, one, reading = WireBuffers(depth=None), bucket((30, 40)), Reading()
    first, second = buffers.borrow(one), buffers.borrow(one)
    assert first.data_ptr() != second.data_ptr()
    buffers.give_back(buffers.lend(one, first, reading.pending))
    assert buffers.borrow(one).data_ptr() == first.data_ptr()
    assert reading.waited == 0


def test_a_parameter_without_a_gradient_counts_as_zero_and_padding_stays_zero() -> None:
    buffers, one = WireBuffers(depth=None), bucket((3, 5), (7,))
    wire = GradientWire(one, buffers)
    for value in (1.0, 2.0):
        wire.begin_step(1)
        assert not wire.add(0, torch.full((3, 5), value))
        flat = wire.end_micro_batch()
        assert float(flat.sum()) == 15 * value
        views = list(one.views(flat))
        views[1].fill_(9.0)  # what the next micro-batch must not see
        buffers.give_back(buffers.lend(one, flat, Reading().pending))


class PlacedProduct(torch.autograd.Function):
    """A product whose backward writes the weight's gradient into its owner's buffer, as the fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.destination = grad_destination(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, torch.mm(grad.t(), x, out=ctx.destination())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_written_in_its_place_is_adopted_without_a_copy(dtype: torch.dtype) -> None:
    one = bucket((4, 6))
    one.adopt(one.flat.to(dtype))
    (weight,) = one.parameters
    wire = GradientWire(one, WireBuffers(depth=None))
    wire.begin_step(1)
    places = []

    def destination() -> Tensor | None:
        made = wire.grad_destination(0)
        assert made is not None
        places.append(made.data_ptr())
        return made

    set_grad_destination(weight, destination)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.data_ptr()))
    x = torch.randn(5, 6, dtype=dtype)
    PlacedProduct.apply(x, weight).sum().backward()
    assert seen == places
    assert weight.grad is not None
    assert wire.add(0, weight.grad)
    expected = torch.ones(5, 4, dtype=dtype).t() @ x
    assert torch.equal(next(iter(one.views(wire.end_micro_batch()))), expected)
