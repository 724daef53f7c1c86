"""Changes of a kind as server-sent events, which a client resumes at the version that it saw last.

An event's id is the resource version. Without a version the objects that exist come first, as ADDED and without ids: a
client that is cut off among them begins anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from stoker.gateway.cluster.interface import ApiError, Change, Cluster, Kind, Object, Selection, Watch, list_all
from stoker.gateway.http.caller import Call
from stoker.gateway.http.errors import problem_of
from stoker.gateway.problem import Problem
from stoker.pod.asgi import Receive, Scope, Send

MEDIA_TYPE = "text/event-stream"
HEARTBEAT_S = 15.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
View = Callable[[Object], BaseModel]
Shows = Callable[[Object], bool]
Sleep = Callable[[float], Awaitable[None]]


def wants_stream(request: Request, watch: bool) -> bool:
    """Whether the caller asks for events: by `?watch=true`, or by its Accept header."""
    return watch or MEDIA_TYPE in request.headers.get("accept", "")


def shows_all(_: Object) -> bool:
    return True


async def watched(
    call: Call,
    kind: Kind,
    selection: Selection,
    version: str | None,
    view: View,
    shows: Shows = shows_all,
    sleep: Sleep = asyncio.sleep,
) -> StreamingResponse:
    """Answer with the changes after `version`. Raises ApiError 410 when that is too old, or of another history.

    An object that is not shown any more is a DELETED one, also where the client has not seen it.
    """
    since, first = version, list[Object]()
    if since is None:
        first, since = await list_all(call.cluster, kind, selection)
    else:
        await _check_reached(call.cluster, kind, selection, since)
    changes = _Changes(call, kind, selection, since, sleep)
    await changes.begin()  # a refusal is an answer of its own, not an event
    events = with_heartbeat(_events(first, changes, view, shows))
    return ClosingStream(events, changes.close, media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"})


async def _check_reached(cluster: Cluster, kind: Kind, selection: Selection, version: str) -> None:
    """Refuse a version that the cluster has not reached, as after a restored backup: its watch would stay silent."""
    newest = (await cluster.list(kind, replace(selection, metadata_only=True), limit=1)).resource_version
    if newest.isdigit() and int(version) > int(newest):
        raise ApiError(410, "Expired", f"version {version} is of another history, the newest is {newest}: begin again")


class ClosingStream(StreamingResponse):
    """A stream that ends what it reads from, however it ends: also when the client left before its first part."""

    def __init__(self, parts: AsyncIterator[bytes], close: Callable[[], Awaitable[None]], **options: Any) -> None:
        super().__init__(parts, **options)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._close()))  # a cancelled request still closes


class _Changes:
    """A watch that goes on when the server ends it, as long as the caller's token is good.

    One that ended without a word is opened again after a pause, twice as long each time: a server that ends every watch
    at once is not asked without rest.
    """

    def __init__(self, call: Call, kind: Kind, selection: Selection, version: str, sleep: Sleep) -> None:
        self.call, self.kind, self.selection, self.version = call, kind, selection, version
        self._sleep, self._silent = sleep, 0
        self._source: Watch | None = None
        self._closed = False

    async def begin(self) -> None:
        """Open the watch. Raises ApiError when it is refused."""
        self._source = await self.call.cluster.watch(self.kind, self.selection, self.version)

    async def close(self) -> None:
        """End the watch for good."""
        self._closed = True
        if self._source is not None:
            await self._source.aclose()

    async def __aiter__(self) -> AsyncIterator[Change]:
        while not self._closed:
            if self._source is None:
                self.call = await self.call.renewed()
                await self.begin()
            assert self._source is not None
            self._silent += 1
            async for change in self._source:
                self._silent, self.version = 0, change.object["metadata"]["resourceVersion"]
                yield change
            self._source = None
            if self._silent:
                await self._sleep(pause_s(self._silent))


def pause_s(silent: int) -> float:
    """Seconds until the next watch, after this many in a row that showed nothing."""
    return min(FIRST_PAUSE_S * 2.0 ** min(silent - 1, 10), LONGEST_PAUSE_S)


async def _events(first: list[Object], changes: _Changes, view: View, shows: Shows) -> AsyncIterator[bytes]:
    for found in filter(shows, first):
        yield event("ADDED", view(found).model_dump(mode="json"))  # without a number: what follows has older ones
    yield event("BOOKMARK", {"resource_version": changes.version}, changes.version)
    try:
        async for change in changes:
            version = change.object["metadata"]["resourceVersion"]
            if change.type == "BOOKMARK":
                yield event("BOOKMARK", {"resource_version": version}, version)
            else:
                name = change.type if shows(change.object) else "DELETED"
                yield event(name, view(change.object).model_dump(mode="json"), version)
    except (ApiError, Problem) as error:
        problem = error if isinstance(error, Problem) else problem_of(error)
        yield event("ERROR", problem.document("").model_dump(mode="json"))


def event(name: str, data: Mapping[str, Any], number: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"id: {number}\n" if number else ""
    return f"{head}event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


async def with_heartbeat(parts: AsyncIterator[bytes], seconds: float = HEARTBEAT_S) -> AsyncIterator[bytes]:
    """Pass the parts on, with a comment after each silence, so that a lost connection is found."""
    coming = asyncio.ensure_future(anext(parts))
    try:
        while True:
            done, _ = await asyncio.wait((coming,), timeout=seconds)
            if not done:
                yield b": alive\n\n"
                continue
            try:
                part = coming.result()
            except StopAsyncIteration:
                return
            coming = asyncio.ensure_future(anext(parts))
            yield part
    finally:
        # Not awaited itself: a scope that is cancelled again and again would pass that on into its clean-up.
        coming.add_done_callback(_taken)
        coming.cancel()
        await asyncio.wait((coming,))


def _taken(part: asyncio.Future[bytes]) -> None:
    """Take the result of a part that is not needed any more, so that no error of it is reported."""
    if not part.cancelled():
        part.exception()
