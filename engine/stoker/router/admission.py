"""Admission of requests by class: each goes to an engine, waits, or is refused, by its predicted first token.

A request that would be late may go on in a later class in place of being refused: prompts that are late anyway then
delay no others. Predictions come from the reports of engines and this router's own requests. While no engine has
measured its rate, nothing is predicted and every request goes.

Made by `Router` where classes are configured. `Proxy` asks it for each request with a prompt. `Lanes` decides.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from stoker.router.backend import Candidate
from stoker.router.backends import Backends
from stoker.router.class_metrics import ClassMetrics
from stoker.router.connection import Outgoing
from stoker.router.fallback import is_from_fallback
from stoker.router.goal_counts import GoalCounts
from stoker.router.lanes import FREE, Lanes, Miss, Outlook, Waiting
from stoker.router.pairs import Pair, Place
from stoker.router.refusal import RETRY_AFTER_S, Refused
from stoker.router.request_class import RequestClass, UnknownClass, class_of, late_place
from stoker.router.standing import measured
from stoker.router.work import Work

LOOK_S = 0.05
"""Time after which the first request of a class looks again: reports of engines come as often."""
NO_ENGINE = Outlook(math.inf, 0.0)
LATE = frozenset(("ttft_goal", "queue_full"))
"""Codes of refusals of requests that may go on in a later class."""


@dataclass(eq=False)
class Ticket:
    """A request that was admitted, or waits to be."""

    waiting: Waiting
    work: Work
    key: bytes
    """By which its revision is chosen."""
    name: str
    """Of its class."""
    arrived_s: float
    """When the request came, in whatever class."""
    goal_s: float | None
    """Of the class that it came in."""
    outlook: Outlook = FREE
    pair: Pair[Candidate] | None = None
    """The engines that it may have; None: none is ready."""
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it becomes the first of its class."""


class Admission:
    """Decides on the requests of one router, in one event loop."""

    def __init__(
        self, classes: tuple[RequestClass, ...], backends: Backends, metrics: ClassMetrics,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.classes = classes
        self.backends = backends
        self.metrics = metrics
        self.clock = clock
        self.lanes = Lanes(classes)
        self.goal_counts = GoalCounts()
        self._tickets: dict[Waiting, Ticket] = {}

    def queued(self) -> dict[str, int]:
        """Requests that wait, by class."""
        return {one.name: self.lanes.count(place) for place, one in enumerate(self.classes)}

    async def admit(self, request: Outgoing, work: Work, key: bytes) -> Ticket:
        """Wait until the request may go; return the engines chosen for it. It must go before anything is awaited.

        Raises:
            Refused: its class is unknown, its goal would be missed, its class's queue is full or its time is over.
        """
        first = self._class_of(request)
        arrived_s, place = self.clock(), first
        with self.goal_counts.waits(self.classes[first].ttft_goal_s):
            while True:
                ticket = self._join(place, arrived_s, self.classes[first].ttft_goal_s, work, key)
                try:
                    await self._go(ticket)
                except Refused as refused:
                    place = self._behind(ticket, refused)
                else:
                    return ticket

    def _class_of(self, request: Outgoing) -> int:
        """The number of its class. A class of the deployment that falls back here may be none of this one: then it is
        as if the request named none.

        Raises:
            Refused: its class is unknown.
        """
        try:
            return class_of(request.body, request.headers, self.classes)
        except UnknownClass as error:
            if is_from_fallback(request):
                return 0
            raise Refused(400, "invalid_value", str(error)) from error

    def _join(self, place: int, arrived_s: float, goal_s: float | None, work: Work, key: bytes) -> Ticket:
        """Queue a request in a class."""
        waiting = self.lanes.join(place, self.clock())
        ticket = Ticket(waiting, work, key, self.classes[place].name, arrived_s, goal_s)
        self._tickets[waiting] = ticket
        return ticket

    async def _go(self, ticket: Ticket) -> None:
        """Wait until the request may go in its class, and note that it goes.

        Raises:
            Refused: it may not.
        """
        try:
            await self._wait(ticket)
        finally:
            del self._tickets[ticket.waiting]
            self.lanes.leave(ticket.waiting)
            self._wake()
        self._note_going(ticket)
        if ticket.pair is not None:
            self.backends.take(ticket.pair, ticket.work)

    def _behind(self, ticket: Ticket, refused: Refused) -> int:
        """The class in which a request goes on that its own class refuses.

        Raises:
            Refused: there is none.
        """
        place = late_place(self.classes, ticket.waiting.place) if refused.code in LATE else None
        self.metrics.refused(ticket.name, refused.code if place is None else "late_class")
        if place is None:
            self.goal_counts.refuse(ticket.goal_s, refused.code in LATE)
            raise refused
        return place

    @contextmanager
    def unanswered(self, ticket: Ticket) -> Iterator[None]:
        """Count an admitted request as one without its first token."""
        try:
            yield
        finally:
            self.lanes.answered(ticket.waiting)
            self._wake()

    def began(self, ticket: Ticket, *, is_stream: bool) -> None:
        """Note that the answer of an admitted request has begun."""
        if is_stream:
            own = self.classes[ticket.waiting.place]
            self.metrics.began(ticket.name, self.clock() - ticket.arrived_s, own.ttft_goal_s)

    async def _wait(self, ticket: Ticket) -> None:
        waiting, own = ticket.waiting, self.classes[ticket.waiting.place]
        if self._goes_at_once(ticket):
            return
        if own.max_queue_s and self.lanes.count(waiting.place) > own.max_queued:
            raise self._full(ticket)
        until_s = waiting.since_s + own.max_queue_s
        while (now_s := self.clock()) < until_s:
            await self._sleep(ticket, until_s - now_s)
            if self._next() is ticket:
                return
        raise self._refusal(ticket, now_s - waiting.since_s)

    def _goes_at_once(self, ticket: Ticket) -> bool:
        """Decide on a new request. Where no engine is ready it goes: the proxy holds it, or asks the fallback."""
        found = self._next()
        if ticket.pair is None:
            self._look(ticket)  # others wait before it
        if ticket.outlook.own_s > 0:
            self.lanes.learn(ticket.waiting.place, ticket.outlook.own_s)
        return found is ticket or ticket.pair is None

    async def _sleep(self, ticket: Ticket, at_most_s: float) -> None:
        """Sleep until the request may be the next one. Only the first of a class looks at a pace of its own."""
        first = self.lanes.is_first(ticket.waiting)
        ticket.turn.clear()
        try:
            async with asyncio.timeout(min(LOOK_S, at_most_s) if first else at_most_s):
                await ticket.turn.wait()
        except TimeoutError:
            pass

    def _next(self) -> Ticket | None:
        """Choose the request that goes now."""
        found = self.lanes.next_one(self.clock(), lambda one: self._look(self._tickets[one]))
        return self._tickets[found] if found is not None else None

    def _look(self, ticket: Ticket) -> Outlook:
        """Predict the request's first token at the engines that it would get now: those that the policy chooses, or
        those with the soonest token where it would be late there."""
        outlook = self._predict(ticket)
        if self.backends.policy_predicts or self.lanes.miss(ticket.waiting.place, outlook, self.clock()) is None:
            return outlook
        return self._predict(ticket, soonest=True)

    def _predict(self, ticket: Ticket, *, soonest: bool = False) -> Outlook:
        """Choose the engines of a request, and predict its first token there."""
        ticket.pair = self.backends.find_shared(set(), ticket.work, ticket.key, soonest=soonest)
        ticket.outlook = outlook_of(ticket.pair) if ticket.pair is not None else NO_ENGINE
        return ticket.outlook

    def _wake(self) -> None:
        """Let the first request of each class look again."""
        for waiting in self.lanes.heads(self.clock()):
            self._tickets[waiting].turn.set()

    def _note_going(self, ticket: Ticket) -> None:
        waiting, now_s = ticket.waiting, self.clock()
        if self.lanes.miss(waiting.place, ticket.outlook, now_s) is not None:
            self.lanes.rush(waiting)
        self.metrics.admitted(ticket.name, now_s - waiting.since_s, ticket.outlook)
        self.goal_counts.go(ticket.goal_s, now_s - ticket.arrived_s, ticket.outlook.first_token_s)

    def _refusal(self, ticket: Ticket, waited_s: float) -> Refused:
        own = self.classes[ticket.waiting.place]
        if ticket.pair is None:
            return Refused(503, "no_backend", "No engine can serve the request now. Try again later.", RETRY_AFTER_S)
        waited = f" It waited {waited_s:.1f} s (maxQueueSeconds {own.max_queue_s:g})." if own.max_queue_s else ""
        miss = self.lanes.miss(ticket.waiting.place, ticket.outlook, self.clock())
        text = self._text(ticket, miss) if miss else f"Requests of class {own.name} before it have not gone yet."
        return Refused(429, "ttft_goal", text + waited, _retry_after_s(miss))

    def _full(self, ticket: Ticket) -> Refused:
        own = self.classes[ticket.waiting.place]
        miss = self.lanes.miss(ticket.waiting.place, ticket.outlook, self.clock())
        text = f"{own.max_queued} requests of class {own.name} wait already (maxQueued)."
        return Refused(429, "queue_full", text, _retry_after_s(miss))

    def _text(self, ticket: Ticket, miss: Miss) -> str:
        """Name the limit that would be exceeded."""
        own, other = self.classes[ticket.waiting.place], self.classes[miss.place]
        goal = f"{other.ttft_goal_s:g} s (ttftMs of class {other.name})"
        if miss.place == ticket.waiting.place:
            return f"The first token is predicted in {miss.predicted_s:.1f} s, later than the goal of {goal}."
        if miss.is_room:
            return (
                f"Class {own.name} waits: the prompts before this one take {miss.predicted_s:.1f} s, and later classes "
                f"fill only a quarter of the goal of {goal}."
            )
        return (
            f"Class {own.name} waits: a request of class {other.name} behind this one would get its first token in "
            f"{miss.predicted_s:.1f} s, later than its goal of {goal}."
        )


class Rated(Place, Protocol):
    """An engine that has told its rate."""

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second by its newest report, however old; None before it has measured them."""
        ...


R = TypeVar("R", bound=Rated)


def outlook_of(pair: Pair[R]) -> Outlook:
    """Predict a request's first token at the engine that would compute its prompt.

    Where more waits than a step holds, it joins one only after those that are on their way, and its token comes at the
    end of its last one: a step more than the tokens alone tell.
    """
    place = pair.computes
    rate = place.prefill_rate
    if rate is None:
        return FREE
    seen = measured(place, place.load, rate)
    queue, own = seen.queue(pair.uncached), max(pair.uncached, 0)
    if queue and queue + own > seen.step:
        queue += seen.step
    return Outlook(queue / rate, own / rate)


def _retry_after_s(miss: Miss | None) -> int:
    """Whole seconds until the goal is predicted to be met."""
    return max(math.ceil(miss.excess_s), RETRY_AFTER_S) if miss is not None else RETRY_AFTER_S
