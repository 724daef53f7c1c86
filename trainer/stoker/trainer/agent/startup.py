"""The moments of a pod's start, from the events of its ranks: what the operator breaks the start of an attempt down by.

A moment is reached when the last rank of the pod has reached it. Part of `RunState`.
"""

from __future__ import annotations

from collections import defaultdict

from stoker.trainer.protocol.messages import Event, Moment, MomentEvent, PhaseEvent, StepEvent


class Startup:
    """Unix times of the moments of a start, and the seconds of it in which kernels were compiled."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._reached: defaultdict[Moment, dict[int, float]] = defaultdict(dict)
        self._compile_s: dict[int, float] = {}

    def note(self, rank: int, event: Event, unix: float) -> None:
        """Note an event of a rank; only those of the start change anything."""
        match event:
            case MomentEvent():
                self._reached[event.moment].setdefault(rank, unix)
            case PhaseEvent(phase="FirstStep"):
                self._reached["loaded"].setdefault(rank, unix)
            case StepEvent() if rank not in self._reached["stepped"]:
                self._reached["stepped"][rank] = unix
                self._compile_s[rank] = event.compile_s or 0.0

    def status(self) -> dict[str, float]:
        """The moments that every rank has reached, and `compile_s` once the first step is done."""
        moments: dict[str, float] = {
            f"{moment}_at": max(times.values())
            for moment, times in self._reached.items()
            if len(times) == self._num_ranks
        }
        return moments | ({"compile_s": max(self._compile_s.values())} if "stepped_at" in moments else {})
