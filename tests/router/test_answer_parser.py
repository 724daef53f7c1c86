"""The parser of backends' answers against h11, on generated answers cut anywhere; and what a proxy needs beside it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.router.answer_parser import MAX_HEAD_BYTES, AnswerParser
from stoker.router.connection import Outgoing

Seen = tuple[int, list[tuple[bytes, bytes]], bytes, str, bool]
"""Status, headers, body, how it ended, whether another exchange can begin."""
STATUSES = st.sampled_from([200, 204, 304, 400, 404, 429, 500, 503])
NAMES = st.sampled_from([b"X-A", b"content-type", b"Date", b"set-cookie"])
VALUES = st.text("aZ09 ,;=\"'/\t", max_size=20).map(lambda text: text.strip(" \t").encode())
INFORMATIONAL = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Whole answers with and without a length, in chunks with and without trailers."""
    version, parts = draw(st.sampled_from([b"1.0", b"1.1"])), draw(st.lists(st.binary(max_size=40), max_size=5))
    framing = draw(st.sampled_from(["length", "chunked", "close"] if version == b"1.1" else ["length", "close"]))
    headers = draw(st.lists(st.tuples(NAMES, VALUES), max_size=4))
    status = draw(STATUSES)
    if status in (204, 304):
        framing, parts = "none", []
    if framing == "length":
        headers.append((b"Content-Length", b"%d" % sum(map(len, parts))))
    if framing == "chunked":
        headers.append((b"Transfer-Encoding", b"chunked"))
    if draw(st.booleans()):  # HTTP/1.0 can be kept alive too; h11 does not
        headers.append((b"Connection", b"close" if version == b"1.0" or draw(st.booleans()) else b"keep-alive"))
    head = b"HTTP/%s %d Some Reason\r\n" % (version, status) + b"".join(b"%s: %s\r\n" % each for each in headers)
    body = b"".join(parts)
    if framing == "chunked":
        trailers = draw(st.sampled_from([b"", b"x-sum: 1\r\n"]))
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\n" + trailers + b"\r\n"
    begin = INFORMATIONAL * draw(st.integers(0, 2)) if version == b"1.1" else b""
    return begin + head + b"\r\n" + body


def cut(whole: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(whole) + 1) for place in places} - {0, len(whole)}), len(whole)]
    return [whole[begin:end] for begin, end in pairwise(edges)]


def by_parser(method: str, pieces: list[bytes], *, closed: bool) -> Seen:
    parser = AnswerParser()
    parser.begin(method)
    body = b""
    for piece in pieces:
        parser.feed(piece)
        body += parser.take()
    if closed:
        parser.end_of_connection()
    again = parser.complete and not parser.problem
    end = "whole" if parser.complete else "broken" if parser.problem else "more"
    head = parser.head
    return (head.status, list(head.headers), body, end, again) if head is not None else (0, [], b"", end, False)


def by_h11(method: str, pieces: list[bytes], *, closed: bool) -> Seen:
    wire = h11.Connection(h11.CLIENT)
    wire.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    wire.send(h11.EndOfMessage())
    status, headers, body, end, again = 0, [], b"", "more", False
    try:
        for piece in [*pieces, *([b""] if closed else [])]:
            wire.receive_data(piece)
            while end == "more" and (event := wire.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    status, headers = event.status_code, list(event.headers)
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    end = "whole"
                    again = wire.our_state is h11.DONE and wire.their_state is h11.DONE and not closed
                elif isinstance(event, h11.ConnectionClosed):
                    end = "broken"
    except h11.RemoteProtocolError:
        end = "broken"
    return status, headers, body, end, again


@given(
    answers(), st.lists(st.integers(0, 10_000), max_size=6), st.integers(0, 10_000), st.sampled_from(["GET", "POST"])
)  # fmt: skip
def test_it_agrees_with_h11(whole: bytes, places: list[int], end: int, method: str) -> None:
    """Whole, cut off by the end of the connection, and not complete yet."""
    for data in (whole, whole[: end % (len(whole) + 1)]):
        for closed in (False, True):
            pieces = [piece for piece in cut(data, places) if piece]
            found, expected = by_parser(method, pieces, closed=closed), by_h11(method, pieces, closed=closed)
            assert found == expected, (data, closed)


@given(answers(), st.binary(max_size=60), st.integers(0, 10_000))
def test_damage_never_raises(whole: bytes, noise: bytes, place: int) -> None:
    """Any bytes give an answer or a problem."""
    place %= len(whole) + 1
    parser = AnswerParser()
    parser.begin("GET")
    parser.feed(whole[:place] + noise + whole[place:])
    parser.end_of_connection()
    assert parser.problem


def test_one_connection_has_many_answers() -> None:
    parser = AnswerParser()
    for number in range(3):
        parser.begin("GET")
        parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)
        assert (parser.take(), parser.complete, parser.problem) == (b"%d" % number, True, "")


def test_bytes_that_belong_to_no_request_end_the_connection_behind_the_answer() -> None:
    parser = AnswerParser()
    parser.begin("GET")
    parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb")
    assert (parser.take(), parser.complete) == (b"a", True)
    assert "belong to no request" in parser.problem


def test_an_answer_to_head_has_no_body_and_is_the_last_one() -> None:
    parser = AnswerParser()
    parser.begin("HEAD")
    parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert parser.head is not None
    assert parser.head.status == 200
    assert (parser.take(), parser.complete) == (b"", True)
    assert parser.problem


@pytest.mark.parametrize("line", [b"x: y\r\n", INFORMATIONAL])
def test_a_head_without_end_is_refused(line: bytes) -> None:
    parser = AnswerParser()
    parser.begin("GET")
    if line != INFORMATIONAL:
        parser.feed(b"HTTP/1.1 200 OK\r\n")
    for _ in range(MAX_HEAD_BYTES // len(line) + 1):
        parser.feed(line)
    assert f"more than {MAX_HEAD_BYTES} bytes" in parser.problem


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (Outgoing("GE T", b"/", ()), "method"),
        (Outgoing("GET", b"/a b", ()), "target"),
        (Outgoing("GET", b"/a\r\nx: y", ()), "target"),
        (Outgoing("GET", b"", ()), "target"),
        (Outgoing("GET", b"/", [(b"a b", b"c")]), "name"),
        (Outgoing("GET", b"/", [(b"", b"c")]), "name"),
        (Outgoing("GET", b"/", [(b"a", b"c\r\nd: e")]), "value"),
        (Outgoing("GET", b"/", [(b"a", b"c\n")]), "value"),
        (Outgoing("GET", b"/", [(b"a", b"\x00")]), "value"),
        (Outgoing("POST", b"/v1/x?y=%20", [(b"a", b"c\td \xe4"), (b"b", b"")]), None),
    ],
)
def test_a_head_that_may_not_be_sent_is_named(request_: Outgoing, problem: str | None) -> None:
    found = request_.problem
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)


def test_the_head_that_is_sent_is_what_h11_reads() -> None:
    request = Outgoing("POST", b"/v1/x?y=1", [(b"a", b"b"), (b"c", b"")], b"body")
    wire = h11.Connection(h11.SERVER)
    wire.receive_data(request.head(b"host:1") + request.body)
    read, data = wire.next_event(), wire.next_event()
    assert isinstance(read, h11.Request)
    assert (read.method, read.target) == (b"POST", b"/v1/x?y=1")
    assert list(read.headers) == [(b"host", b"host:1"), (b"a", b"b"), (b"c", b""), (b"content-length", b"4")]
    assert isinstance(data, h11.Data)
    assert bytes(data.data) == b"body"
