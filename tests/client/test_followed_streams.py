"""Followed logs and watches of the client: cut anywhere, they go on without a lost or a doubled line or change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import pytest

from stoker.client.async_client import AsyncStokerClient
from stoker.client.client import StokerClient
from stoker.client.errors import Forbidden, GatewayFailed, NoAnswer, StokerError
from stoker.client.event_stream import Event, EventLines
from stoker.client.followed_log import FollowedLog
from stoker.gateway.domain.views import job_view

DATE = "Thu, 01 Jan 2026 00:00:10 GMT"
FOLLOW = {"follow": "true"}
END = Event("END", {})
Request = Mapping[str, str]


def pod(name: str, attempt: int = 0) -> Event:
    return Event("POD", {"pod": name, "attempt": attempt})


def line(second: int | None, text: str, of: str = "a") -> Event:
    time = None if second is None else f"2026-01-01T00:00:{second:02}.5Z"
    return Event("LINE", {"time": time, "pod": of, "text": text})


def error(status: int) -> Event:
    document = {"type": "about:blank", "title": "t", "status": status, "detail": f"no: {status}", "instance": ""}
    return Event("ERROR", document)


class Parts(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Events, and then the cut of the line unless the last is the end."""

    def __init__(self, events: list[Event], *, cut: bool) -> None:
        self.events, self.cut = events, cut

    def __iter__(self) -> Iterator[bytes]:
        for name, data, number in self.events:
            head = f"id: {number}\n" if number else ""
            yield f": alive\n\n{head}event: {name}\ndata: {json.dumps(data)}\n\n".encode()
        if self.cut:
            yield b"event: LINE\ndata: {"
            raise httpx.ReadError("cut")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part


class Gateway:
    """Answers with these streams, one after the other; a number is a refusal."""

    def __init__(self, *streams: list[Event] | int | Exception) -> None:
        self.streams = [*streams]
        self.asked: list[Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(dict(request.url.params))
        found = self.streams.pop(0)
        if isinstance(found, Exception):
            raise found
        if isinstance(found, int):
            return httpx.Response(found, json=error(found).data)
        over = bool(found) and found[-1].name in ("END", "ERROR")
        headers = {"Date": DATE, "Content-Type": "text/event-stream; charset=utf-8"}
        return httpx.Response(200, headers=headers, stream=Parts(found, cut=not over))

    def sync(self) -> StokerClient:
        return StokerClient("http://gateway", "t", transport=httpx.MockTransport(self), sleep=lambda _: None)

    def asynchronous(self) -> AsyncStokerClient:
        async def sleep(_: float) -> None: ...

        return AsyncStokerClient("http://gateway", "t", transport=httpx.MockTransport(self), sleep=sleep)


def lines_by_both(streams: list[Any], tail_lines: int | None = None) -> tuple[list[str], list[Request]]:
    """Follow a log by both clients; the lines, and what they asked for."""
    one, other = Gateway(*streams), Gateway(*streams)

    async def story() -> list[str]:
        async with other.asynchronous() as client:
            return [line async for line in client.logs("run", follow=True, tail_lines=tail_lines)]

    with one.sync() as client:
        lines = list(client.logs("run", follow=True, tail_lines=tail_lines))
    assert (asyncio.run(story()), other.asked) == (lines, one.asked)
    return lines, one.asked


LOGS: dict[str, tuple[list[Any], int | None, list[str], list[Request]]] = {
    "a cut among lines of one second": (
        [
            [pod("a"), line(5, "one"), line(5, "one")],
            [pod("a"), line(5, "one"), line(5, "one"), line(5, "one"), line(9, "two"), END],
        ],
        None,
        ["one", "one", "one", "two"],
        [FOLLOW, {**FOLLOW, "from_attempt": "0", "since_time": "2026-01-01T00:00:04Z"}],
    ),
    "pods at different places": (
        [
            [pod("a"), pod("b"), line(30, "late"), line(5, "early", "b")],
            [pod("a"), pod("b"), line(7, "next", "b"), line(30, "late"), line(31, "later"), END],
        ],
        None,
        ["[a] late", "[b] early", "[b] next", "[a] later"],
        [FOLLOW, {**FOLLOW, "from_attempt": "0", "since_time": "2026-01-01T00:00:04Z"}],
    ),
    "a pod that was silent": (
        [[pod("a"), pod("b"), line(30, "one")], [pod("a"), pod("b"), line(2, "b", "b"), line(30, "one"), END]],
        None,
        ["[a] one", "[b] b"],
        [FOLLOW, {**FOLLOW, "from_attempt": "0"}],
    ),
    "a pod that was silent behind a tail of nothing": (
        [[pod("a"), pod("b"), line(30, "one")], [pod("a"), pod("b"), line(12, "b", "b"), line(30, "one"), END]],
        0,
        ["[a] one", "[b] b"],
        [{**FOLLOW, "tail_lines": "0"}, {**FOLLOW, "from_attempt": "0", "since_time": "2026-01-01T00:00:09Z"}],
    ),
    "a later attempt": (
        [
            [pod("a", 3), line(5, "one"), pod("b", 4), line(7, "two", "b")],
            [pod("b", 4), pod("c", 5), pod("d", 5), line(8, "three", "c"), pod("e", 6), line(9, "four", "e")],
            [pod("e", 6), line(9, "four", "e"), END],
        ],
        None,
        ["one", "two", "[c] three", "[e] four"],
        [
            FOLLOW,
            {**FOLLOW, "from_attempt": "3", "since_time": "2026-01-01T00:00:04Z"},
            {**FOLLOW, "from_attempt": "5"},
        ],
    ),
    "a cluster without times": (
        [[pod("a"), line(None, "one"), line(None, "one")], [pod("a"), *[line(None, "one")] * 3, END]],
        None,
        ["one", "one", "one"],
        [FOLLOW, {**FOLLOW, "from_attempt": "0"}],
    ),
    "a cut before anything": (
        [[], [pod("a"), line(5, "one"), END]], 5, ["one"], [{**FOLLOW, "tail_lines": "5"}, FOLLOW]
    ),
    "a gateway that is restarted": (
        [[pod("a"), line(5, "one")], httpx.ConnectError("refused"), 503, 429, [pod("a"), line(5, "one"), END]],
        None,
        ["one"],
        [FOLLOW, *[{**FOLLOW, "from_attempt": "0", "since_time": "2026-01-01T00:00:04Z"}] * 4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOGS.values(), ids=LOGS)
def test_a_followed_log_that_is_cut_goes_on(case: tuple[list[Any], int | None, list[str], list[Request]]) -> None:
    streams, tail, lines, asked = case
    assert lines_by_both(streams, tail) == (lines, asked)


@pytest.mark.parametrize(
    ("streams", "tail", "kind"),
    [
        ([httpx.ConnectError("refused")], None, NoAnswer),
        ([403], None, Forbidden),
        ([[pod("a"), line(5, "one")], 403], None, Forbidden),
        ([[pod("a"), line(5, "one"), error(503)]], None, GatewayFailed),
        ([[pod("a"), line(None, "one")]], 1, NoAnswer),
    ],
    ids=["first", "refused", "refused later", "told by the gateway", "tail without times"],
)
def test_what_another_stream_cannot_mend_ends_a_followed_log(
    streams: list[Any], tail: int | None, kind: type[Exception]
) -> None:
    with Gateway(*streams).sync() as client, pytest.raises(kind):
        list(client.logs("run", follow=True, tail_lines=tail))


def job(name: str, version: int) -> dict[str, Any]:
    metadata = {"name": name, "uid": name, "namespace": "default", "resourceVersion": str(version)}
    metadata["creationTimestamp"] = "2026-01-01T00:00:00Z"
    shown: dict[str, Any] = job_view({"metadata": metadata, "spec": {}}).model_dump(mode="json", by_alias=True)
    return shown


def change(kind: str, name: str, version: int) -> Event:
    return Event(kind, job(name, version), str(version))


def there(name: str, version: int) -> Event:
    """A job as a stream without a version shows it first."""
    return Event("ADDED", job(name, version))


def bookmark(version: int) -> Event:
    return Event("BOOKMARK", {"resource_version": str(version)}, str(version))


WATCH = {"watch": "true"}
CHANGES: dict[str, tuple[list[Any], list[str], list[Request]]] = {
    "a cut behind the bookmark": (
        [
            [there("a", 1), bookmark(5), change("MODIFIED", "a", 6)],
            [bookmark(6), change("ADDED", "b", 7), change("DELETED", "a", 8)],
        ],
        ["ADDED a 1", "MODIFIED a 6", "ADDED b 7", "DELETED a 8"],
        [WATCH, {**WATCH, "resource_version": "6"}, {**WATCH, "resource_version": "8"}],
    ),
    "a cut among the jobs that exist": (
        [[there("a", 1)], [there("a", 1), there("b", 2), bookmark(5)]],
        ["ADDED a 1", "ADDED b 2"],
        [WATCH, WATCH, {**WATCH, "resource_version": "5"}],
    ),
    "a version that is too old": (
        [
            [there("a", 1), there("b", 2), there("c", 3), bookmark(5)],
            410,
            [there("a", 1), there("c", 8), bookmark(9), error(410)],
            [there("a", 1), bookmark(12)],
        ],
        ["ADDED a 1", "ADDED b 2", "ADDED c 3", "MODIFIED c 8", "DELETED b 2", "DELETED c 8"],
        [WATCH, {**WATCH, "resource_version": "5"}, WATCH, WATCH, {**WATCH, "resource_version": "12"}],
    ),
    "a cluster that does not answer": (
        [[there("a", 1), bookmark(5), error(503)], 503, httpx.ConnectError("refused"), [bookmark(7)]],
        ["ADDED a 1"],
        [WATCH, *[{**WATCH, "resource_version": "5"}] * 3, {**WATCH, "resource_version": "7"}],
    ),
    "a job that leaves states unseen": (
        [[bookmark(5), change("DELETED", "a", 6)]],
        [],
        [WATCH, {**WATCH, "resource_version": "6"}],
    ),
}


@pytest.mark.parametrize("case", CHANGES.values(), ids=CHANGES)
def test_a_watch_that_is_cut_goes_on(case: tuple[list[Any], list[str], list[Request]]) -> None:
    streams, told, asked = case
    one, other = Gateway(*streams, 403), Gateway(*streams, 403)
    found: list[str] = []
    seen: list[str] = []

    async def story() -> None:
        async with other.asynchronous() as client:
            async for kind, changed in client.watch():
                seen.append(f"{kind} {changed.job_name} {changed.resource_version}")

    def watch() -> None:
        with one.sync() as client:
            for kind, changed in client.watch():
                found.append(f"{kind} {changed.job_name} {changed.resource_version}")

    with pytest.raises(Forbidden):
        watch()
    with pytest.raises(Forbidden):
        asyncio.run(story())
    assert (found, one.asked) == (seen, other.asked) == (told, asked)


def test_a_watch_names_what_it_shows() -> None:
    gateway = Gateway(403, 403)
    with gateway.sync() as client:
        for watch in (client.watch("RUNNING", "FAILED"), client.watch(job_id="run")):
            with pytest.raises(StokerError):
                next(watch)
        with pytest.raises(ValueError, match="job_id and states exclude each other"):
            next(client.watch("RUNNING", job_id="run"))
    assert [one.get("status") for one in gateway.asked] == ["RUNNING", None], "the first of several"


def test_events_are_read_from_lines() -> None:
    lines = EventLines()
    texts = [": alive", "", "id: 7", "event: ADDED", 'data: {"a": ": b"}', "", "event: empty", ""]
    found = [event for text in texts if (event := lines.take(text)) is not None]
    assert found == [Event("ADDED", {"a": ": b"}, "7")]


def test_a_log_that_does_not_come_back_ends() -> None:
    log = FollowedLog(None)
    with pytest.raises(NoAnswer, match="first"):
        log.lost(NoAnswer("first"))
    log.begin(DATE)
    log.lost(NoAnswer("borne"))
    log.take(END)
    with pytest.raises(NoAnswer, match="late"):
        log.lost(NoAnswer("late"))
