"""Leader election: one replica works at a time, a holder stops before another begins, a clean end hands over."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.cluster.interface import AlreadyExists, ClusterError, Conflict, NotFound
from stoker.operator.domain.plan import Object
from stoker.operator.service.lease import Elector, LeaseStep, Terms, decide, renewed_spec, sighted
from testing.operator.fakes import FakeClock, settle

TERMS = Terms(duration_s=15, renew_deadline_s=10, retry_s=2)


class FakeLease:
    """One Lease with versions; `away` holds the names of replicas that cannot reach it.

    Args:
        clock: with it, every answer takes `answer_s`.
    """

    def __init__(self, clock: FakeClock | None = None, answer_s: float = 0.0) -> None:
        self.clock, self.answer_s = clock, answer_s
        self.lease: Object | None = None
        self.away: set[str] = set()
        self.writes: list[str] = []
        self._versions = itertools.count(1)

    def at(self, who: str) -> LeaseOf:
        return LeaseOf(self, who)

    def put(self, spec: Object) -> Object:
        self.lease = {"metadata": {"resourceVersion": str(next(self._versions))}, "spec": spec}
        self.writes.append(str(spec["holderIdentity"]))
        return self.lease


class LeaseOf:
    def __init__(self, shared: FakeLease, who: str) -> None:
        self.shared = shared
        self.who = who

    async def read(self, timeout_s: float) -> Object:
        await self._reach(timeout_s)
        if self.shared.lease is None:
            raise NotFound("no Lease")
        return self.shared.lease

    async def create(self, spec: Object, timeout_s: float) -> Object:
        await self._reach(timeout_s)
        if self.shared.lease is not None:
            raise AlreadyExists("there is one")
        return self.shared.put(spec)

    async def replace(self, lease: Object, timeout_s: float) -> Object:
        await self._reach(timeout_s)
        if self.shared.lease is None or self.shared.lease["metadata"] != lease["metadata"]:
            raise Conflict("changed")
        return self.shared.put(lease["spec"])

    async def _reach(self, timeout_s: float) -> None:
        if self.shared.clock is not None:
            await self.shared.clock.sleep(min(self.shared.answer_s, timeout_s))
            if self.shared.answer_s > timeout_s:
                raise ClusterError("no answer")
        if self.who in self.shared.away:
            raise ClusterError("no way there")


class Replica:
    """An elector with idle work; `working` shows whether the work runs."""

    def __init__(self, shared: FakeLease, name: str, clock: FakeClock) -> None:
        self.elector = Elector(shared.at(name), name, TERMS, clock)
        self.stop = asyncio.Event()
        self.working = False
        self.task = asyncio.create_task(self.elector.run(self._work, self.stop))

    async def _work(self) -> None:
        self.working = True
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.working = False

    async def crash(self) -> None:
        """Stop like a killed process: the Lease is not released."""
        self.elector.api.who = "nobody"  # type: ignore[attr-defined]
        self.elector.api.shared.away.add("nobody")  # type: ignore[attr-defined]
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Story = Callable[[FakeLease, FakeClock], Awaitable[None]]


def tell(story: Story) -> None:
    async def whole() -> None:
        await story(FakeLease(), FakeClock())

    asyncio.run(whole())


def lease(holder: str, renewed: str = "t0", duration: int = 15) -> Object:
    return {"spec": {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": duration}}


def test_a_holder_renews_and_others_wait_until_it_was_silent_for_its_whole_duration() -> None:
    seen = sighted(lease("a"), None, 100.0)
    assert decide(seen, "a", 1000.0) is LeaseStep.RENEW
    assert decide(seen, "b", 114.9) is LeaseStep.WAIT
    assert decide(seen, "b", 115.0) is LeaseStep.ACQUIRE
    assert decide(sighted(lease(""), None, 100.0), "b", 100.0) is LeaseStep.ACQUIRE


def test_silence_counts_from_the_last_change_that_was_seen() -> None:
    first = sighted(lease("a", "t0"), None, 100.0)
    same = sighted(lease("a", "t0"), first, 110.0)
    assert same.seen_at == 100.0
    assert sighted(lease("a", "t1"), same, 112.0).seen_at == 112.0
    assert sighted(lease("b", "t0"), same, 112.0).seen_at == 112.0


def test_what_the_holder_wrote_about_the_time_is_not_believed() -> None:
    ages_ago = "1999-01-01T00:00:00.000000Z"
    assert decide(sighted(lease("a", ages_ago), None, 100.0), "b", 101.0) is LeaseStep.WAIT


def test_a_takeover_counts_as_a_transition_and_a_renewal_does_not() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    taken = renewed_spec(lease("a"), "b", TERMS, now)
    assert (taken["holderIdentity"], taken["leaseTransitions"]) == ("b", 1)
    renewed = renewed_spec({"spec": taken}, "b", TERMS, now)
    assert (renewed["leaseTransitions"], renewed["acquireTime"]) == (1, taken["acquireTime"])


def test_only_one_of_two_leads() -> None:
    async def story(shared: FakeLease, clock: FakeClock) -> None:
        one, two = Replica(shared, "one", clock), Replica(shared, "two", clock)
        await clock.advance(60)
        assert [one.working, two.working] == [True, False]
        assert two.elector.holder == "one"
        assert one.elector.valid()
        assert not two.elector.valid()

    tell(story)


def test_a_clean_end_hands_over_within_one_retry() -> None:
    async def story(shared: FakeLease, clock: FakeClock) -> None:
        one, two = Replica(shared, "one", clock), Replica(shared, "two", clock)
        await clock.advance(10)
        one.stop.set()
        await settle()
        assert one.task.done()
        assert shared.writes[-1] == ""
        await clock.advance(2)
        assert two.working

    tell(story)


def test_a_killed_leader_is_replaced_after_its_duration() -> None:
    async def story(shared: FakeLease, clock: FakeClock) -> None:
        one, two = Replica(shared, "one", clock), Replica(shared, "two", clock)
        await clock.advance(9)
        await one.crash()
        await clock.advance(12)
        assert not two.working
        await clock.advance(6)
        assert two.working

    tell(story)


def test_a_leader_that_cannot_renew_stops_before_another_may_begin() -> None:
    async def story(shared: FakeLease, clock: FakeClock) -> None:
        one, two = Replica(shared, "one", clock), Replica(shared, "two", clock)
        await clock.advance(9)
        shared.away.add("one")
        for _ in range(40):
            assert not (one.working and two.working)
            assert not (one.elector.valid() and two.working)
            await clock.advance(0.5)
        assert two.working
        assert not one.working
        shared.away.clear()
        await clock.advance(30)
        assert [one.working, two.working] == [False, True]

    tell(story)


def test_a_leader_waits_for_a_slow_api_server() -> None:
    async def story() -> None:
        clock = FakeClock()
        one = Replica(FakeLease(clock, answer_s=4.5), "one", clock)
        await clock.advance(10)
        for _ in range(60):
            assert one.working
            assert one.elector.valid()
            await clock.advance(1)
        one.stop.set()
        await clock.advance(10)
        assert one.task.done()

    asyncio.run(story())


def test_a_lease_that_was_taken_by_force_ends_the_work() -> None:
    async def story(shared: FakeLease, clock: FakeClock) -> None:
        one = Replica(shared, "one", clock)
        await clock.advance(3)
        shared.put(renewed_spec(shared.lease or {}, "thief", TERMS, clock.now()))
        await clock.advance(5)
        assert not one.working

    tell(story)


def test_work_that_fails_gives_the_lease_back_and_says_why() -> None:
    async def story(shared: FakeLease, clock: FakeClock) -> None:
        async def work() -> None:
            raise RuntimeError("broken")

        elector = Elector(shared.at("one"), "one", TERMS, clock)
        with pytest.raises(RuntimeError, match="broken"):
            await elector.run(work, asyncio.Event())
        assert shared.lease is not None
        assert shared.lease["spec"]["holderIdentity"] == ""
        assert not elector.valid()

    tell(story)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), st.booleans(), st.integers(1, 20)), max_size=12))
def test_two_never_work_at_the_same_time_whatever_is_cut_off(cuts: list[tuple[str, bool, int]]) -> None:
    async def story(shared: FakeLease, clock: FakeClock) -> None:
        replicas = [Replica(shared, name, clock) for name in ("one", "two")]
        for who, away, halves in cuts:
            (shared.away.add if away else shared.away.discard)(who)
            for _ in range(halves):
                await clock.advance(0.5)
                assert sum(replica.working for replica in replicas) <= 1
                assert sum(replica.elector.valid() for replica in replicas) <= 1
        shared.away.clear()
        await clock.advance(40)
        assert sum(replica.working for replica in replicas) == 1

    tell(story)
