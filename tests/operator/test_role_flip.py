"""Roles that flip before a replica is started: who lends, who gets back, and what is left to start and to drain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.decision import Decision, Limits, Memory, PoolInput, Reason
from stoker.operator.domain.autoscaling.role_flip import GROWING, Reviewed, flip_roles

NOW_S = 1000.0
REASONS: tuple[Reason, ...] = (
    "Bounds", "Unknown", "Load", "Missed", "Proven", "Sufficient", "Proving", "AtMax", "WaitingForRoom",
    "InfeasibleGoal", "Idle", "Wake", "Burst",
)  # fmt: skip


def grows(before: int, after: int, reason: Reason = "Load", **changes: Any) -> Reviewed:
    """A pool that needs more replicas."""
    return reviewed(before, after, reason, needed=after, needs=after, **changes)


def rests(replicas: int, needs: int, **changes: Any) -> Reviewed:
    """A pool that has needed at most `needs` for long."""
    return reviewed(replicas, replicas, "Proving", needed=needs, needs=needs, **changes)


def shrinks(before: int, **changes: Any) -> Reviewed:
    return reviewed(before, before - 1, "Proven", needed=before - 1, needs=before - 1, **changes)


def reviewed(before: int, after: int, reason: Reason, *, needed: int, needs: int, **changes: Any) -> Reviewed:
    limits = Limits(changes.pop("min", 1), changes.pop("max", 8))
    memory = Memory(needs=((NOW_S - 1, needs),), since_s=NOW_S - changes.pop("known_s", 600.0))
    seen = PoolInput(before, changes.pop("ready", before), **changes)
    return Reviewed(limits, seen, Decision(NOW_S, before, after, reason, "why", needed=needed), memory)


def outcome(one: Reviewed, other: Reviewed) -> tuple[tuple[int, int], tuple[int, int]]:
    """(after, flips) of both."""
    first, second = flip_roles(NOW_S, one, other)
    assert flip_roles(NOW_S, other, one) == (second, first), "the order of the pools has no part"
    return (first.after, first.flips), (second.after, second.flips)


CASES = [
    pytest.param(grows(2, 3), rests(3, 2), ((3, 1), (2, -1)), id="a spare replica changes its role"),
    pytest.param(grows(2, 4), rests(3, 2), ((4, 1), (2, -1)), id="what flips do not cover is started"),
    pytest.param(grows(2, 4), rests(5, 1), ((4, 2), (3, -2)), id="no more than are needed"),
    pytest.param(grows(2, 3), rests(3, 3), ((3, 0), (3, 0)), id="no replica to spare"),
    pytest.param(grows(2, 3), rests(3, 1, min=3), ((3, 0), (3, 0)), id="never below min"),
    pytest.param(grows(2, 3), rests(1, 0, min=0), ((3, 0), (1, 0)), id="never the last one"),
    pytest.param(grows(2, 3), rests(3, 2, ready=1), ((3, 0), (3, 0)), id="only ready ones"),
    pytest.param(grows(2, 3), rests(3, 2, known_s=119.0), ((3, 0), (3, 0)), id="spare for less than a start"),
    pytest.param(grows(2, 3), grows(3, 4), ((3, 0), (4, 0)), id="both need more"),
    pytest.param(grows(2, 3), shrinks(3), ((3, 1), (2, -1)), id="lent instead of drained"),
    pytest.param(grows(2, 3, "Burst"), rests(3, 2), ((3, 0), (3, 0)), id="not for a burst"),
    pytest.param(grows(2, 3, "Bounds"), rests(3, 2), ((3, 0), (3, 0)), id="min that was raised"),
    pytest.param(
        reviewed(2, 2, "WaitingForRoom", needed=4, needs=4), rests(4, 2), ((4, 2), (2, -2)), id="needs no room"
    ),
    pytest.param(
        reviewed(2, 2, "WaitingForRoom", needed=9, needs=9, max=3), rests(4, 1), ((3, 1), (3, -1)), id="up to max"
    ),
    pytest.param(grows(0, 1, "Wake", min=0), rests(3, 1), ((1, 1), (2, -1)), id="a wake"),
    pytest.param(
        rests(3, 3), grows(2, 3, unknown=("engine e",)), ((3, 0), (3, 0)), id="nothing while an input is unknown"
    ),
    pytest.param(grows(2, 3, lent=1), rests(3, 3, borrowed=1), ((3, 1), (2, -1)), id="its own comes back"),
    pytest.param(grows(2, 3, lent=1), grows(3, 4, borrowed=1), ((3, 1), (4, -1)), id="also while both need more"),
    pytest.param(
        grows(2, 3, lent=1), rests(2, 2, min=2, borrowed=1), ((3, 0), (2, 0)), id="never below the other one's min"
    ),
    pytest.param(shrinks(3, borrowed=1), rests(2, 2, lent=1), ((2, -1), (3, 1)), id="given back when not needed"),
    pytest.param(shrinks(3, borrowed=1), shrinks(2, lent=1), ((2, -1), (3, 1)), id="given back, drained afterwards"),
    pytest.param(shrinks(3), rests(2, 2), ((2, 0), (2, 0)), id="one of its own is drained"),
    pytest.param(shrinks(3, borrowed=1), rests(2, 2, max=2, lent=1), ((2, 0), (2, 0)), id="the other one is full"),
]


@pytest.mark.parametrize(("one", "other", "expected"), CASES)
def test_a_flip_comes_before_a_start_and_before_a_drain(one: Reviewed, other: Reviewed, expected: Any) -> None:
    assert outcome(one, other) == expected


def test_both_decisions_tell_of_the_flip() -> None:
    more, less = flip_roles(NOW_S, grows(2, 3), rests(3, 2))
    assert (more.reason, less.reason) == ("RoleFlip", "RoleFlip")
    assert more.message == "why; 1 replica changes its role to serve this pool"
    assert less.message == "why; 1 replica changes its role to serve the other pool"


@dataclass(frozen=True)
class Fleet:
    """Pods of two pools, and those that serve the other one."""

    pods: tuple[int, int]
    lent: tuple[int, int]

    @property
    def serving(self) -> tuple[int, int]:
        moved = self.lent[1] - self.lent[0]
        return self.pods[0] + moved, self.pods[1] - moved

    def review(self, place: int, drawn: Reviewed) -> Reviewed:
        """A drawn review, of this fleet."""
        before = self.serving[place]
        change = max(drawn.decision.after - drawn.decision.before, -before)
        growing = drawn.decision.reason in GROWING
        after = min(before + max(change, 0), 8) if growing else before + min(change, 0) if before > 1 else before
        decision = replace(drawn.decision, before=before, after=max(after, min(before, 1)))
        lent, borrowed = self.lent[place], self.lent[1 - place]
        return replace(drawn, decision=decision, seen=replace(drawn.seen, replicas=before, ready=before, lent=lent,
                                                              borrowed=borrowed))  # fmt: skip

    def after(self, decisions: tuple[Decision, Decision]) -> Fleet:
        """What the reconcile makes of it: own replicas come home first, the rest of a change goes to `/scale`."""
        pods = [own + found.after - found.before - found.flips for own, found in zip(self.pods, decisions, strict=True)]
        lent = list(self.lent)
        for taker in (0, 1):
            count = max(decisions[taker].flips, 0)
            home = min(count, lent[taker])
            lent[taker] -= home
            lent[1 - taker] += count - home
        return Fleet((pods[0], pods[1]), (lent[0], lent[1]))


DRAWN = st.builds(
    lambda before, change, reason, needed, known: reviewed(
        before, max(before + change, 0), reason, needed=needed, needs=needed, known_s=known
    ),
    st.integers(1, 8), st.integers(-1, 3), st.sampled_from(REASONS), st.integers(0, 10), st.sampled_from([10.0, 600.0]),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.tuples(st.integers(1, 8), st.integers(1, 8)), st.lists(st.tuples(DRAWN, DRAWN), max_size=20))
def test_flips_move_replicas_and_never_make_empty_or_overfill_a_pool(
    pods: tuple[int, int], history: list[tuple[Reviewed, Reviewed]]
) -> None:
    fleet = Fleet(pods, (0, 0))
    for drawn in history:
        reviews = fleet.review(0, drawn[0]), fleet.review(1, drawn[1])
        decisions = flip_roles(NOW_S, *reviews)
        assert sum(found.flips for found in decisions) == 0
        after = fleet.after(decisions)
        assert after.serving == tuple(found.after for found in decisions)
        for place, (review, decision) in enumerate(zip(reviews, decisions, strict=True)):
            assert 0 <= after.lent[place] <= after.pods[place] <= max(review.limits.max, fleet.pods[place])
            assert decision.after >= min(1, decision.before)
            assert not decision.flips or decision.after != decision.before, (
                "a decision that is carried out is an old one"
            )
        assert min(after.lent) == 0, "replicas are lent in one direction only"
        started = [max(now - then, 0) for now, then in zip(after.pods, fleet.pods, strict=True)]
        for place, decision in enumerate(decisions):
            plain = max(reviews[place].decision.after - decision.before, 0)
            if decision.flips >= 0:
                assert started[place] == max(plain - decision.flips, 0), "a flip is a start less"
            else:
                assert started[place] == (plain - decision.flips if plain else 0), "only a pool that grows replaces it"
        fleet = after
