"""Faults between an operator and an API server, and plans that choose the faulty calls.

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
    """Answer with a Status; the API server does not receive the request."""

    code: int
    reason: str
    message: str = "refused on purpose"
    retry_after_s: int | None = None


@dataclass(frozen=True)
class Drop:
    """Close the connection without an answer, before the API server receives the request or after it has acted."""

    after: bool = False


@dataclass(frozen=True)
class Hang:
    """Withhold the answer, whether the API server acts or not; sets the proxy's `hung`."""

    after: bool = True


@dataclass(frozen=True)
class Hold:
    """Hold the request until the proxy's `released` is set, even if the sender has died meanwhile.

    No answer is sent.
    """


@dataclass(frozen=True)
class Slow:
    """Delay everything, and pass it on unchanged."""

    seconds: float


@dataclass(frozen=True)
class CutWatch:
    """Disturb a watch after some of its events.

    `gone` and `error` send an ERROR event (410, 500). `drop` closes in the middle of the answer. `end` closes as the
    server does at its timeout. `silent` drops everything that follows and leaves the connection open.
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
    """The interface that chooses the fault of each call."""

    def fault(self, call: ApiCall, number: int, write: int) -> Fault | None:
        """Return the fault of a call, or None.

        `number` counts the calls with this verb and resource, `write` all writes. Both start at 1; `write` is 0 for
        reads.
        """


@dataclass(frozen=True)
class NoFaults:
    """A plan that lets everything pass."""

    def fault(self, call: ApiCall, number: int, write: int) -> Fault | None:
        return None


@dataclass(frozen=True)
class Rule:
    """One fault for the matching calls `first` to `first + count - 1`; empty fields match every call."""

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
    """A plan in which the first matching rule decides."""

    rules: tuple[Rule, ...]

    def fault(self, call: ApiCall, number: int, write: int) -> Fault | None:
        return next((rule.fault for rule in self.rules if rule.hits(call, number)), None)


@dataclass(frozen=True)
class AtWrite:
    """One fault at the write with a given number, whatever it writes."""

    write: int
    what: Fault

    def fault(self, call: ApiCall, number: int, write: int) -> Fault | None:
        return self.what if write == self.write else None


@dataclass(frozen=True)
class Seeded:
    """Random faults from a seed; any call may fail.

    The same seed fails the n-th call of a verb and resource in the same way, whatever the order of calls.
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
