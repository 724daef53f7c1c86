"""What the core announces of its own silences: heartbeats, and how long the next step may keep it quiet.

Owned by the core; called by its thread. `step_pace` computes the silences, fronts compare (`core_watch`).
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.engine.core.messages import Heartbeat
from stoker.engine.core.step_pace import QuietLimits, StepPace


class Heartbeats:
    """The last announced silence. A longer one is announced before it begins."""

    def __init__(self, limits: QuietLimits, broadcast: Callable[[Heartbeat], None]) -> None:
        self._limits = limits
        self._broadcast = broadcast
        self._pace = StepPace(limits)
        self._promised_s = limits.first_s
        self._step_tokens = [0, 0]
        """Tokens of the last two steps: with overlap, `engine.step` waits for the first of them."""

    @property
    def last(self) -> Heartbeat:
        """For a front that has just come."""
        return Heartbeat(self._promised_s, self._pace.usual_step_s)

    def beat(self, *, loading: bool = False) -> None:
        """Announce the silence of a loop at rest, or of one that loads its model."""
        self._announce(self._limits.first_s if loading else self._limits.floor_s)

    def before_capture(self) -> None:
        """Announce a capture, which may take as long as loading."""
        self._promise(self._limits.first_s)

    def before_step(self, num_tokens: int) -> None:
        """Announce a step that may take longer than fronts expect."""
        self._step_tokens = [self._step_tokens[1], num_tokens]
        self._promise(self._pace.quiet_s(max(self._step_tokens)))

    def after_step(self, seconds: float) -> None:
        self._pace.record(max(self._step_tokens), seconds)

    def _promise(self, quiet_s: float) -> None:
        if quiet_s > self._promised_s:
            self._announce(quiet_s)

    def _announce(self, quiet_s: float) -> None:
        self._promised_s = quiet_s
        self._broadcast(self.last)
