"""The decisions about one pool that are kept: the newest, and those that a person wants to find again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.operator.domain.autoscaling.decision import Decision

KEPT = 20
BLOCKING = frozenset({"Unknown", "AtMax", "WaitingForRoom", "InfeasibleGoal"})
"""Reasons why a pool is not as large as its goals need, or why that is not known."""


@dataclass(frozen=True)
class DatedDecision:
    """A decision with its wall time, in the form of Kubernetes."""

    time: str
    decision: Decision


@dataclass(frozen=True)
class PoolScaling:
    """Decisions about one pool."""

    newest: Decision
    log: tuple[DatedDecision, ...] = ()
    """The last ones that changed the pool, or that began to be kept from it; oldest first."""

    def then(self, decision: Decision, time: str) -> PoolScaling:
        """The record after one more decision."""
        return PoolScaling(decision, _logged(self.log, self.newest, decision, time))


def first_record(decision: Decision, time: str) -> PoolScaling:
    """The record of a pool's first decision."""
    return PoolScaling(decision, _logged((), None, decision, time))


def _logged(
    log: tuple[DatedDecision, ...], before: Decision | None, decision: Decision, time: str
) -> tuple[DatedDecision, ...]:
    again = before is not None and _kind(before) == _kind(decision)  # also one that could not be carried out yet
    if again or (decision.after == decision.before and decision.reason not in BLOCKING):
        return log
    return (*log, DatedDecision(time, decision))[-KEPT:]


def _kind(decision: Decision) -> tuple[int, int, str]:
    return decision.before, decision.after, decision.reason
