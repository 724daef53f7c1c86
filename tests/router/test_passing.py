"""Bodies that are written where they arrive are those that a task sends: generated histories, of both kinds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.asgi import Message
from stoker.pod.direct_body import DirectBody
from stoker.router.answer import BackendAnswer
from stoker.router.answer_parser import Head
from stoker.router.backend import Backend, Timeouts
from stoker.router.client import Client
from stoker.router.connection import Connection, Outgoing
from stoker.router.kept_stream import DONE, KeptStream
from stoker.router.passing import Passing
from stoker.router.relay import Relay, end_of_events
from stoker.router.revision_counts import RevisionCounts
from stoker.router.snapshot import BackendEntry
from testing.router.resumable_engine import marked_stream, told
from testing.scenario import run
from tests.router.test_connection import Transport, chunk

REQUEST = Outgoing("POST", b"/v1/completions", (), b"{}")
WHOLE = b"".join(marked_stream(9)) + DONE
Step = tuple[bool, int]
"""Whether the client takes parts at once, and turns of the event loop before the next one."""


class Toggled(DirectBody):
    """Opens and closes as the test says, and notes what is written in the same list as `send`."""

    def __init__(self, sent: list[bytes]) -> None:
        self.sent, self.is_open, self.written = sent, True, 0

    @property
    def open(self) -> bool:
        return self.is_open

    def write(self, part: bytes) -> None:
        assert self.is_open
        self.sent.append(part)
        self.written += 1


@dataclass
class Got:
    """What a client got, what is kept, and how many direct writes there were."""

    body: bytes
    kept: KeptStream
    written: int
    gaps: int


async def passed(pieces: list[bytes], steps: list[Step], *, direct: bool, breaks: bool, kind: bytes = b"") -> Got:
    """Pass pieces on; `kind`: as an answer of this content type that cannot go on elsewhere."""
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(0)  # a client that is slow
        sent.append(message["body"])

    toggled = Toggled(sent)
    connection = Connection("h:1")
    connection.connection_made(Transport(connection))
    asking = asyncio.create_task(connection.exchange(REQUEST, 60))
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(pieces[0]))
    await asking
    backend = Backend(BackendEntry(url="http://h:1", pod_uid="a"), Timeouts(60, 60, 60), lambda: 0.0)
    answer = BackendAnswer(backend, connection, Head(200, [(b"content-type", kind)]), await connection.read(60))
    kept = KeptStream(REQUEST, "/v1/completions")
    client = Client(send, b"id", toggled if direct else None)
    counts = RevisionCounts()
    passing: Passing | Relay = Passing(answer, kept, client, lambda: 0.0, counts)
    if kind:
        passing = Relay(answer, client, lambda: 0.0, counts)
    running = asyncio.create_task(passing.run())
    for piece, (is_open, turns) in zip(pieces[1:], steps, strict=False):
        for _ in range(turns):
            await asyncio.sleep(0)
        toggled.is_open = is_open
        connection.data_received(chunk(piece))
    if breaks:
        connection.connection_lost(None)
    else:
        connection.data_received(b"0\r\n\r\n")
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    assert ended is None or breaks
    assert passing.sent == sum(map(len, sent))
    counts.gap(backend.entry, 1.0)
    (found,) = counts.status()["revisions"]
    return Got(b"".join(sent), kept, toggled.written, sum(found["token_gap_s"].values()) - 1)


def state(kept: KeptStream) -> Outgoing:
    return replace(kept.next_request(), headers=())


@given(
    st.lists(st.integers(1, len(WHOLE) - 1), max_size=12),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=13, max_size=13),
    st.integers(1, len(WHOLE)), st.booleans(),
)  # fmt: skip
def test_direct_writes_and_sends_together_are_the_stream(
    cuts: list[int], steps: list[Step], end: int, breaks: bool
) -> None:
    """And what is kept for another backend is the same as where every part is sent by the task."""
    whole = WHOLE[:end] if breaks else WHOLE
    edges = [0, *sorted({cut for cut in cuts if cut < len(whole)}), len(whole)]
    pieces = [whole[begin:stop] for begin, stop in pairwise(edges)]

    async def scenario() -> None:
        found = await passed(pieces, steps, direct=True, breaks=breaks)
        twin = await passed(pieces, steps, direct=False, breaks=breaks)
        assert found.body == twin.body
        assert twin.written == 0
        assert state(found.kept) == state(twin.kept)
        assert whole.startswith(found.body)
        if not breaks:
            assert told(found.body.decode()) == told(WHOLE.decode())

    run(scenario)


@given(
    st.lists(st.integers(1, len(WHOLE) - 1), max_size=12), st.lists(st.tuples(st.booleans(), st.integers(0, 5)),
    min_size=13, max_size=13), st.booleans(), st.sampled_from([b"text/event-stream", b"application/json"]),
)  # fmt: skip
def test_answers_that_cannot_go_on_arrive_as_they_are(
    cuts: list[int], steps: list[Step], breaks: bool, kind: bytes
) -> None:
    """Events whole: what a break leaves of one is not passed on."""
    whole = WHOLE[:-5] if breaks else WHOLE
    edges = [0, *sorted({cut for cut in cuts if cut < len(whole)}), len(whole)]
    pieces = [whole[begin:stop] for begin, stop in pairwise(edges)]
    events = kind == b"text/event-stream"

    async def scenario() -> None:
        for direct in (True, False):
            found = await passed(pieces, steps, direct=direct, breaks=breaks, kind=kind)
            assert found.body == (whole[: whole.rindex(b"\n\n") + 2] if breaks and events else whole)
            assert events or found.gaps == 0

    run(scenario)


@pytest.mark.parametrize("kind", [b"", b"text/event-stream"])
def test_an_open_client_gets_every_part_but_the_first_directly(kind: bytes) -> None:
    pieces = [*marked_stream(9), DONE]

    async def scenario() -> None:
        found = await passed(pieces, [(True, 5)] * len(pieces), direct=True, breaks=False, kind=kind)
        assert found.body == WHOLE
        assert found.written == len(pieces) - (1 if kind else 2)  # a passage sends the end itself
        assert found.gaps == len(pieces) - 1

    run(scenario)


@pytest.mark.parametrize(
    ("data", "whole"), [(b"", 0), (b"a\n", 0), (b"a\n\nb", 3), (b"a\r\n\r\nb", 5), (b"a\n\nb\r\n\r\nc", 8)]
)
def test_events_may_end_with_carriage_returns(data: bytes, whole: int) -> None:
    assert end_of_events(data) == whole
