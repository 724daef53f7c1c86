"""Ageing: a request that has waited too long goes before all classes and priorities, so that none starves. Pure.

At most one request is aged at a time, from its turn until it ends; the others that have waited as long go on waiting,
the oldest next. Thus the lower classes together have at least one request in work whatever the higher ones send, and
the higher ones lose no more than the seats and blocks of that one.

The bound: a request with k older ones, of any class, in the queue begins at most `after_s` + (2 k + 1) T after its
arrival, where T is the longest time that the sequences of a full engine, or an aged one, take to end. An aged request
waits at most T for the sequences that ran when its turn came, because nothing is admitted before it, and takes at most
T itself.

Owned by the scheduler. Requests of one class and priority never age: they are served in the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from stoker.engine.core.request import Request, Sequence


class Ageing:
    """Chooses the request that is to go before all others."""

    def __init__(self, after_s: float = math.inf) -> None:
        """`after_s`: time in the queue after which a request ages, in seconds; inf: never."""
        self.after_s = after_s
        self.num_aged = 0
        self._aged: Request | None = None
        self._due_s = math.inf
        """No request that waits ages before this time."""

    def waits(self, sequence: Sequence) -> None:
        """Note that a sequence waits from now on."""
        self._due_s = min(self._due_s, sequence.request.arrival_s + self.after_s)

    def turn(self, waiting: Seq[Sequence], now_s: float) -> Request | None:
        """Choose the request whose turn has come; None while another one is aged, or none has waited long enough.

        `waiting`: in the order of service. A request at its head needs no turn.
        """
        if now_s < self._due_s or (self._aged is not None and not self._aged.finished):
            return None
        if not waiting or waiting[0].request.standing == waiting[-1].request.standing:
            return None
        oldest = min(waiting, key=_arrival).request
        self._due_s = oldest.arrival_s + self.after_s
        if oldest is waiting[0].request or now_s < self._due_s:
            return None
        self._aged, self.num_aged = oldest, self.num_aged + 1
        return oldest


def _arrival(sequence: Sequence) -> tuple[float, int]:
    return sequence.request.arrival_s, sequence.request.arrival
