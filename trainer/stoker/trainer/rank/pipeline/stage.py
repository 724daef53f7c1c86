"""One stage of a pipeline: forward and backward passes of a slice of the model, micro-batch by micro-batch.

T tokens of one micro-batch, packed; D hidden. Between stages travels x_TD, the sum of the residual stream's two parts:
half of the bytes of both, and their gradients are equal.

Owned by the executor. It keeps the activations of the micro-batches in flight. The output layer of the last stage runs
in the backward pass: its logits and its gradient, the size of the table, never wait for another micro-batch.
"""

# ruff: noqa: N815  (fields carry shape suffixes)

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stoker.model.attend import Attend
from stoker.model.aux import Aux
from stoker.model.decoder import Decoder
from stoker.model.kernels.weight_queue import LateGradient, WeightQueue
from stoker.pod.pipeline.actions import INPUT_GRADIENT, Kind
from stoker.trainer.rank.layers_again import LayersAgain
from stoker.trainer.rank.savings import Savings


@dataclass(frozen=True)
class StageInputs:
    """A micro-batch on the device, shared by the stages of a rank."""

    tokens_T: Tensor
    positions_T: Tensor
    targets_T: Tensor
    weights_T: Tensor
    attend: Attend
    rows: int
    """Rows of x_TD on this rank."""
    aux: Aux | None = None
    """Takes the losses and loads of routers; None where this rank computes none, and in validation."""


class GradientSink(Protocol):
    """Takes gradients of parameters as backward makes them (`Zero`)."""

    def hold(self, keep: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
        """Give the gradients that arrive inside, of units with late ones, to `keep`. A callback adds one of them."""
        ...

    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient that did not come from autograd."""
        ...

    def end_micro_batch(self, stage: int, *, late: bool | None = None) -> None:
        """Close one micro-batch of a stage: of all its units, or of those with (without) late gradients."""
        ...


@dataclass
class InFlight:
    """What a stage keeps of a micro-batch between its passes."""

    inputs: StageInputs
    input_TD: Tensor
    """Leaf of the stage's graph: the received activation or the embedding."""
    embedded_TD: Tensor | None
    """The embedding with its graph, on the first stage when backward is split."""
    x_TD: Tensor
    update_TD: Tensor | None
    late: deque[LateGradient | Callable[[], None]] = field(default_factory=deque)
    """Gradients of weights in the order of backward: to be computed, or to be added. One unit after the other, so that
    few units have gradients in use at once."""


class Stage:
    """The passes of one slice. Micro-batches are numbered within a step."""

    def __init__(
        self,
        number: int,
        decoder: Decoder,
        ready: Callable[[str], None],
        sink: GradientSink,
        *,
        recompute: bool,
        queue: WeightQueue | None = None,
        savings: Savings | None = None,
        again: LayersAgain | None = None,
    ) -> None:
        """`ready` is called with a unit's name (`embedding`, `blocks.5`, `head`) before its parameters are used.

        `queue`: takes the weights' gradients when backward is split. `savings`: what forward passes need not keep.
        `again`: what backward computes again in each layer, where that differs.
        """
        self.number = number
        self.decoder = decoder
        self._ready = ready
        self._sink = sink
        self._recompute = recompute
        self._queue = queue
        self._savings = savings or Savings()
        self._again = again
        self._in_flight: dict[int, InFlight] = {}

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations are kept."""
        return len(self._in_flight)

    def units(self, kind: Kind, *, trains: bool) -> Iterator[str]:
        """Yield the units whose weights a pass reads, in the order of their use."""
        blocks = [f"blocks.{layer}" for layer in self.decoder.layers]
        if kind is Kind.FORWARD:
            yield from (["embedding"] if self.decoder.is_first else [])
            yield from blocks
        if self.decoder.is_last and (kind in INPUT_GRADIENT if trains else kind is Kind.FORWARD):
            yield "head"
        if kind in INPUT_GRADIENT:
            yield from reversed(blocks)

    def forward(self, micro_batch: int, inputs: StageInputs, x_TD: Tensor | None) -> Tensor | None:
        """Run the blocks. Return the output x_TD for the next stage; None on the last stage.

        `x_TD`: the input; None on the first stage. It must stay unchanged until the micro-batch's last pass.
        """
        kept = self._blocks(inputs, x_TD)
        self._in_flight[micro_batch] = kept
        if self.decoder.is_last:
            return None
        if kept.update_TD is not None:
            kept.x_TD, kept.update_TD = kept.x_TD + kept.update_TD, None
        return kept.x_TD.detach()

    def evaluate(self, inputs: StageInputs, x_TD: Tensor | None) -> Tensor:
        """Run the blocks without gradient. Return the output, or on the last stage the loss sum (fp32 scalar)."""
        with torch.no_grad():
            kept = self._blocks(inputs, x_TD)
            if self.decoder.is_last:
                return self._loss_sum(kept)
            return kept.x_TD if kept.update_TD is None else kept.x_TD + kept.update_TD

    def backward(self, micro_batch: int, grad_TD: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Run the whole backward pass. Return the gradient of the input and the loss sum, where the stage has them.

        `grad_TD`: the gradient of the output; None on the last stage.
        """
        kept = self._in_flight.pop(micro_batch)
        loss_sum = self._backward(kept, grad_TD)
        self._backward_embedding(kept)
        self._sink.end_micro_batch(self.number)
        return self._input_gradient(kept), loss_sum

    def backward_input(self, micro_batch: int, grad_TD: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Run the part of backward that other stages wait for: like `backward`, weights' products put off."""
        kept = self._in_flight[micro_batch]
        assert self._queue is not None, "the stage has no queue for late gradients"
        with self._queue.hand_over(kept.late.append), self._sink.hold(kept.late.append):
            loss_sum = self._backward(kept, grad_TD)
        kept.x_TD, kept.update_TD = kept.input_TD, None  # frees the graph
        self._sink.end_micro_batch(self.number, late=False)
        return self._input_gradient(kept), loss_sum

    def backward_weight(self, micro_batch: int) -> None:
        """Run the products that `backward_input` has put off."""
        kept = self._in_flight.pop(micro_batch)
        with torch.no_grad():
            while kept.late:
                self._add_late(kept.late.popleft())
        self._backward_embedding(kept)
        self._sink.end_micro_batch(self.number, late=True)

    def _add_late(self, gradient: LateGradient | Callable[[], None]) -> None:
        if isinstance(gradient, LateGradient):
            self._sink.add_gradient(gradient.weight, gradient.product())
        else:
            gradient()

    def _blocks(self, inputs: StageInputs, x_TD: Tensor | None) -> InFlight:
        embedded_TD = None
        if x_TD is None:
            self._ready("embedding")
            embedded_TD = self.decoder.embed(inputs.tokens_T)
            x_TD = embedded_TD
        input_TD = x_TD.detach().requires_grad_(torch.is_grad_enabled())
        x_TD, update_TD = input_TD, None
        with self._savings.in_forward():
            for index, (layer, block) in enumerate(zip(self.decoder.layers, self.decoder.blocks, strict=True)):
                run = partial(self._block, layer, block)
                if self._again is not None:
                    x_TD, update_TD = self._again.block(
                        index, x_TD, update_TD, inputs.positions_T, inputs.attend, inputs.aux
                    )
                elif self._recompute and torch.is_grad_enabled():
                    # Nothing in a block is random, so no generator state has to be kept for the second pass.
                    x_TD, update_TD = checkpoint(
                        run, x_TD, update_TD, inputs, use_reentrant=False, preserve_rng_state=False
                    )
                else:
                    x_TD, update_TD = run(x_TD, update_TD, inputs)
                self._savings.gather_for_backward(f"blocks.{layer}", x_TD, update_TD)
        assert x_TD is not None
        return InFlight(inputs, input_TD, embedded_TD, x_TD, update_TD)

    def _block(
        self, layer: int, block: nn.Module, x_TD: Tensor, update_TD: Tensor | None, inputs: StageInputs
    ) -> tuple[Tensor, Tensor]:
        self._ready(f"blocks.{layer}")  # also when backward computes it again
        out: tuple[Tensor, Tensor] = block(x_TD, update_TD, inputs.positions_T, inputs.attend, inputs.aux)
        return out

    def _loss_sum(self, kept: InFlight) -> Tensor:
        self._ready("head")
        if self.decoder.has_table_copy:
            self._ready("table copy")
        if self._again is not None:
            self._again.leave_blocks()
        with self._savings.in_forward():
            hidden_TD = self.decoder.norm(kept.x_TD, kept.update_TD)
            return self.decoder.cross_entropy(hidden_TD, kept.inputs.targets_T, kept.inputs.weights_T).loss_sum

    def _backward(self, kept: InFlight, grad_TD: Tensor | None) -> Tensor | None:
        loss_sum = self._run_backward(kept, grad_TD)
        self._savings.end_backward()
        return loss_sum

    def _run_backward(self, kept: InFlight, grad_TD: Tensor | None) -> Tensor | None:
        if not self.decoder.is_last:
            kept.x_TD.backward(grad_TD)  # type: ignore[no-untyped-call]
            return None
        loss_sum = self._loss_sum(kept)
        loss_sum.backward()  # type: ignore[no-untyped-call]
        return loss_sum.detach()

    def _backward_embedding(self, kept: InFlight) -> None:
        if kept.embedded_TD is not None and kept.embedded_TD.requires_grad:
            kept.embedded_TD.backward(kept.input_TD.grad)  # type: ignore[no-untyped-call]

    def _input_gradient(self, kept: InFlight) -> Tensor | None:
        return None if self.decoder.is_first else kept.input_TD.grad
