"""Weights of a layer's experts in host memory, and slots on the device for those that are in use.

As soon as the router has chosen, the missing experts of the first round are copied into slots, one behind the other;
the products wait for them. On a GPU the host memory is page-locked, and a stream of its own copies; on a CPU the copies
are made at once. The host waits for the choice of every layer, so a step can be no graph.

T tokens, K experts of a token, E experts of the layer, e experts that this rank holds, D hidden, F width of an expert
(this rank's columns of it).

Made and called by `experts`; the weights do not change after loading.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from stoker.model.expert_slots import ExpertSlots, Round
from stoker.model.kernels.expert_rows import count_rows

Copy = tuple[Tensor, Tensor]
"""(target on the device, source in host memory)"""


@dataclass
class ExpertMeter:
    """Counts since the start."""

    hits: int = 0
    """Experts that a turn found in their slots."""
    misses: int = 0
    """Experts that were loaded."""
    loaded_bytes: int = 0


class Turn(NamedTuple):
    """One call of the layer."""

    rounds: tuple[Round, ...]
    counts: list[int]
    """Rows of each expert that this rank holds."""


class Copies(Protocol):
    """Copies weights into slots."""

    def load(self, copies: Sequence[Copy]) -> None:
        """Copy. What is queued on the device before reads the slots as they were, what is queued after as they are."""
        ...

    waited_s: float
    """Time since the start in which the device waited for copies; on a GPU known some copies later."""


class HostedExperts:
    """Experts of one layer of which `num_slots` are on the device."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        own: range,
        num_experts: int,
        num_slots: int,
        device: torch.device,
        copies: Copies | None = None,
    ) -> None:
        """`gate_up` [e * 2F, D] and `down` [e * D, F] are in host memory. Raises ValueError for too many slots."""
        self.slots = ExpertSlots(len(own), num_slots)
        self.own, self.num_experts = own, num_experts
        self.host = tuple(weight.detach().view(len(own), -1, weight.shape[1]) for weight in (gate_up, down))
        self.device = tuple(
            torch.empty(num_slots, *weight.shape[1:], dtype=weight.dtype, device=device) for weight in self.host
        )
        self.copies = copies_to(device) if copies is None else copies
        self.meter = ExpertMeter()
        self._unfinished = False
        """Whether an error has kept a turn from its copies: the slots do not hold what was planned."""
        self.expert_bytes = sum(weight[0].nbytes for weight in self.host)

    @property
    def num_slots(self) -> int:
        return self.slots.num_slots

    @property
    def in_slots(self) -> tuple[Tensor, Tensor]:
        """Gate and up, and down, of all slots, one below the other: as `ExpertWeights` of so many experts."""
        gate_up, down = self.device
        return gate_up.flatten(0, 1), down.flatten(0, 1)

    def weights_of(self, slot: int) -> tuple[Tensor, Tensor]:
        """Gate and up [2F, D], and down [D, F], of one slot."""
        gate_up, down = self.device
        return gate_up[slot], down[slot]

    def turn(self, experts_TK: Tensor) -> Turn:
        """Plan the layer's call for these choices. Waits for the device."""
        counts_E = count_rows(experts_TK.flatten().long(), self.num_experts)
        if self._unfinished:
            self.slots.forget()
        counts: list[int] = counts_E[self.own.start : self.own.stop].tolist()
        rounds = self.slots.turn(expert for expert, rows in enumerate(counts) if rows)
        self._unfinished = bool(rounds)
        return Turn(rounds, counts)

    def arriving(self, turn: Turn) -> Iterator[Round]:
        """Yield each round when its experts are in their slots for what is launched next."""
        for number, one in enumerate(turn.rounds, 1):
            self._load(one)
            self._unfinished = number < len(turn.rounds)
            yield one

    def _load(self, one: Round) -> None:
        if one.loads:
            self.copies.load(
                [
                    (on_device[slot], in_host[expert])
                    for expert, slot in one.loads
                    for on_device, in_host in zip(self.device, self.host, strict=True)
                ]
            )
        self.meter.hits += len(one.places) - len(one.loads)
        self.meter.misses += len(one.loads)
        self.meter.loaded_bytes += len(one.loads) * self.expert_bytes

    def keys(self, experts_TK: Tensor, turn: Turn) -> Tensor:
        """Return the place of each choice, int32 [T, K]: round times slots plus slot.

        Choices of experts that other ranks hold have the first number behind the last round.
        """
        table = [len(turn.rounds) * self.num_slots] * self.num_experts
        for number, one in enumerate(turn.rounds):
            for expert, slot in one.places:
                table[self.own.start + expert] = number * self.num_slots + slot
        table_E = torch.tensor(table, dtype=torch.int32, device=experts_TK.device)
        return table_E[experts_TK.long()]


def hosted_layers(model: nn.Module) -> tuple[HostedExperts, ...]:
    """Return the layers of a model whose experts are in host memory."""
    found = (getattr(module, "hosted", None) for module in model.modules())
    return tuple(hosted for hosted in found if isinstance(hosted, HostedExperts))


class HostCopies:
    """Copies between places of main memory, at once."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.waited_s = 0.0

    def load(self, copies: Sequence[Copy]) -> None:
        begin = self._clock()
        for target, source in copies:
            target.copy_(source)
        self.waited_s += self._clock() - begin


class StreamCopies:
    """Copies from page-locked memory to a GPU, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Events of the compute stream around each wait."""
        self.waited_s = 0.0

    def load(self, copies: Sequence[Copy]) -> None:
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)  # a product that was launched may still read a slot
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        begin, end = timed_event(), timed_event()
        begin.record(compute)
        compute.wait_stream(self._stream)
        end.record(compute)
        self._waits.append((begin, end))
        self._take_ended()

    def _take_ended(self) -> None:
        while self._waits and self._waits[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._waits.popleft()
            self.waited_s += begin.elapsed_time(end) / 1000


def copies_to(device: torch.device) -> Copies:
    return StreamCopies(device) if device.type == "cuda" else HostCopies()


def timed_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
