"""Which request may go next, out of those that wait in their classes.

A request goes while its first token is predicted within the goal of its class, and while a usual request of each class
before its own would, if it came behind it, still get its first token in time. So later classes take what earlier ones
leave, and delay none of them beyond its goal. They also keep three quarters of the goal free of prompts that wait, so
that a burst of an earlier class does not find the queue of later ones. An earlier class of which no request has come
for some time is not waited for: a pool without such requests works for the later ones. A prompt that alone takes longer
than the goal goes when nothing waits before it. Requests of one class go in their order, and none goes before one that
waits in an earlier class.

A request that has waited for its class's aging time goes before all others, whatever is predicted, but only while no
other such request is without its first token: a class cannot starve, and costs the others one prompt at a time.

Pure: time and predictions are arguments. Owned by `Admission`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stoker.router.request_class import RequestClass

USUAL_WEIGHT = 0.1
"""Of a new request in the mean of a class."""
FILLED = 0.25
"""Share of an earlier class's goal that prompts before a later class's request may take: enough to keep an engine busy
until the next report, and a burst finds the rest."""
ABSENT = 4
"""Goals of a class without a request of it, after which none is expected behind those of later classes."""


class Outlook(NamedTuple):
    """What is predicted for a request at the engine that would compute its prompt, in seconds."""

    queue_s: float
    """Until the prompts before it are computed."""
    own_s: float
    """For its own prompt."""

    @property
    def first_token_s(self) -> float:
        """From now to its first token."""
        return self.queue_s + self.own_s


FREE = Outlook(0.0, 0.0)
"""Of a request about which nothing is known."""


class Miss(NamedTuple):
    """A limit that would be exceeded."""

    place: int
    """The number of the class whose goal it comes from."""
    predicted_s: float
    """First token of a request of that class; for the room of a class, the prompts before the request."""
    limit_s: float
    is_room: bool = False
    """Whether the limit is what later classes may fill of the goal."""

    @property
    def excess_s(self) -> float:
        return self.predicted_s - self.limit_s


@dataclass(eq=False)
class Waiting:
    """A request that waits."""

    place: int
    """The number of its class."""
    since_s: float


class Lanes:
    """The queues of all classes."""

    def __init__(self, classes: Sequence[RequestClass]) -> None:
        self.classes = classes
        self.usual_s = [0.0] * len(classes)
        """Mean time that a prompt of a class takes."""
        self._came_s = [-math.inf] * len(classes)
        """When the newest request of a class came."""
        self._lanes: list[deque[Waiting]] = [deque() for _ in classes]
        self._rushing: set[Waiting] = set()
        """Requests that went because of their age, and have no first token yet."""

    def count(self, place: int) -> int:
        """Number of requests that wait in a class."""
        return len(self._lanes[place])

    def is_first(self, waiting: Waiting) -> bool:
        """Whether no request of its class waits before it."""
        return self._lanes[waiting.place][0] is waiting

    def join(self, place: int, now_s: float) -> Waiting:
        """Add a request behind those of its class."""
        waiting = Waiting(place, now_s)
        self._came_s[place] = now_s
        self._lanes[place].append(waiting)
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """Remove a request that goes, or that waits no longer."""
        self._lanes[waiting.place].remove(waiting)

    def rush(self, waiting: Waiting) -> None:
        """Note that a request goes because of its age."""
        self._rushing.add(waiting)

    def answered(self, waiting: Waiting) -> None:
        """Note that a request has its first token, or ended without one."""
        self._rushing.discard(waiting)

    def learn(self, place: int, own_s: float) -> None:
        """Note how long the prompt of a new request takes."""
        before = self.usual_s[place]
        self.usual_s[place] = before + USUAL_WEIGHT * (own_s - before) if before else own_s

    def heads(self, now_s: float) -> Iterator[Waiting]:
        """Yield the first request of each class in the order in which they may go: old ones, then by class."""
        first = [lane[0] for lane in self._lanes if lane]
        yield from sorted((one for one in first if self.is_old(one, now_s)), key=lambda one: one.since_s)
        yield from (one for one in first if not self.is_old(one, now_s))

    def is_old(self, waiting: Waiting, now_s: float) -> bool:
        """Whether a request has waited for its class's aging time."""
        lane = self.classes[waiting.place]
        return lane.max_queue_s > 0 and now_s - waiting.since_s >= lane.ages_after_s

    def may_rush(self, waiting: Waiting, now_s: float) -> bool:
        """Whether a request may go whatever is predicted."""
        return self.is_old(waiting, now_s) and not self._rushing

    def next_one(self, now_s: float, outlook_of: Callable[[Waiting], Outlook]) -> Waiting | None:
        """Choose the request that goes now; None where all wait."""
        for waiting in self.heads(now_s):
            miss = self.miss(waiting.place, outlook_of(waiting), now_s)
            if miss is None or self.may_rush(waiting, now_s):
                return waiting
            if not self.is_old(waiting, now_s):
                return None
        return None

    def miss(self, place: int, outlook: Outlook, now_s: float) -> Miss | None:
        """Find the limit that would be exceeded by most if a request of a class went now; None where all are kept."""
        misses = [miss for miss in self._foreseen(place, outlook, now_s) if miss.excess_s > 0]
        return max(misses, key=lambda miss: miss.excess_s, default=None)

    def _foreseen(self, place: int, outlook: Outlook, now_s: float) -> Iterator[Miss]:
        """Yield, for its class and those before it, a first token and the goal, which no prompt's own time exceeds, and
        for those before it what waits already."""
        own = self.classes[place].ttft_goal_s
        if own is not None:
            yield Miss(place, outlook.first_token_s, max(own, outlook.own_s))
        for before, usual_s in enumerate(self.usual_s[:place]):
            goal = self.classes[before].ttft_goal_s
            if goal is None:
                continue
            if now_s - self._came_s[before] <= ABSENT * goal:
                yield Miss(before, outlook.first_token_s + usual_s, max(goal, usual_s))
            yield Miss(before, outlook.queue_s, FILLED * goal, is_room=True)
