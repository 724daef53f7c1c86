"""Followed logs with a cluster that cuts streams, does not answer, or loses pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from stoker.pod.followed_logs import FollowedLogs
from stoker.pod.log_position import LogRequest, instant_ns, timed
from stoker.pod.log_source import Look, Meaning, Pod

ALL = LogRequest()
Stream = Callable[[list[str]], AsyncIterator[list[str]]]


class Cut(Exception):
    """Nothing answers, or a stream breaks off."""


class Unknown(Exception):
    """The kubelet knows no such pod, or its container has not started."""


class Refused(Exception):
    """A right is missing."""


def line(second: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02}.5Z {text}"


class Cluster:
    """Logs of pods; a stream shows so many lines and is cut, or ends without a word, as a script says."""

    errors: tuple[type[Exception], ...] = (Cut, Unknown, Refused)

    def __init__(self, **logs: list[str]) -> None:
        self.logs = logs
        self.phases = dict.fromkeys(logs, "Running")
        self.streams: list[tuple[str, LogRequest]] = []
        self.script: dict[str, list[Stream]] = {}
        self.looks: list[Exception] = []
        self.num_looks = 0
        self.at_look: dict[int, Callable[[], object]] = {}

    def add(self, name: str, lines: list[str]) -> None:
        self.logs[name], self.phases[name] = lines, "Running"

    def end(self) -> None:
        self.phases = dict.fromkeys(self.logs, "Succeeded")

    async def look(self) -> Look:
        self.num_looks += 1
        if self.looks:
            raise self.looks.pop(0)
        self.at_look.get(self.num_looks, lambda: None)()
        pods = [{"metadata": {"name": name, "uid": name}, "status": {"phase": self.phases[name]}} for name in self.logs]
        return Look(pods, set(self.logs), ended="Running" not in self.phases.values())

    async def read(self, pod: Pod, request: LogRequest) -> AsyncIterator[list[str]]:
        name = pod["metadata"]["name"]
        self.streams.append((name, request))
        since = instant_ns(request.since_time) if request.since_time else 0
        found = [one for one in self.logs[name] if timed(one).instant_ns >= since]
        found = found if request.tail is None else found[len(found) - request.tail :]
        script = self.script.get(name)
        stream = script.pop(0) if script else whole
        async for lines in stream(found):
            yield lines

    def meaning(self, error: Exception) -> Meaning:
        if isinstance(error, Unknown):
            return Meaning.NO_LOG
        return Meaning.NO_ANSWER if isinstance(error, Cut) else Meaning.REFUSED

    def explain(self, error: Exception) -> str:
        return f"no answer: {error}"


async def whole(lines: list[str]) -> AsyncIterator[list[str]]:
    yield []
    yield lines


def cut_after(count: int) -> Stream:
    async def stream(lines: list[str]) -> AsyncIterator[list[str]]:
        yield []
        yield lines[:count]
        raise Cut("cut")

    return stream


async def unknown(_: list[str]) -> AsyncIterator[list[str]]:
    raise Unknown("no such pod")
    yield []


async def silent(_: list[str]) -> AsyncIterator[list[str]]:
    raise Cut("refused")
    yield []


def followed(cluster: Cluster, asked: LogRequest = ALL, **options: Any) -> tuple[list[str], list[str]]:
    """Follow to the end; the lines, and what was said."""
    said: list[str] = []

    async def story() -> list[str]:
        logs = FollowedLogs(cluster, asked, said.append, every_s=0, **options)
        return [one.text for found in [item async for item in logs.lines()] for one in found[1]]

    return asyncio.run(asyncio.wait_for(story(), 60)), said


THREE = [line(1, "one"), line(1, "two"), line(9, "three")]


def test_a_stream_that_is_cut_goes_on_where_it_ended() -> None:
    cluster = Cluster(a=list(THREE))
    cluster.script = {"a": [cut_after(1), cut_after(2), cut_after(0)]}
    cluster.at_look = {5: cluster.end}
    assert followed(cluster) == (["one", "two", "three"], [])
    assert cluster.streams[:2] == [("a", LogRequest()), ("a", LogRequest(since_time="2026-01-01T00:00:00Z"))]


def test_a_stream_that_ends_while_its_pod_runs_is_opened_again() -> None:
    """A kubelet that restarts ends the answer of the API server without a word."""
    cluster = Cluster(a=list(THREE))
    cluster.at_look = {3: lambda: cluster.logs["a"].append(line(20, "four")), 4: cluster.end}
    assert followed(cluster)[0] == ["one", "two", "three", "four"]


def test_a_kubelet_that_does_not_know_a_pod_yet_ends_no_log() -> None:
    """A restarted one answers so until it has listed its pods; that a pod is gone is seen by the next look."""
    cluster = Cluster(a=list(THREE), b=[line(5, "other")])
    cluster.script = {"a": [cut_after(1), unknown, unknown], "b": [unknown] * 99}
    cluster.at_look = {5: lambda: cluster.logs.pop("b"), 9: cluster.end}
    assert followed(cluster) == (["one", "two", "three"], [])


def test_of_a_log_that_begins_later_no_line_is_left_out() -> None:
    """A tail is one of what is there when it is asked for: not of a container that starts, nor of the next attempt."""
    cluster = Cluster(a=list(THREE), b=[line(5, "b1"), line(6, "b2")])
    cluster.script = {"b": [unknown]}
    cluster.at_look = {3: lambda: cluster.add("c", [line(7, "c1"), line(8, "c2")]), 6: cluster.end}
    lines, _ = followed(cluster, LogRequest(tail=1))
    assert sorted(lines) == ["b1", "b2", "c1", "c2", "three"]


def test_an_ended_pod_without_a_log_is_not_waited_for() -> None:
    cluster = Cluster(a=list(THREE), b=[])
    cluster.end()
    cluster.script = {"b": [unknown]}
    assert followed(cluster)[0] == ["one", "two", "three"]


def test_lines_of_a_pod_that_ends_behind_a_cut_are_read() -> None:
    cluster = Cluster(a=list(THREE))
    cluster.script = {"a": [cut_after(2)]}
    cluster.at_look = {2: cluster.end}
    assert followed(cluster)[0] == ["one", "two", "three"]


def test_an_outage_is_told_once_and_borne() -> None:
    cluster = Cluster(a=list(THREE), b=[line(5, "other")])
    cluster.script = {"a": [cut_after(1), silent, silent, silent], "b": [cut_after(0)]}
    cluster.at_look = {1: lambda: cluster.looks.extend([Cut("dead"), Cut("dead")]), 9: cluster.end}
    lines, said = followed(cluster)
    assert sorted(lines) == ["one", "other", "three", "two"]
    assert said[:2] == ["no answer: dead; asking again for 5 minutes", "the cluster answers again"]
    assert said[2:] == ["log of pod a: no answer: refused; asking again"], "a log that is refused twice is told once"


def test_an_outage_that_lasts_ends_the_stream() -> None:
    now = [0.0]

    def pass_time() -> float:
        now[0] += 100.0
        return now[0]

    cluster = Cluster(a=list(THREE))
    cluster.looks = [Cut("dead")] * 99
    with pytest.raises(Cut, match="dead"):
        followed(cluster, monotonic=pass_time)
    assert cluster.num_looks == 4


def test_a_log_of_an_ended_pod_that_stays_silent_ends_the_stream() -> None:
    now = [0.0]

    def pass_time() -> float:
        now[0] += 100.0
        return now[0]

    cluster = Cluster(a=list(THREE))
    cluster.end()
    cluster.script = {"a": [silent] * 99}
    with pytest.raises(Cut, match="refused"):
        followed(cluster, monotonic=pass_time)


def test_a_refusal_ends_the_stream_at_once() -> None:
    cluster = Cluster(a=list(THREE))
    cluster.looks = [Refused("no right")]
    with pytest.raises(Refused):
        followed(cluster)


@pytest.mark.parametrize(("lines", "tail", "shown"), [(["one", "two"], 1, ["two"]), (["one"], 0, [])])
def test_a_tail_without_times_is_not_read_again_at_the_end_of_its_pod(
    lines: list[str], tail: int, shown: list[str]
) -> None:
    cluster = Cluster(a=lines)
    cluster.at_look = {2: cluster.end}
    assert followed(cluster, LogRequest(tail=tail)) == (shown, [])


def test_a_tail_without_times_ends_with_the_cut() -> None:
    """Nothing tells which lines were shown: a lost or a doubled line would be silent."""
    cluster = Cluster(a=["one", "two"])
    cluster.script = {"a": [cut_after(2)]}
    with pytest.raises(Cut):
        followed(cluster, LogRequest(tail=2))
