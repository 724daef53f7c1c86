"""The slow twin of the scheduler's order: every decision is derived anew from all requests."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from stoker.engine.core.request import Request, Sequence, State

Rank = tuple[int, int, int, int]


class SlowOrder:
    """Who goes before whom, by the rules alone."""

    def __init__(self, aging_s: float) -> None:
        self.aging_s = aging_s
        self.aged: list[Request] = []
        """All that have aged, the newest last."""

    def turn(self, requests: Seq[Request], now_s: float) -> None:
        """Let the request age whose turn has come."""
        if self.aged and not self.aged[-1].finished:
            return
        waiting = sorted(sequences(requests, State.WAITING), key=self.rank)
        if not waiting:
            return
        oldest = min((one.request for one in waiting), key=lambda one: (one.arrival_s, one.arrival))
        mixed = len({(one.request.place, one.request.priority) for one in waiting}) > 1
        if mixed and oldest is not waiting[0].request and now_s - oldest.arrival_s >= self.aging_s:
            self.aged.append(oldest)

    def rank(self, sequence: Sequence) -> Rank:
        request = sequence.request
        if request in self.aged:
            return (-1, 0, request.arrival, sequence.choice)
        return (request.place, request.priority, request.arrival, sequence.choice)


def sequences(requests: Seq[Request], state: State) -> list[Sequence]:
    """All choices in a state."""
    return [one for request in requests for one in request.sequences if one.state is state]
