"""Frames: each class of a protocol survives, None stays where it may stand, and all else is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgpack
import pytest

from stoker.engine.core.frames import FrameFormat, many, many_or_none, numbered, one
from stoker.engine.core.handover.messages import Prefill, pack_peer, unpack_peer
from stoker.engine.errors import ProtocolError
from stoker.engine.sampling import SamplingParams


class Pair(NamedTuple):
    left: int
    right: int


@dataclass(frozen=True)
class Leaf:
    value: int


@dataclass(frozen=True)
class Tree:
    leaf: Leaf | None = None
    pairs: tuple[Pair, ...] = ()
    gaps: tuple[Leaf | None, ...] = ()
    counted: tuple[tuple[int, Pair], ...] = ()


@dataclass(frozen=True)
class Prompt:
    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Empty:
    pass


FORMAT = FrameFormat(
    "protocol 1",
    messages=(Empty, Tree, Prompt),
    nested={Tree: {"leaf": one(Leaf), "pairs": many(Pair), "gaps": many_or_none(Leaf), "counted": numbered(Pair)}},
    packed={Prompt: ("tokens",)},
)


@pytest.mark.parametrize(
    "message",
    [
        Empty(),
        Tree(),
        Tree(Leaf(1), (Pair(1, 2), Pair(3, 4)), (None, Leaf(2), None), ((7, Pair(5, 6)),)),
        Prompt("empty", ()),
        Prompt("long", (0, -1, 2**63 - 1, *range(200_000, 201_000))),
    ],
    ids=lambda message: f"{type(message).__name__} {getattr(message, 'name', '')}",
)
def test_a_message_survives(message: object) -> None:
    assert FORMAT.unpack(FORMAT.pack(message)) == message


@pytest.mark.parametrize(
    "content",
    [
        [3, []],
        [0, [1]],
        [1, [None, [], []]],
        [1, [None, [[1, 2, 3]], [], []]],
        [1, [None, [None], [], []]],
        [1, [[], [], [], []]],
        [1, [None, [], [], [[7]]]],
        [2, ["a", [1, 2]]],
        [2, ["a", None]],
        [2, ["a", b"1234567"]],
        [2, ["a"]],
        "text",
    ],
    ids=repr,
)
def test_other_content_is_refused(content: object) -> None:
    with pytest.raises(ProtocolError, match=r"not a message of protocol 1: "):
        FORMAT.unpack(msgpack.packb(content))


def test_a_class_of_another_protocol_cannot_be_packed() -> None:
    with pytest.raises(TypeError, match="Prefill cannot be sent"):
        FORMAT.pack(Tree(Prefill("a", (), SamplingParams(), 0, 0, ())))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [(1 << 63,), ("1",), (1.5,)], ids=repr)
def test_tokens_that_are_no_integers_of_64_bits_cannot_be_packed(tokens: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match="numbers of 64 bits"):
        FORMAT.pack(Prompt("a", tokens))


def test_sampling_values_that_a_peer_may_not_send_are_a_broken_protocol() -> None:
    tag, values = msgpack.unpackb(pack_peer(Prefill("a", (1,), SamplingParams(temperature=0.5), 0, 0, ())))
    values[2][values[2].index(0.5)] = -1.0
    with pytest.raises(ProtocolError, match="temperature"):
        unpack_peer(msgpack.packb([tag, values]))
