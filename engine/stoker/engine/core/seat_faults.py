"""Seats counted anew: none may be missing or taken twice. Pure; asked by the scheduler's audit."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from stoker.engine.core.request import Sequence


def seat_faults(running: Seq[Sequence], free: Seq[int], reserved: int, num_seats: int) -> Iterator[str]:
    """Yield what does not add up. `reserved`: seats that are kept for choices that are to fork."""
    seats = [sequence.seat for sequence in running if sequence.seat is not None]
    if len(seats) != len(running):
        yield "a running sequence has no seat"
    if sorted([*seats, *free]) != list(range(num_seats)):
        yield "a seat is neither free nor taken, or taken twice"
    if not sum(sequence.num_seats - 1 for sequence in running) == reserved <= len(free):
        yield "choices that are to fork have no seats"
