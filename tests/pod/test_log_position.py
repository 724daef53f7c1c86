"""Log positions: a stream that is cut anywhere and opened again gives every line once."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.log_position import LogPosition, LogRequest, TimedLine, instant_ns, timed

START = 1_767_225_600
"""2026-01-01T00:00:00Z"""


def noted(tenths: int, text: str) -> str:
    """A line as Kubernetes sends it."""
    return f"{datetime.fromtimestamp(START + tenths // 10, UTC):%Y-%m-%dT%H:%M:%S}.{tenths % 10}00000000Z {text}"


def served(log: list[str], request: LogRequest) -> list[str]:
    """What a kubelet answers: lines from a whole second on, the last ones of those."""
    since = instant_ns(request.since_time) if request.since_time else 0
    found = [line for line in log if timed(line).instant_ns >= since]
    return found if request.tail is None else found[len(found) - request.tail :] if request.tail else []


times = st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9), st.sampled_from("ab")), max_size=40)
cuts = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8)


@given(times, cuts, st.booleans())
def test_no_line_is_lost_or_doubled_wherever_the_stream_is_cut(
    steps: list[tuple[int, int, str]], cuts: list[tuple[int, int]], clocked: bool
) -> None:
    """Lines of one second are alike, and out of order by less than a second, as those of two streams of a container."""
    now, log = 20, []
    for step, disorder, text in steps:
        now += step
        log.append(noted(max(20, now + disorder // 2), text) if clocked else text)
    position, seen, there = LogPosition(LogRequest()), [TimedLine("", "")][:0], 0
    for written, read in [*cuts, (len(log), len(log))]:
        there = min(len(log), there + written)
        answer = served(log[:there], position.request())
        position.opened()
        seen += position.new_lines(answer[: read if (written, read) != (len(log), len(log)) else None])
    assert seen == [timed(line) for line in log]


def test_a_tail_is_asked_for_once() -> None:
    log = [noted(tenths, f"line {tenths}") for tenths in (10, 20, 30)]
    position = LogPosition(LogRequest(tail=1))
    assert position.request() == LogRequest(tail=1)
    position.opened()
    assert [one.text for one in position.new_lines(served(log, LogRequest(tail=1)))] == ["line 30"]
    log += [noted(31, "line 31"), noted(95, "line 95")]
    again = position.request()
    assert again == LogRequest(since_time="2026-01-01T00:00:02Z")
    position.opened()
    assert [one.text for one in position.new_lines(served(log, again))] == ["line 31", "line 95"]


@pytest.mark.parametrize(
    ("asked", "again"),
    [
        (LogRequest(), LogRequest()),
        (LogRequest(tail=5), LogRequest()),
        (LogRequest(tail=0), LogRequest(since_s=8)),
        (LogRequest(since_s=60), LogRequest(since_s=68)),
        (LogRequest(since_time="2026-01-01T00:00:00Z"), LogRequest(since_time="2026-01-01T00:00:00Z")),
    ],
    ids=["all", "tail", "only new", "since", "since time"],
)
def test_a_stream_that_showed_nothing_asks_for_what_was_written_since(asked: LogRequest, again: LogRequest) -> None:
    now = [100.0]
    position = LogPosition(asked, monotonic=lambda: now[0])
    now[0] = 200.0
    assert position.request() == asked, "it never began"
    position.opened()
    now[0] = 207.5
    assert position.request() == again


def test_a_tail_without_times_cannot_go_on() -> None:
    position = LogPosition(LogRequest(tail=3))
    position.opened()
    assert position.can_go_on
    position.new_lines(["no time"])
    assert not position.can_go_on


@pytest.mark.parametrize(
    ("line", "text", "instant"),
    [
        ("2026-01-01T00:00:01.25Z a b", "a b", START * 10**9 + 1_250_000_000),
        ("2026-01-01T02:00:01.000000007+02:00 a", "a", START * 10**9 + 1_000_000_007),
        ("2026-01-01T00:00:01Z", "", START * 10**9 + 10**9),
        ("2026-13-41T00:00:01Z no day", "2026-13-41T00:00:01Z no day", 0),
        ("a line", "a line", 0),
    ],
    ids=["fraction", "zone", "empty", "no day", "no time"],
)
def test_a_time_is_read_in_any_zone(line: str, text: str, instant: int) -> None:
    assert timed(line)[1:] == (text, instant)


def test_a_request_has_the_names_of_kubernetes() -> None:
    whole = LogRequest(tail=0, since_s=5, since_time="2026-01-01T00:00:00Z")
    assert whole.query == {"tailLines": "0", "sinceSeconds": "5", "sinceTime": "2026-01-01T00:00:00Z"}
    assert LogRequest().query == {}
