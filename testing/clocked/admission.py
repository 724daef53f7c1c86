"""The router's admission in virtual time: the same lanes, without tasks. Requests come in the first class.

The twin of `Admission`, in which each request looks by itself. A class has no limit on how many wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stoker.router.admission import outlook_of
from stoker.router.goal_counts import GoalCounts
from stoker.router.lanes import Lanes, Outlook, Waiting
from stoker.router.pairs import Pair
from stoker.router.request_class import RequestClass, late_place
from stoker.router.work import Work
from testing.clocked.pod import ClockedPod
from testing.clocked.replica import ClockedReplica, Served

Place = ClockedReplica | ClockedPod
Choose = Callable[[Work, bool], Pair[Place]]
"""The engines of a request now; with `True` those with the soonest first token."""
Going = tuple[Served, Work, Pair[Place]]


class ClockedAdmission:
    """Requests that wait in the classes of one router."""

    def __init__(self, classes: Sequence[RequestClass], predicts: bool) -> None:
        """`predicts`: the policy chooses by predicted seconds."""
        self.lanes = Lanes(classes)
        self.predicts = predicts
        self.counts = GoalCounts()
        self.refused: list[Served] = []
        """Those that have no first token, since it was emptied."""
        self._waiting: dict[Waiting, tuple[Served, Work]] = {}
        self._rushed: dict[Waiting, Served] = {}
        self._pairs: dict[Waiting, tuple[Pair[Place], Outlook]] = {}

    @property
    def goal_s(self) -> float | None:
        """Of the class in which requests come."""
        return self.lanes.classes[0].ttft_goal_s

    @property
    def waits(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    def arrive(self, now_s: float, served: Served, work: Work, choose: Choose) -> None:
        """Take a new request; whether it goes at once, `going` says."""
        self._join(now_s, 0, served, work, choose)

    def going(self, now_s: float, choose: Choose) -> Iterator[Going]:
        """Yield the requests that go now, each before the next one is chosen. Late ones go on in the class behind."""
        while True:
            self._note_answered()
            while (waiting := self.lanes.next_one(now_s, lambda one: self._look(now_s, one, choose))) is not None:
                yield self._go(now_s, waiting)
            if not self._move_late(now_s, choose):
                return

    def _join(self, now_s: float, place: int, served: Served, work: Work, choose: Choose) -> None:
        waiting = self.lanes.join(place, now_s)
        self._waiting[waiting] = served, work
        self._count()
        if (own_s := self._look(now_s, waiting, choose).own_s) > 0:
            self.lanes.learn(place, own_s)

    def _go(self, now_s: float, waiting: Waiting) -> Going:
        pair, outlook = self._pairs[waiting]
        served, work = self._leave(waiting)
        if self.lanes.miss(waiting.place, outlook, now_s) is not None:
            self.lanes.rush(waiting)
            self._rushed[waiting] = served
        self.counts.go(self.goal_s, now_s - served.arrived_s, outlook.first_token_s)
        return served, work, pair

    def _move_late(self, now_s: float, choose: Choose) -> bool:
        """Move those whose time is over to the class behind, or refuse them; return whether there were any."""
        over = [one for one in self._waiting if now_s - one.since_s >= self.lanes.classes[one.place].max_queue_s]
        for waiting in over:
            served, work = self._leave(waiting)
            behind = late_place(self.lanes.classes, waiting.place)
            if behind is not None:
                self._join(now_s, behind, served, work, choose)
            else:
                self.counts.refuse(self.goal_s, for_goal=True)
                self.refused.append(served)
        return bool(over)

    def _note_answered(self) -> None:
        for waiting in [one for one, served in self._rushed.items() if served.first_s is not None]:
            self.lanes.answered(waiting)
            del self._rushed[waiting]

    def _look(self, now_s: float, waiting: Waiting, choose: Choose) -> Outlook:
        work = self._waiting[waiting][1]
        for soonest in (False, True):
            pair = choose(work, soonest)
            self._pairs[waiting] = pair, outlook_of(pair)
            if self.predicts or self.lanes.miss(waiting.place, self._pairs[waiting][1], now_s) is None:
                break
        return self._pairs[waiting][1]

    def _leave(self, waiting: Waiting) -> tuple[Served, Work]:
        self.lanes.leave(waiting)
        self._pairs.pop(waiting, None)
        found = self._waiting.pop(waiting)
        self._count()
        return found

    def _count(self) -> None:
        self.counts.waiting = len(self._waiting) if self.goal_s is not None else 0
