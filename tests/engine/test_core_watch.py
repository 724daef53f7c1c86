"""The watch over a silent core: when it counts as stalled, and when the front gives it up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.engine.core.core_watch import LISTEN_S, CoreWatch, WatchLimits
from stoker.engine.core.messages import CoreState, Heartbeat
from stoker.engine.core.step_pace import QuietLimits, StepPace
from testing.engine.stats import STATS

LIMITS = WatchLimits(start_s=120, dead_factor=5, dead_floor_s=60, no_step_s=120)
QUIET = QuietLimits(floor_s=10, factor=5, first_s=120)


class World:
    """A front that listens all the time, unless the clock jumps."""

    def __init__(self) -> None:
        self.watch, self.now_s = CoreWatch(LIMITS), 0.0
        self.watch.listen(self.now_s)

    def listen(self, seconds: float) -> None:
        for _ in range(round(seconds / LISTEN_S)):
            self.now_s += LISTEN_S
            self.watch.listen(self.now_s)

    @property
    def verdict(self) -> tuple[bool, bool]:
        return self.watch.stalled, self.watch.dead


def test_a_silent_core_is_stalled_then_dead_and_comes_back_with_its_next_message() -> None:
    world = World()
    world.watch.take(Heartbeat(quiet_s=10, usual_step_s=0.031))
    world.listen(10)
    assert world.verdict == (False, False)
    assert world.watch.reason is None
    world.listen(2)
    assert world.verdict == (True, False)
    assert world.watch.reason == "EngineStalled: no news from the core for 12 s, usual step 0.031 s"
    world.listen(50)
    assert world.verdict == (True, True)
    world.watch.take(CoreState("Serving", ""))
    assert world.verdict == (False, False)
    assert world.watch.reason is None


def test_a_long_step_that_was_announced_is_healthy() -> None:
    world = World()
    world.watch.take(Heartbeat(quiet_s=120, usual_step_s=None))
    world.listen(119)
    assert world.verdict == (False, False)
    world.listen(2)
    assert world.watch.reason == "EngineStalled: no news from the core for 121 s, no step yet"
    world.listen(478)
    assert world.verdict == (True, False)
    world.listen(2)
    assert world.verdict == (True, True)


def test_a_core_that_never_says_anything_is_given_up_after_its_start() -> None:
    world = World()
    world.listen(119)
    assert world.verdict == (False, False)
    world.listen(482)
    assert world.verdict == (True, True)


def test_time_in_which_the_front_itself_did_not_run_is_no_silence() -> None:
    world = World()
    world.watch.take(Heartbeat(quiet_s=10, usual_step_s=0.03))
    for _ in range(5):
        world.now_s += 3600  # a laptop slept
        world.listen(LISTEN_S)
    assert world.verdict == (False, False)


@pytest.mark.parametrize(
    ("running", "waiting", "age_s", "verdict"),
    [
        pytest.param(1, 0, 119, (False, False), id="a long step"),
        pytest.param(1, 0, 121, (True, False), id="no step ends"),
        pytest.param(0, 3, 121, (True, False), id="nothing is ever admitted"),
        pytest.param(1, 0, 601, (True, True), id="for ten minutes"),
        pytest.param(0, 0, 9000, (False, False), id="nothing to do"),
    ],
)
def test_a_core_that_answers_but_ends_no_step_is_stalled(
    running: int, waiting: int, age_s: float, verdict: tuple[bool, bool]
) -> None:
    world = World()
    world.watch.take(Heartbeat(quiet_s=10, usual_step_s=0.03))
    world.watch.take(replace(STATS, time_s=10_000, progressed_s=10_000 - age_s, running=running, waiting=waiting))
    assert world.verdict == verdict
    if verdict[0]:
        expected = f"EngineStalled: requests run, but no step has ended for {age_s} s, usual step 0.03 s"
        assert world.watch.reason == expected


def test_the_promise_is_a_multiple_of_the_longest_recent_step_of_that_size() -> None:
    pace = StepPace(QUIET)
    assert (pace.quiet_s(1), pace.usual_step_s) == (120, None)  # its kernels may have to be compiled
    for seconds in (0.02, 4.0, 0.03):
        pace.record(1, seconds)
    assert (pace.quiet_s(1), pace.usual_step_s) == (20, 0.03)
    assert pace.quiet_s(2048) == 120  # of this size there was none
    pace.record(2000, 0.5)
    assert pace.quiet_s(1024) == 10
    for _ in range(200):
        pace.record(1, 0.02)
    assert pace.quiet_s(1) == 10  # what was long ago is forgotten


def test_a_step_in_which_the_process_was_stopped_does_not_make_the_next_promise_endless() -> None:
    pace = StepPace(QUIET)
    pace.record(1, 0.02)
    pace.record(1, 3600)
    assert pace.quiet_s(1) == 50
