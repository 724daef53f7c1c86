"""Signals at the step boundary."""

from __future__ import annotations

from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.messages import SaveCommand, StopCommand
from stoker.trainer.protocol.step_signals import SignalInbox, StepSignals


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_strongest_signal_of_any_rank_counts() -> None:
    by_rank = [
        StepSignals(stop="suspend"),
        StepSignals(save=True),
        StepSignals(stop="cancel", save_on_stop=False),
        StepSignals(),
    ]
    merged = StepSignals.merge([signals.numbers() for signals in by_rank])
    assert merged == StepSignals(stop="cancel", save_on_stop=False, save=True)
    assert StepSignals.merge([StepSignals().numbers()] * 3) == StepSignals()


def test_requests_wait_for_the_save_that_answers_them() -> None:
    channel = RankChannel(None)
    inbox = SignalInbox(channel, None, rank=0)
    channel.put(SaveCommand(id="a"))
    assert inbox.read() == inbox.read() == StepSignals(save=True)
    channel.put(SaveCommand(id="b"))
    inbox.read()
    assert inbox.take_requests() == ("a", "b")
    assert inbox.read() == StepSignals()


def test_a_stronger_stop_replaces_a_weaker_one_and_never_the_other_way() -> None:
    channel = RankChannel(None)
    inbox = SignalInbox(channel, None, rank=0)
    for mode in ("suspend", "cancel", "interrupt"):
        channel.put(StopCommand(mode=mode))
    assert inbox.read().stop == "cancel"


def test_timed_saves_count_from_the_last_save_and_only_rank_0_sends_them() -> None:
    clock = Clock()
    inbox, other = (SignalInbox(RankChannel(None), 60.0, rank, clock) for rank in (0, 1))
    clock.now_s += 59
    assert not inbox.read().timed_save
    clock.now_s += 1
    assert inbox.read().timed_save
    assert not other.read().timed_save
    inbox.take_requests()
    assert not inbox.read().timed_save
