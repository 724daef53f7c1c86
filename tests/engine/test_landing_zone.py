"""The slots of a landing zone: who may write them, what is refused, and that none is lost, in any order of events."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.engine.transfer.landing_zone import BlockRefused, Grant, LandingZone, Owner, SlotState

ALICE = Owner("pod-a/1", "one")
BOB = Owner("pod-b/1", "one")
SECONDS = 10.0


def refused(reason: str, zone: LandingZone, grant: Grant, owner: Owner = ALICE, now_s: float = 0.0) -> None:
    before = zone.refused.total()
    with pytest.raises(BlockRefused) as error:
        zone.announce(grant, owner, now_s)
    assert error.value.reason == reason
    assert zone.refused.total() == before + 1


def copied(zone: LandingZone, grant: Grant, owner: Owner = ALICE) -> None:
    zone.announce(grant, owner, 0.0)
    zone.begin_copy(grant)
    zone.end_copy(grant)


def test_a_slot_goes_once_around() -> None:
    zone = LandingZone(1)
    (grant,) = zone.grant(ALICE, 3, 0.0, SECONDS)
    assert (zone.credits, zone.state(0)) == (0, SlotState.GRANTED)
    zone.begin_write(grant, ALICE.peer, 1.0)
    zone.end_write(0)
    copied(zone, grant)
    assert zone.state(0) is SlotState.COPIED
    zone.free(grant)
    assert zone.credits == 1
    (again,) = zone.grant(BOB, 1, 0.0, SECONDS)
    assert again == Grant(0, 2)


def test_the_lowest_free_slots_are_granted_so_that_neighbours_go_in_one_copy() -> None:
    zone = LandingZone(6)
    first = zone.grant(ALICE, 4, 0.0, SECONDS)
    for grant in (first[2], first[0], first[3], first[1]):
        copied(zone, grant)
        zone.free(grant)
    assert [grant.slot for grant in zone.grant(BOB, 5, 0.0, SECONDS)] == [0, 1, 2, 3, 4]


def test_what_is_stale_foreign_late_or_repeated_is_refused_and_counted() -> None:
    zone = LandingZone(2)
    first, second = zone.grant(ALICE, 2, 0.0, SECONDS)
    refused("stale", zone, first._replace(generation=0))
    refused("stale", zone, first._replace(generation=9))
    refused("foreign", zone, first, BOB)
    refused("foreign", zone, first, ALICE._replace(attempt=1))
    refused("foreign", zone, Grant(2, 1))
    refused("foreign", zone, Grant(-1, 1))
    refused("late", zone, first, now_s=SECONDS)
    with pytest.raises(BlockRefused, match="foreign"):
        zone.begin_write(first, BOB.peer, 0.0)
    zone.begin_write(first, ALICE.peer, 0.0)
    with pytest.raises(BlockRefused, match="duplicate"):
        zone.begin_write(first, ALICE.peer, 0.0)
    refused("duplicate", zone, first)
    zone.end_write(first.slot)
    zone.announce(first, ALICE, 0.0)
    refused("duplicate", zone, first)
    zone.revoke(ALICE, 0.0)
    refused("late", zone, second)
    assert dict(zone.refused) == {"stale": 2, "foreign": 5, "late": 2, "duplicate": 3, "damaged": 0}


def test_a_damaged_block_is_granted_again_and_its_first_write_is_stale() -> None:
    zone = LandingZone(1)
    (grant,) = zone.grant(ALICE, 1, 0.0, SECONDS)
    copied(zone, grant)
    again = zone.grant_again(grant, 5.0)
    assert again == Grant(0, 2)
    assert zone.refused["damaged"] == 1
    refused("stale", zone, grant)
    zone.announce(again, ALICE, 5.0 + SECONDS - 1)


def test_quarantine_ends_with_the_confirmation_the_death_or_twice_the_time() -> None:
    for end in ("confirm", "bury", "time"):
        zone = LandingZone(1)
        zone.grant(ALICE, 1, 0.0, SECONDS)
        zone.revoke(ALICE, 1.0)
        assert zone.state(0) is SlotState.QUARANTINED
        assert not zone.grant(BOB, 1, 1.0, SECONDS)
        if end == "confirm":
            zone.confirm(BOB)
            assert zone.state(0) is SlotState.QUARANTINED
            zone.confirm(ALICE)
        elif end == "bury":
            zone.bury(BOB.peer)
            assert zone.state(0) is SlotState.QUARANTINED
            zone.bury(ALICE.peer)
        else:
            zone.expire(1.0 + 2 * SECONDS - 0.1)
            assert zone.state(0) is SlotState.QUARANTINED
            zone.expire(1.0 + 2 * SECONDS)
        assert zone.credits == 1, end


def test_a_grant_that_is_not_renewed_expires_into_quarantine() -> None:
    zone = LandingZone(1)
    (grant,) = zone.grant(ALICE, 1, 0.0, SECONDS)
    zone.renew(ALICE, 9.0)
    zone.expire(18.0)
    assert zone.state(0) is SlotState.GRANTED
    zone.expire(19.0)
    assert zone.state(0) is SlotState.QUARANTINED
    refused("late", zone, grant, now_s=19.0)
    zone.expire(39.0)
    assert zone.credits == 1


def test_a_slot_in_use_is_not_free_before_its_use_ends() -> None:
    zone = LandingZone(2)
    writing, copying = zone.grant(ALICE, 2, 0.0, SECONDS)
    zone.begin_write(writing, ALICE.peer, 0.0)
    zone.announce(copying, ALICE, 0.0)
    zone.begin_copy(copying)
    zone.bury(ALICE.peer)
    zone.expire(1e9)
    assert (zone.credits, zone.audit().faults) == (0, ())
    zone.end_write(writing.slot)
    zone.end_copy(copying)
    assert zone.credits == 2


class ZoneMachine(RuleBasedStateMachine):
    """Any order of grants, writes, messages, copies, ends and deaths, also of grants that have long ended."""

    def __init__(self) -> None:
        super().__init__()
        self.zone = LandingZone(3)
        self.now_s = 0.0
        self.grants: list[tuple[Grant, Owner]] = []
        self.writing: set[int] = set()
        self.copying: list[Grant] = []
        self.copied: list[Grant] = []
        self.ready: list[Grant] = []
        self.generations = [0, 0, 0]

    owners = st.builds(Owner, st.sampled_from(["a/1", "b/1"]), st.sampled_from(["x", "y"]), st.sampled_from([0, 1]))

    @rule(owner=owners, count=st.integers(1, 3))
    def grant(self, owner: Owner, count: int) -> None:
        before = self.zone.credits
        granted = self.zone.grant(owner, count, self.now_s, SECONDS)
        assert len(granted) == min(count, before)
        for one in granted:
            assert one.generation > self.generations[one.slot]
            assert one.slot not in self.writing
            assert one.slot not in [copy.slot for copy in self.copying]
            self.generations[one.slot] = one.generation
            self.grants.append((one, owner))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), other=st.none() | owners)
    def write(self, data: st.DataObject, other: Owner | None) -> None:
        grant, owner = data.draw(st.sampled_from(self.grants))
        peer = (other or owner).peer
        try:
            self.zone.begin_write(grant, peer, self.now_s)
        except BlockRefused:
            return
        assert (grant.generation, peer) == (self.generations[grant.slot], owner.peer)
        self.writing.add(grant.slot)

    @precondition(lambda self: self.writing)
    @rule()
    def end_write(self) -> None:
        self.zone.end_write(self.writing.pop())

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), other=st.none() | owners)
    def announce(self, data: st.DataObject, other: Owner | None) -> None:
        grant, owner = data.draw(st.sampled_from(self.grants))
        try:
            self.zone.announce(grant, other or owner, self.now_s)
        except BlockRefused:
            return
        assert (grant.generation, other or owner) == (self.generations[grant.slot], owner)
        self.ready.append(grant)

    @rule()
    def copy(self) -> None:
        for grant in [one for one in self.ready if self.zone.is_current(one, SlotState.READY)]:
            self.zone.begin_copy(grant)
            self.copying.append(grant)
        self.ready.clear()

    @precondition(lambda self: self.copying)
    @rule(damaged=st.booleans())
    def end_copy(self, damaged: bool) -> None:
        grant = self.copying.pop()
        self.zone.end_copy(grant)
        if not self.zone.is_current(grant, SlotState.COPIED):
            return
        if not damaged:
            self.zone.free(grant)
            return
        owner = next(owner for one, owner in self.grants if one == grant)
        again = self.zone.grant_again(grant, self.now_s)
        self.generations[again.slot] = again.generation
        self.grants.append((again, owner))

    @rule(owner=owners)
    def revoke(self, owner: Owner) -> None:
        self.zone.revoke(owner, self.now_s)
        assert not any(self.zone.state(slot) is SlotState.GRANTED for slot in self.zone.held(owner))

    @rule(owner=owners)
    def confirm(self, owner: Owner) -> None:
        self.zone.confirm(owner)

    @rule(owner=owners)
    def renew(self, owner: Owner) -> None:
        self.zone.renew(owner, self.now_s)

    @rule(peer=st.sampled_from(["a/1", "b/1"]))
    def bury(self, peer: str) -> None:
        self.zone.bury(peer)

    @rule(seconds=st.sampled_from([1.0, SECONDS, 3 * SECONDS]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.zone.expire(self.now_s)

    @invariant()
    def is_sound(self) -> None:
        audit = self.zone.audit()
        assert audit.faults == ()
        assert sum(audit.counts.values()) == self.zone.num_slots
        assert audit.counts[SlotState.FREE] == self.zone.credits

    def teardown(self) -> None:
        """Every slot comes free once all uses have ended and the time of all grants has passed."""
        for slot in self.writing:
            self.zone.end_write(slot)
        for grant in self.copying:
            self.zone.end_copy(grant)
        for peer in ("a/1", "b/1"):
            self.zone.bury(peer)
        assert self.zone.credits == self.zone.num_slots


ZoneMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestZoneMachine = ZoneMachine.TestCase
