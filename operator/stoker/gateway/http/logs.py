"""Logs of all ranks of a job in one stream: as lines, or as events from which a client goes on after a cut."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime

from stoker.gateway.cluster.interface import JOB, ApiError, Object
from stoker.gateway.domain.log_lines import LogLine
from stoker.gateway.domain.pod_attempts import Attempts, attempt_of
from stoker.gateway.http.caller import Call, Caller, Namespace, ResourceId, find, one_namespace
from stoker.gateway.http.errors import ERRORS, problem_of
from stoker.gateway.http.pod_logs import JobLogs, pods_of, read_logs
from stoker.gateway.http.stream import MEDIA_TYPE, ClosingStream, event, with_heartbeat
from stoker.gateway.problem import Problem, wrong_field
from stoker.pod.followed_logs import FollowedLogs
from stoker.pod.log_position import LogRequest

log = logging.getLogger("stoker.gateway")

FIRST_S = 1.0
"""Time for which an answer waits for its first line: longer, and a client could take silence for a lost connection."""
TEXT: dict[str, Any] = {
    "description": "Lines; with the Accept header `text/event-stream` events POD, LINE, ERROR and END",
    "content": {"text/plain": {}, MEDIA_TYPE: {}},
}
Item = LogLine | str
"""A line, or the name of a pod whose log begins to be read."""
Number = Annotated[int | None, Query(ge=0, le=2**31)]
EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


def log_routes() -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/v1/training/jobs/{job_id}", tags=["training"], responses=ERRORS)
    router.add_api_route("/logs", logs, methods=["GET"], responses={200: TEXT}, response_class=StreamingResponse)
    return router


async def logs(
    request: Request,
    job_id: ResourceId,
    call: Caller,
    namespace: Namespace = None,
    follow: Annotated[
        bool, Query(description="Go on until the job has ended, with later attempts unless `attempt` names one")
    ] = False,
    tail_lines: Annotated[int | None, Query(ge=0, le=100_000, description="Last lines of each pod")] = None,
    since_time: Annotated[
        AwareDatetime | None, Query(description="Only lines from this second on, where the cluster notes times")
    ] = None,
    attempt: Annotated[Number, Query(description="Default: the newest that has pods")] = None,
    from_attempt: Annotated[Number, Query(description="This attempt and those after it")] = None,
) -> StreamingResponse:
    """Read the log of all pods of an attempt, merged by time."""
    job = await find(call, JOB, one_namespace(call, namespace), job_id)
    wanted, asked = _attempts(attempt, from_attempt), LogRequest(tail_lines, since_time=_noted(since_time))
    pods = wanted.chosen(there := await pods_of(call, job))
    if attempt is not None and not pods:
        raise _no_attempt(attempt, there)
    shown = _Followed(call, job, wanted, asked) if follow else _Read(call, pods, asked)
    return await _answer(shown, as_events=MEDIA_TYPE in request.headers.get("accept", ""))


class _Read:
    """What the logs hold now."""

    def __init__(self, call: Call, pods: list[Object], asked: LogRequest) -> None:
        self.several = len(pods) > 1
        self.items: AsyncGenerator[Item] = read_logs(call.cluster, pods, asked)

    def attempt(self, pod: str) -> int:
        raise AssertionError(f"no pod is announced: {pod}")


class _Followed:
    """The logs as they come."""

    def __init__(self, call: Call, job: Object, wanted: Attempts, asked: LogRequest) -> None:
        self._source = JobLogs(call, job, wanted)
        self._logs = FollowedLogs(self._source, asked, log.info)
        self.items: AsyncGenerator[Item] = self._lines()

    @property
    def several(self) -> bool:
        return self._logs.several

    def attempt(self, pod: str) -> int:
        return self._source.attempts[pod]

    async def _lines(self) -> AsyncGenerator[Item]:
        """Yield pods that are read, and lines; no pod before the first line, so that a refusal is no event."""
        found, held, begun = self._logs.lines(), list[Item](), False
        try:
            async for pod, lines in found:
                items: list[Item] = [LogLine(one.time, pod, one.text, one.instant_ns) for one in lines] or [pod]
                held, begun = [*held, *items], begun or bool(lines)
                while begun and held:
                    yield held.pop(0)
            for item in held:
                yield item
        finally:
            await found.aclose()


async def _answer(shown: _Read | _Followed, *, as_events: bool) -> StreamingResponse:
    """Answer with the first item, or with a refusal that comes before it."""
    first = asyncio.ensure_future(anext(shown.items, None))
    await asyncio.wait((first,), timeout=FIRST_S)
    if first.done():
        first.result()  # a refusal is an answer of its own

    async def close() -> None:
        first.cancel()
        await asyncio.wait((first,))
        await shown.items.aclose()

    if as_events:
        return ClosingStream(with_heartbeat(_events(first, shown)), close, media_type=MEDIA_TYPE)
    return ClosingStream(_text(first, shown), close, media_type="text/plain")


async def _events(first: asyncio.Future[Item | None], shown: _Read | _Followed) -> AsyncIterator[bytes]:
    try:
        async for item in _whole(first, shown.items):
            if isinstance(item, LogLine):
                yield event("LINE", {"time": item.time or None, "pod": item.pod, "text": item.text})
            else:
                yield event("POD", {"pod": item, "attempt": shown.attempt(item)})
        yield event("END", {})
    except (ApiError, Problem) as error:
        yield event("ERROR", _problem(error).document("").model_dump())


async def _text(first: asyncio.Future[Item | None], shown: _Read | _Followed) -> AsyncIterator[bytes]:
    try:
        async for item in _whole(first, shown.items):
            if isinstance(item, LogLine):
                yield f"{f'[{item.pod}] ' if shown.several else ''}{item.text}\n".encode()
    except (ApiError, Problem) as error:
        yield f"error: {_problem(error).detail}\n".encode()


async def _whole(first: asyncio.Future[Item | None], items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    begun = await first
    if begun is not None:
        yield begun
        async for item in items:
            yield item


def _problem(error: ApiError | Problem) -> Problem:
    return error if isinstance(error, Problem) else problem_of(error)


def _attempts(only: int | None, first: int | None) -> Attempts:
    """The attempts that are asked for. Raises Problem 422."""
    if only is not None and first is not None:
        raise wrong_field("query.from_attempt", "attempt and from_attempt exclude each other")
    return Attempts(only, first)


def _noted(since: datetime | None) -> str:
    """A time as Kubernetes takes it, in whole seconds. Raises Problem 422."""
    if since is None:
        return ""
    if not EARLIEST <= since < LATEST:
        raise wrong_field("query.since_time", f"must be between 1970 and 9000, got {since.isoformat()!r}")
    return f"{since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _no_attempt(attempt: int, pods: list[Object]) -> Problem:
    there = sorted({attempt_of(pod) for pod in pods})
    left = f"there are those of {', '.join(map(str, there))}" if there else "no pod of the job is left"
    return Problem(404, "not-found", f"query.attempt: no pod of attempt {attempt}; {left}")
