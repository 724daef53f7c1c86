"""Wishes at the step boundary."""

from __future__ import annotations

from stoker.trainer.protocol.channel import Beacon, SaveCommand, StopCommand
from stoker.trainer.protocol.step_signals import Inbox, Wishes


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_strongest_wish_of_any_rank_counts() -> None:
    by_rank = [Wishes(stop="suspend"), Wishes(save=True), Wishes(stop="cancel", save_on_stop=False), Wishes()]
    merged = Wishes.merge([wishes.numbers() for wishes in by_rank])
    assert merged == Wishes(stop="cancel", save_on_stop=False, save=True)
    assert Wishes.merge([Wishes().numbers()] * 3) == Wishes()


def test_requests_wait_for_the_save_that_answers_them() -> None:
    beacon = Beacon(None)
    inbox = Inbox(beacon, None, rank=0)
    beacon.put(SaveCommand(id="a"))
    assert inbox.wishes() == inbox.wishes() == Wishes(save=True)
    beacon.put(SaveCommand(id="b"))
    inbox.wishes()
    assert inbox.take_requests() == ("a", "b")
    assert inbox.wishes() == Wishes()


def test_a_stronger_stop_replaces_a_weaker_one_and_never_the_other_way() -> None:
    beacon = Beacon(None)
    inbox = Inbox(beacon, None, rank=0)
    for mode in ("suspend", "cancel", "interrupt"):
        beacon.put(StopCommand(mode=mode))
    assert inbox.wishes().stop == "cancel"


def test_timed_saves_count_from_the_last_save_and_only_rank_0_wants_them() -> None:
    clock = Clock()
    inbox, other = (Inbox(Beacon(None), 60.0, rank, clock) for rank in (0, 1))
    clock.now_s += 59
    assert not inbox.wishes().timed_save
    clock.now_s += 1
    assert inbox.wishes().timed_save
    assert not other.wishes().timed_save
    inbox.take_requests()
    assert not inbox.wishes().timed_save
