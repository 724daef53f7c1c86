"""The experts of one layer whose weights are in slots on the device, and those that make room for others.

A turn is one call of the layer: it needs some experts, in as many rounds as the slots require. Experts that are in
slots already compute in the first round. What leaves is the expert with the lowest score: each turn that needs an
expert adds one, and the sum is halved every `HALF_LIFE` turns, so that both recency and frequency count.

Pure: no torch, no clock. Owned by `hosted_experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

HALF_LIFE = 16
"""Turns after which a use counts half."""
ONE_USE = 1 << 20
"""Score of one use: an integer, so that halving several times at once equals halving one by one."""


class Place(NamedTuple):
    """An expert and the slot that holds its weights."""

    expert: int
    slot: int


class Round(NamedTuple):
    """Experts that compute together."""

    places: tuple[Place, ...]
    """By expert."""
    loads: tuple[Place, ...]
    """Those of them that have to be loaded first. Their slots may be in use by the round before."""


class ExpertSlots:
    """Slots of one layer, all of them empty at first."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        """Raises ValueError unless there is a slot, and no more than experts."""
        if not 1 <= num_slots <= num_experts:
            raise ValueError(f"slots must be from 1 to {num_experts}, the number of experts, got {num_slots}")
        self.num_slots = num_slots
        self.slot_of: dict[int, int] = {}
        """Of the experts that are in slots."""
        self._empty = list(range(num_slots))
        self._turns = 0
        self._scores = [0] * num_experts
        self._used = [0] * num_experts
        """Turn of an expert's last use, at which its score was true."""

    def turn(self, wanted: Iterable[int]) -> tuple[Round, ...]:
        """Return the rounds in which these experts compute; the slots are from then on as the last one leaves them."""
        experts = sorted(set(wanted))
        self._turns += 1
        for expert in experts:
            self._scores[expert], self._used[expert] = self.score(expert) + ONE_USE, self._turns
        held = [expert for expert in experts if expert in self.slot_of]
        missing = [expert for expert in experts if expert not in self.slot_of]
        first = missing[: self.num_slots - len(held)]
        rounds = [self._round(held + first, first)] if experts else []
        for begin in range(len(first), len(missing), self.num_slots):
            later = missing[begin : begin + self.num_slots]
            rounds.append(self._round(later, later))
        return tuple(rounds)

    def forget(self) -> None:
        """Count every slot as empty: their content is not known."""
        self.slot_of.clear()
        self._empty = list(range(self.num_slots))

    def score(self, expert: int) -> int:
        """Return how often the expert was needed, with older turns counting less."""
        halvings = self._turns // HALF_LIFE - self._used[expert] // HALF_LIFE
        return self._scores[expert] >> halvings

    def _round(self, experts: Sequence[int], missing: Sequence[int]) -> Round:
        loads = [
            Place(expert, slot) for expert, slot in zip(missing, self._cleared(experts, len(missing)), strict=True)
        ]
        self.slot_of.update(loads)
        return Round(tuple(Place(expert, self.slot_of[expert]) for expert in sorted(experts)), tuple(loads))

    def _cleared(self, kept: Sequence[int], count: int) -> list[int]:
        """Take so many slots: empty ones, then those of the experts with the lowest scores that are not kept."""
        slots, self._empty = self._empty[:count], self._empty[count:]
        idle = sorted(
            set(self.slot_of) - set(kept), key=lambda expert: (self.score(expert), self._used[expert], expert)
        )
        return slots + [self.slot_of.pop(expert) for expert in idle[: count - len(slots)]]
