"""One stage of a pipeline: forward and backward passes of a slice of the model, micro-batch by micro-batch.

T tokens of one micro-batch, packed; D hidden. Between stages travels x_TD, the sum of the residual stream's two parts:
half of the bytes of both, and their gradients are equal.

Owned by the executor. It keeps the activations of the micro-batches in flight. The output layer of the last stage runs
in the backward pass: its logits and its gradient, the size of the table, never wait for another micro-batch.
"""

# ruff: noqa: N815  (fields carry shape suffixes)

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stoker.model.attend import Attend
from stoker.model.aux import Aux
from stoker.model.decoder import Decoder
from stoker.model.kernels.weight_queue import LateGradient, WeightQueue


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

    def hold(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """Keep the gradients of units with late ones that arrive inside. A callback adds one of them."""
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
    late: list[LateGradient] = field(default_factory=list)
    held: list[Callable[[], None]] = field(default_factory=list)


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
    ) -> None:
        """`ready` is called with a unit's name (`embedding`, `blocks.5`, `head`) before its parameters are used.

        `queue`: takes the weights' gradients when backward is split.
        """
        self.number = number
        self.decoder = decoder
        self._ready = ready
        self._sink = sink
        self._recompute = recompute
        self._queue = queue
        self._in_flight: dict[int, InFlight] = {}

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations are kept."""
        return len(self._in_flight)

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
        with self._queue.collect() as kept.late, self._sink.hold() as kept.held:
            loss_sum = self._backward(kept, grad_TD)
        kept.x_TD, kept.update_TD = kept.input_TD, None  # frees the graph
        self._sink.end_micro_batch(self.number, late=False)
        return self._input_gradient(kept), loss_sum

    def backward_weight(self, micro_batch: int) -> None:
        """Run the products that `backward_input` has put off."""
        kept = self._in_flight.pop(micro_batch)
        with torch.no_grad():
            for deliver in kept.held:
                deliver()
            for weight, product in kept.late:
                self._sink.add_gradient(weight, product())
        self._backward_embedding(kept)
        self._sink.end_micro_batch(self.number, late=True)

    def _blocks(self, inputs: StageInputs, x_TD: Tensor | None) -> InFlight:
        embedded_TD = None
        if x_TD is None:
            self._ready("embedding")
            embedded_TD = self.decoder.embed(inputs.tokens_T)
            x_TD = embedded_TD
        input_TD = x_TD.detach().requires_grad_(torch.is_grad_enabled())
        x_TD, update_TD = input_TD, None
        for layer, block in zip(self.decoder.layers, self.decoder.blocks, strict=True):
            self._ready(f"blocks.{layer}")
            if self._recompute and torch.is_grad_enabled():
                # Nothing in a block is random, so no generator state has to be kept for the second pass.
                x_TD, update_TD = checkpoint(
                    block, x_TD, update_TD, inputs.positions_T, inputs.attend, inputs.aux, use_reentrant=False,
                    preserve_rng_state=False,
                )  # fmt: skip
            else:
                x_TD, update_TD = block(x_TD, update_TD, inputs.positions_T, inputs.attend, inputs.aux)
        assert x_TD is not None
        return InFlight(inputs, input_TD, embedded_TD, x_TD, update_TD)

    def _loss_sum(self, kept: InFlight) -> Tensor:
        self._ready("head")
        if self.decoder.has_table_copy:
            self._ready("table copy")
        hidden_TD = self.decoder.norm(kept.x_TD, kept.update_TD)
        return self.decoder.cross_entropy(hidden_TD, kept.inputs.targets_T, kept.inputs.weights_T).loss_sum

    def _backward(self, kept: InFlight, grad_TD: Tensor | None) -> Tensor | None:
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
