"""Messages: every one survives the wire, and any other bytes are refused."""

from __future__ import annotations

import msgpack
import pytest

from stoker.engine.core import messages as m
from stoker.engine.core.stats import Stats
from stoker.engine.errors import ProtocolError, RequestRefused
from stoker.engine.execution.executor import RankState
from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.sampling import SamplingParams

FACTS = m.RequestFacts(3, 2, 1, 0, 1.0, 1.5, 2.0, 2.0, 3.0)
DELTA = m.Delta(
    "a", 1, (4, 5), (TokenLogprobs(-0.5, ((4, -0.5), (5, -1.0))), TokenLogprobs(-1.0, ())),
    (None, TokenLogprobs(-2.0, ())), "stop", 2, None, FACTS,
)  # fmt: skip
MODEL = m.ModelFacts("/m", "/m", None, "bfloat16", 100, 64, (2,), 16, 8)

MESSAGES = [
    m.Hello(),
    m.AddRequest("a", (1, 2, 3), SamplingParams(temperature=0.5, logit_bias={3: 1.5}, stop=("x",), seed=-7), 12.5, -1),
    m.AddRequest("a", (1,), SamplingParams(grammar=OutputGrammar.regex("a"), bad_sequences=((1, 2),)), 12.5),
    m.AddRequest("a", (1,), SamplingParams(n=3, seed=1), 12.5, resumed=((4, 5), None, ())),
    m.AddRequest("a", (1,), SamplingParams(), 12.5, priority=3, place=2),
    m.Inspect("q", ("a", "b")),
    m.Inspected("q", (m.RequestProgress("a", "PREEMPTED", 2, 1),)),
    m.Abort(("a", "b")),
    m.Finish("a", 2),
    m.Ping(),
    m.Drain(3.5),
    m.Stop(),
    m.CoreState("Loading", "LoadingWeights 43 %"),
    m.CoreState("Serving", "", MODEL),
    m.Outputs((DELTA, m.Delta("b", 0, (1,)))),
    m.Refused("a", "queue_full", "1024 requests wait", None),
    Stats(
        1.0,
        2,
        0.5,
        1,
        0,
        8,
        5,
        2,
        1,
        3,
        1,
        0,
        3,
        2,
        {"stop": 1},
        {"queue_full": 2},
        (1, 0, 1),
        9,
        4,
        0,
        1.5,
        2.5,
        4,
        0.5,
        (RankState(0, 7, 2, 0.0), RankState(1, 8, 1, 0.5)),
    ),
    m.Heartbeat(10.0, 0.03),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: m.Message) -> None:
    assert m.unpack(m.pack(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"hello",
        msgpack.packb([99, []]),
        msgpack.packb([0, [1, 2, 3]]),
        msgpack.packb([1, "abc"]),
        msgpack.packb({"a": 1}),
    ],
)
def test_what_is_not_a_message_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"not a message of protocol {m.PROTOCOL}"):
        m.unpack(frame)


def test_sampling_values_are_checked_on_arrival() -> None:
    good = m.pack(m.AddRequest("a", (1,), SamplingParams(), 0.0))
    tag, values = msgpack.unpackb(good)
    values[2][1] = -1  # max_tokens
    with pytest.raises(RequestRefused, match="max_tokens must be an integer of at least 0, got -1"):
        m.unpack(msgpack.packb([tag, values]))
