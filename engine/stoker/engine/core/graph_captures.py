"""Captures of graphs while an engine serves: rarely between steps, and at rest. `capture_pace` says when.

Owned by the core; called by its thread.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.engine.core.capture_pace import CapturePace
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.heartbeats import Heartbeats


class GraphCaptures:
    """One graph at a time, so that messages are read between two."""

    def __init__(self, heartbeats: Heartbeats, clock: Callable[[], float]) -> None:
        self._heartbeats, self._clock = heartbeats, clock
        self._pace = CapturePace()
        self._left = True
        """Some may be left to capture."""
        self.follows = False
        """Another one may follow at once."""

    def after_step(self, engine: LLMEngine) -> None:
        """Capture a graph whose lack has cost much, although requests run; rarely."""
        self._left = True
        began_s = self._clock()
        self._pace.worked(began_s)
        if self._pace.due(began_s) and self._capture(engine, wanted=True):
            self._pace.record(began_s, self._clock())

    def at_rest(self, engine: LLMEngine, *, awaited: bool) -> None:
        """Capture a graph, soon after work only one whose lack has cost much.

        Args:
            awaited: whether another engine computes a prompt for this one, so that this is no rest.
        """
        now_s = self._clock()
        if awaited:
            self._pace.worked(now_s)
        if not self._left:
            self.follows = False
            return
        rests = self._pace.rests(now_s)
        self._heartbeats.before_capture()
        self.follows = self._capture(engine, wanted=not rests)
        self._heartbeats.beat()  # else a silence soon after it would be excused for as long
        self._left = self.follows or not rests

    def _capture(self, engine: LLMEngine, *, wanted: bool) -> bool:
        """Capture one graph: one that steps lack, or any. False: there is none."""
        began_s = self._clock()
        captured = engine.executor.capture_next_graph(wanted=wanted)
        if captured:
            engine.timeline.captured(began_s)
        return captured
