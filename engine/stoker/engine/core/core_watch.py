"""A front's watch on its core: is it stalled, is it dead? Pure: messages and the time are passed in.

The core announces its longest silence with each heartbeat. After a longer one the engine is stalled: not ready, until
the next message. After a multiple of it the engine is dead: not alive, and the kubelet restarts it. Only time in which
the front itself ran counts as silence, so a suspended machine or a front without processor time accuses no healthy
core.

Changed by `core_client` with each message.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.engine.core.messages import Heartbeat, Message
from stoker.engine.core.stats import Stats

LISTEN_S = 0.25
"""How often the front adds to the silence."""


@dataclass(frozen=True)
class WatchLimits:
    """A front's own limits, beside those that the core announces."""

    start_s: float = 120.0
    """Longest wait for the first message; the process imports torch."""
    dead_factor: float = 5.0
    """Multiple of the limits after which the process should be restarted."""
    dead_floor_s: float = 60.0
    no_step_s: float = 120.0
    """Longest time without the end of a step, although the core answers and has work."""


class CoreWatch:
    """The silence of one core, compared with its limits."""

    def __init__(self, limits: WatchLimits) -> None:
        self.limits = limits
        self.silence_s = 0.0
        self.quiet_s = limits.start_s
        """The longest healthy silence, as the core announced it last."""
        self.usual_step_s: float | None = None
        self.no_step_s = 0.0
        """Time in which the core answered and had work, but ended no step."""
        self._listened_s: float | None = None

    def take(self, message: Message) -> None:
        """Note a message of the core; it ends the silence."""
        self.silence_s = 0.0
        if isinstance(message, Heartbeat):
            self.quiet_s, self.usual_step_s = message.quiet_s, message.usual_step_s
        elif isinstance(message, Stats):
            has_work = message.running + message.waiting > 0
            self.no_step_s = message.time_s - message.progressed_s if has_work else 0.0

    def listen(self, now_s: float) -> None:
        """Add the time since the last call to the silence; called every `LISTEN_S` seconds."""
        if self._listened_s is not None:
            self.silence_s += min(now_s - self._listened_s, 2 * LISTEN_S)
        self._listened_s = now_s

    @property
    def stalled(self) -> bool:
        """Whether new requests should go elsewhere."""
        return self.silence_s > self.quiet_s or self.no_step_s > max(self.limits.no_step_s, self.quiet_s)

    @property
    def dead(self) -> bool:
        """Whether the process should be restarted."""
        factor, floor_s = self.limits.dead_factor, self.limits.dead_floor_s
        silence_limit_s = max(factor * self.quiet_s, floor_s)
        return self.silence_s > silence_limit_s or self.no_step_s > factor * max(self.limits.no_step_s, self.quiet_s)

    @property
    def reason(self) -> str | None:
        """The reason why the core is stalled, for people; None while it is not."""
        if not self.stalled:
            return None
        usual = f"usual step {self.usual_step_s:.2g} s" if self.usual_step_s is not None else "no step yet"
        if self.silence_s > self.quiet_s:
            return f"EngineStalled: no news from the core for {self.silence_s:.0f} s, {usual}"
        return f"EngineStalled: requests run, but no step has ended for {self.no_step_s:.0f} s, {usual}"
