"""Signals to a rank for the next step boundary, and their reduction over all ranks to one decision.

The agent sends them. `SignalInbox` collects them on a rank (made by `build`, read by the loop), and the training step
reduces `StepSignals` over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.messages import SaveCommand, StopCommand, StopMode

STOP_MODES: tuple[StopMode | None, ...] = (None, "interrupt", "suspend", "cancel")
"""Weakest first: the last one among the ranks' modes counts."""


@dataclass(frozen=True)
class StepSignals:
    """`stop` ends the run after this step; `save_on_stop` saves first. `save` and `timed_save` request a save."""

    stop: StopMode | None = None
    save_on_stop: bool = True
    save: bool = False
    timed_save: bool = False

    def numbers(self) -> list[float]:
        """The signals as numbers, so that the maximum over all ranks decides."""
        return [
            float(STOP_MODES.index(self.stop)),
            float(not self.save_on_stop),
            float(self.save),
            float(self.timed_save),
        ]

    @classmethod
    def merge(cls, by_rank: Sequence[Sequence[float]]) -> Self:
        """The decision of all ranks from the `numbers()` of each."""
        stop, no_save, save, timed_save = (int(max(column)) for column in zip(*by_rank, strict=True))
        return cls(STOP_MODES[stop], not no_save, bool(save), bool(timed_save))


class SignalInbox:
    """Turns the agent's commands and the save interval into signals. Requests stay here until a save answers them."""

    def __init__(
        self, channel: RankChannel, save_every_s: float | None, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel = channel
        self._save_every_s = save_every_s if rank == 0 else None
        self._clock = clock
        self._last_save_s = clock()
        self._stop: StopCommand | None = None
        self._requests: list[str] = []

    def read(self) -> StepSignals:
        """This rank's signals now."""
        for command in self._channel.take():
            if isinstance(command, SaveCommand):
                self._requests.append(command.id)
            elif self._stop is None or STOP_MODES.index(command.mode) > STOP_MODES.index(self._stop.mode):
                self._stop = command
        due = self._save_every_s is not None and self._clock() - self._last_save_s >= self._save_every_s
        stop = self._stop
        return StepSignals(
            stop=stop.mode if stop else None,
            save_on_stop=stop.save if stop else True,
            save=bool(self._requests),
            timed_save=due,
        )

    def take_requests(self) -> tuple[str, ...]:
        """Remove and return the ids of the requests that the save which starts now answers."""
        requests, self._requests = tuple(self._requests), []
        self._last_save_s = self._clock()
        return requests
