"""What can go wrong between an operator and an API server, and plans that say when.

A plan decides by the call and its number alone, so a run can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from e2e.api.api_call import ApiCall


@dataclass(frozen=True)
class Refuse:
    """Answer with a Status; the API server never sees the request."""

    code: int
    reason: str
    message: str = "refused on purpose"
    retry_after_s: int | None = None


@dataclass(frozen=True)
class Drop:
    """Close the connection without an answer: before the API server sees the request, or after it has acted."""

    after: bool = False


@dataclass(frozen=True)
class Hang:
    """The API server acts (or not), the answer never comes; the proxy's `hung` is set."""

    after: bool = True


@dataclass(frozen=True)
class Hold:
    """The request is on its way until the proxy's `released` is set, also when who sent it has died meanwhile.

    The answer never comes.
    """


@dataclass(frozen=True)
class Slow:
    """Pass everything on, later."""

    seconds: float


@dataclass(frozen=True)
class CutWatch:
    """Let some events of a watch through, then: `gone` and `error` send an ERROR event (410, 500), `drop` closes in the
    middle of the answer, `end` closes as the server does at its timeout, `silent` swallows everything that follows and
    leaves the connection open.
    """

    how: Literal["gone", "error", "drop", "end", "silent"]
    after_events: int = 0


Fault = Refuse | Drop | Hang | Hold | Slow | CutWatch

CONFLICT = Refuse(409, "Conflict", "the object has been modified; please apply your changes to the latest version")
GONE = Refuse(410, "Expired", "the provided continue parameter or resourceVersion is too old")
TOO_MANY = Refuse(429, "TooManyRequests", "too many requests, please try again later", retry_after_s=1)
INTERNAL = Refuse(500, "InternalError", "etcdserver: request timed out")
UNAVAILABLE = Refuse(503, "ServiceUnavailable", "the server is currently unable to handle the request")


class FaultPlan(Protocol):
    """Chooses the fault of each call."""

    def fault(self, call: ApiCall, number: int, write: int) -> Fault | None:
        """`number` counts the calls with this verb and resource, `write` all writes; both from 1 (`write` is 0 for
        reads).
        """


@dataclass(frozen=True)
class NoFaults:
    """Everything passes."""

    def fault(self, call: ApiCall, number: int, write: int) -> Fault | None:
        return None


@dataclass(frozen=True)
class Rule:
    """One fault for the calls `first` to `first + count - 1` that match; empty fields match all."""

    fault: Fault
    verb: str = ""
    what: str = ""
    first: int = 1
    count: int = 1

    def hits(self, call: ApiCall, number: int) -> bool:
        matches = self.verb in ("", call.verb) and self.what in ("", call.what)
        return matches and self.first <= number < self.first + self.count


@dataclass(frozen=True)
class Script:
    """The first rule that matches decides."""

    rules: tuple[Rule, ...]

    def fault(self, call: ApiCall, number: int, write: int) -> Fault | None:
        return next((rule.fault for rule in self.rules if rule.hits(call, number)), None)


@dataclass(frozen=True)
class AtWrite:
    """One fault at one write, whatever it writes."""

    write: int
    what: Fault

    def fault(self, call: ApiCall, number: int, write: int) -> Fault | None:
        return self.what if write == self.write else None


@dataclass(frozen=True)
class Seeded:
    """Any call may fail.

    The same seed fails the n-th call of a verb and resource in the same way, in whatever order calls come.
    """

    seed: int
    rate: float
    """Share of the calls that fail, 0 to 1."""
    calls_per_kind: int = 30
    """Later calls of a verb and resource pass, so that every run comes to an end."""

    def fault(self, call: ApiCall, number: int, write: int) -> Fault | None:
        draw = random.Random(f"{self.seed} {call.verb} {call.what} {number}")
        if number > self.calls_per_kind or draw.random() >= self.rate:
            return None
        menu = MENU["watch" if call.verb == "watch" else "write" if call.writes else "read"]
        return draw.choice(menu)


MENU: Mapping[str, tuple[Fault, ...]] = {
    "write": (CONFLICT, TOO_MANY, INTERNAL, UNAVAILABLE, Drop(), Drop(after=True), Slow(0.1)),
    "read": (GONE, TOO_MANY, INTERNAL, UNAVAILABLE, Drop(), Drop(after=True), Slow(0.2)),
    "watch": (
        GONE,
        INTERNAL,
        Drop(),
        *(CutWatch(how, events) for how in ("gone", "error", "drop", "end") for events in (0, 1, 3)),
    ),
}
