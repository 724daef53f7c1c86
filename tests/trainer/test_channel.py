"""The protocol between a rank and its agent."""

from __future__ import annotations

import selectors
import socket
import threading
import time

import pytest

from stoker.trainer.errors import ChannelError
from stoker.trainer.protocol.channel import AgentChannel, RankChannel, channel_pair
from stoker.trainer.protocol.messages import (
    EndEvent,
    Event,
    MomentEvent,
    PhaseEvent,
    RequestEvent,
    RetentionEvent,
    SaveCommand,
    SaveEvent,
    StepEvent,
    StopCommand,
    StragglersEvent,
    ValidationEvent,
)

EVENTS: list[Event] = [
    PhaseEvent(phase="Loading", message="LoadingWeights 43 %", at=1.0),
    MomentEvent(moment="joined", at=1.5),
    StragglersEvent(stragglers=[{"rank": 3, "busy_s": 0.9, "typical_s": 0.5}], at=2.5),
    StepEvent(
        step=1,
        total_steps=2,
        tokens=3,
        loss=0.5,
        learning_rate=0.1,
        grad_norm=1.0,
        tokens_per_s=2.0,
        step_s=1.5,
        eta_s=1.5,
        at=2.0,
    ),
    ValidationEvent(step=1, loss=0.25, tokens=7, at=3.0),
    SaveEvent(
        id="a",
        folder="step-1",
        step=1,
        tokens=3,
        loss=None,
        state="Saving",
        reason="interval",
        layout={"dp": 2},
        at=4.0,
    ),
    RetentionEvent(deleted=["step-0"], problems=["step-1: is being read"], at=4.5),
    RequestEvent(id="a", state="Done", folder="step-1", at=5.0),
    EndEvent(cause="Completed", step=2, at=6.0),
]


def receive(end: AgentChannel, count: int) -> list[Event]:
    received: list[Event] = []
    with selectors.DefaultSelector() as selector:
        selector.register(end, selectors.EVENT_READ)
        deadline = time.monotonic() + 240
        while len(received) < count and not end.closed and time.monotonic() < deadline:
            selector.select(1)
            received += end.receive()
    return received


def take(channel: RankChannel, count: int) -> list[object]:
    taken: list[object] = []
    deadline = time.monotonic() + 240
    while len(taken) < count and time.monotonic() < deadline:
        taken += channel.take()
        time.sleep(0.001)
    return taken


def test_every_event_arrives_as_it_was_sent() -> None:
    end, rank_socket = channel_pair()
    channel = RankChannel(rank_socket)
    for event in EVENTS:
        channel.send(event)
    assert receive(end, len(EVENTS)) == EVENTS
    channel.close()
    assert receive(end, 1) == []
    assert end.closed
    end.close()


def test_commands_arrive_in_order_and_are_taken_once() -> None:
    end, rank_socket = channel_pair()
    channel = RankChannel(rank_socket)
    assert end.send(SaveCommand(id="x"))
    assert end.send(StopCommand(mode="cancel"))
    assert take(channel, 2) == [SaveCommand(id="x"), StopCommand(mode="cancel", save=True)]
    assert channel.take() == []
    channel.close()
    end.close()


def test_a_rank_whose_agent_is_gone_is_told() -> None:
    end, rank_socket = channel_pair()
    orphaned = threading.Event()
    channel = RankChannel(rank_socket, orphaned.set)
    end.close()
    assert orphaned.wait(240)
    channel.send(PhaseEvent(phase="Training"))  # no error
    channel.close()


def test_sending_to_a_rank_that_is_gone_says_so() -> None:
    end, rank_socket = channel_pair()
    rank_socket.close()
    assert not end.send(SaveCommand(id="x"))
    end.close()


def test_a_foreign_line_is_refused_with_its_text() -> None:
    ours, theirs = socket.socketpair()
    end = AgentChannel(ours)
    theirs.sendall(b'{"event": "party"}\n')
    with pytest.raises(ChannelError, match="party"):
        end.receive()
    theirs.close()
    end.close()


def test_without_an_agent_events_go_nowhere_and_commands_come_from_signals_only() -> None:
    channel = RankChannel(None)
    channel.phase("Loading")
    channel.put(StopCommand(mode="interrupt"))
    assert channel.take() == [StopCommand(mode="interrupt")]
