"""Runs a list of actions: the one executor of every pipeline schedule, for training and for validation.

Receives are posted by the list, before their use, into buffers that are kept from step to step. Nothing here knows a
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.pod.pipeline.actions import COMPUTE, Action, Kind
from stoker.trainer.rank.pipeline.link import Channel, Links, Transfer
from stoker.trainer.rank.pipeline.stage import Stage, StageInputs

Place = tuple[int, int]
"""Stage and micro-batch."""


class Arriving(NamedTuple):
    """A receive that was posted."""

    buffer: Tensor
    work: Transfer


class Sending(NamedTuple):
    """A send in flight, and the tensor that it reads."""

    work: Transfer
    tensor: Tensor


class Buffers:
    """Receive buffers by shape. One that was given back is used again; there are as many as were in use at once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._free: dict[tuple[int, int], list[Tensor]] = {}
        self.count = 0
        """Buffers made so far."""

    def take(self, shape: tuple[int, int]) -> Tensor:
        free = self._free.setdefault(shape, [])
        if free:
            return free.pop()
        self.count += 1
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.shape[0], buffer.shape[1]].append(buffer)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What travels between stages."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device


class Executor:
    """One rank's stages and their messages."""

    def __init__(
        self,
        stages: Sequence[Stage],
        links: Links,
        wire: Wire,
        reduce: Callable[[int], None] = lambda _stage: None,
        first_links: Links | None = None,
        follow: Callable[[Iterator[str]], None] | None = None,
    ) -> None:
        """`reduce(stage)` is called when a stage's gradient has all micro-batches.

        `first_links`: what the first step and the first validation use, while kernels are loaded (see `link`).
        `follow` is told the units of weights that the coming passes use (ZeRO stage 3).
        """
        self.stages: Mapping[int, Stage] = {stage.number: stage for stage in stages}
        self.buffers = Buffers(wire.dtype, wire.device)
        self._later_links = links
        self._links = links
        self._first_links = first_links or links
        self._warm: set[bool] = set()
        """Whether training and validation have run once."""
        self._wire = wire
        self._reduce_stage = reduce
        self._follow = follow
        self._trains = True
        self._inputs: Sequence[StageInputs] = ()
        self._losses: dict[int, Tensor] = {}
        self._arriving: dict[tuple[Kind, Place], Arriving] = {}
        self._ready: dict[tuple[Kind, Place], Tensor] = {}
        """Results by the kind of message that carries them, until they are sent or used by the next stage here."""
        self._held: dict[Place, list[Tensor]] = {}
        """Buffers that the passes of a micro-batch still read."""
        self._sending: list[Sending] = []
        self._actions: Mapping[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_ACTIVATION: self._send,
            Kind.SEND_GRADIENT: self._send,
            Kind.RECEIVE_ACTIVATION: self._receive,
            Kind.RECEIVE_GRADIENT: self._receive,
            Kind.REDUCE: self._reduce,
        }

    @property
    def layers(self) -> set[int]:
        """The layers of all stages of this rank, by their index in the whole model."""
        return {layer for stage in self.stages.values() for layer in stage.decoder.layers}

    def train(self, order: Sequence[Action], inputs: Sequence[StageInputs]) -> dict[int, Tensor]:
        """Run the actions of one step; return the loss sum of each micro-batch on the rank of the last stage."""
        return self._run(order, inputs, trains=True)

    def evaluate(self, order: Sequence[Action], inputs: Sequence[StageInputs]) -> dict[int, Tensor]:
        """Run forward passes alone, without gradient; return the loss sums like `train`."""
        return self._run(order, inputs, trains=False)

    def _run(self, order: Sequence[Action], inputs: Sequence[StageInputs], *, trains: bool) -> dict[int, Tensor]:
        self._trains, self._inputs, self._losses = trains, inputs, {}
        self._links = self._later_links if trains in self._warm else self._first_links
        self._warm.add(trains)
        if self._follow is not None:
            passes = (action for action in order if action.kind in COMPUTE)
            self._follow(unit for action in passes for unit in self._units(action))
        for action in order:
            self._actions[action.kind](action)
        for sending in self._sending:
            sending.work.wait()
        self._sending.clear()
        left = [*self._arriving, *self._ready, *self._held]
        assert not left, f"the schedule left messages or activations behind: {left[0]}"
        self._inputs = ()
        return self._losses

    def _units(self, action: Action) -> Iterator[str]:
        return self.stages[action.stage].units(action.kind, trains=self._trains)

    def _forward(self, action: Action) -> None:
        stage, inputs = self.stages[action.stage], self._inputs[action.micro_batch]
        x_TD = None if stage.decoder.is_first else self._message(Kind.RECEIVE_ACTIVATION, action, action.stage - 1)
        if self._trains:
            output = stage.forward(action.micro_batch, inputs, x_TD)
        else:
            output = stage.evaluate(inputs, x_TD)
            self._free(action)
        if not stage.decoder.is_last:
            assert output is not None
            self._ready[Kind.SEND_ACTIVATION, action[1:]] = output
        elif not self._trains:
            assert output is not None
            self._losses[action.micro_batch] = output

    def _backward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        grad_TD = None if stage.decoder.is_last else self._message(Kind.RECEIVE_GRADIENT, action, action.stage + 1)
        run = stage.backward if action.kind is Kind.BACKWARD else stage.backward_input
        gradient, loss_sum = run(action.micro_batch, grad_TD)
        if gradient is not None:
            self._ready[Kind.SEND_GRADIENT, action[1:]] = gradient
        if loss_sum is not None:
            self._losses[action.micro_batch] = loss_sum
        if action.kind is Kind.BACKWARD:
            self._free(action)

    def _backward_weight(self, action: Action) -> None:
        self.stages[action.stage].backward_weight(action.micro_batch)
        self._free(action)

    def _reduce(self, action: Action) -> None:
        self._reduce_stage(action.stage)

    def _message(self, kind: Kind, action: Action, neighbour: int) -> Tensor:
        """Return what the neighbouring stage has made for this pass: received, or handed over on this rank."""
        arriving = self._arriving.pop((kind, action[1:]), None)
        if arriving is None:
            sent = Kind.SEND_ACTIVATION if kind is Kind.RECEIVE_ACTIVATION else Kind.SEND_GRADIENT
            return self._ready.pop((sent, (neighbour, action.micro_batch)))
        arriving.work.wait()
        self._held.setdefault(action[1:], []).append(arriving.buffer)
        return arriving.buffer

    def _free(self, action: Action) -> None:
        for buffer in self._held.pop(action[1:], ()):
            self.buffers.give_back(buffer)

    def _receive(self, action: Action) -> None:
        is_activation = action.kind is Kind.RECEIVE_ACTIVATION
        link = self._links.activations_in if is_activation else self._links.gradients_in
        buffer = self.buffers.take((self._inputs[action.micro_batch].rows, self._wire.hidden_size))
        self._arriving[action.kind, action[1:]] = Arriving(buffer, _opened(link).receive(buffer))

    def _send(self, action: Action) -> None:
        is_activation = action.kind is Kind.SEND_ACTIVATION
        link = self._links.activations_out if is_activation else self._links.gradients_out
        tensor = self._ready.pop((action.kind, action[1:])).contiguous()
        self._sending = [sending for sending in self._sending if not sending.work.is_completed()]
        self._sending.append(Sending(_opened(link).send(tensor), tensor))


def _opened(link: Channel | None) -> Channel:
    assert link is not None, "the schedule sends where the ranks have no link"
    return link
