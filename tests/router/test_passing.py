"""Streams that are written where they arrive are the streams that a task sends: generated histories."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

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


async def passed(
    pieces: list[bytes], steps: list[Step], *, direct: bool, breaks: bool
) -> tuple[bytes, KeptStream, int]:
    """Pass pieces on; return what the client got, what is kept, and how many direct writes there were."""
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
    answer = BackendAnswer(backend, connection, Head(200, ()), await connection.read(60))
    kept = KeptStream(REQUEST, "/v1/completions")
    client = Client(send, b"id", toggled if direct else None)
    passing = Passing(answer, kept, client, lambda: 0.0, RevisionCounts())
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
    return b"".join(sent), kept, toggled.written


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
        found, kept, _ = await passed(pieces, steps, direct=True, breaks=breaks)
        twin, twin_kept, _ = await passed(pieces, steps, direct=False, breaks=breaks)
        assert found == twin
        assert state(kept) == state(twin_kept)
        assert whole.startswith(found)
        if not breaks:
            assert told(found.decode()) == told(WHOLE.decode())

    run(scenario)


def test_an_open_client_gets_every_part_but_the_first_directly() -> None:
    pieces = [*marked_stream(9), DONE]

    async def scenario() -> None:
        found, _, written = await passed(pieces, [(True, 5)] * len(pieces), direct=True, breaks=False)
        assert found == WHOLE
        assert written == len(pieces) - 2  # the first and the end are sent

    run(scenario)
