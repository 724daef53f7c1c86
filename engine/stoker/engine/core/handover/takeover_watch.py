"""The gap in a stream when a decode engine goes on alone: from the last token of its peer to its own first one."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.engine.core.handover.decode_side import Split, Stage
from stoker.engine.core.handover.office import Tally
from stoker.engine.core.request import Request


@dataclass(frozen=True, eq=False)
class Takeover:
    """A request that was taken over and has no token of this engine yet."""

    split: Split
    request: Request
    last_s: float


class TakeoverWatch:
    """The takeovers whose first token has not come."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._open: list[Takeover] = []

    def add(self, split: Split, request: Request) -> None:
        last_s = max((one.last_s for one in split.outputs if one.last_s is not None), default=split.began_s)
        self._open.append(Takeover(split, request, last_s))

    def measure(self) -> None:
        """Note the gap of each takeover whose first token has come."""
        for one in list(self._open):
            new = [sequence.last_token_s for sequence in one.request.sequences if sequence.last_token_s is not None]
            if new:
                self._tally.handed_over(max(min(new) - one.last_s, 0.0))
                one.split.stage = Stage.RUNNING
            if new or one.request.finished:
                self._open.remove(one)
