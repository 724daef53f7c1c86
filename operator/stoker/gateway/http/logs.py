"""Logs of all ranks of a job in one stream."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from stoker.gateway.cluster.interface import JOB, POD, ApiError, Cluster, Object, Selection, list_all
from stoker.gateway.domain.log_lines import LogLine, log_line, place_in_time
from stoker.gateway.http.caller import Call, Caller, Namespace, ResourceId, find, one_namespace
from stoker.gateway.http.errors import ERRORS, problem_of
from stoker.gateway.http.stream import MEDIA_TYPE, ClosingStream, event, with_heartbeat
from stoker.gateway.problem import Problem

JOB_UID = "stoker.dev/job-uid"
ATTEMPT = "stoker.dev/attempt"
NODE_RANK = "stoker.dev/node-rank"
ROLE = "stoker.dev/role"
ENDED = ("Succeeded", "Failed")
WAITS = (400, 404)
"""Answers about the log of a pod whose container has not started, or that is gone."""
LOOK_S = 1.0
FIRST_S = 1.0
"""Time for which an answer waits for its first line: longer, and a client could take silence for a lost connection."""
TEXT: dict[str, Any] = {
    "description": "Lines; with the Accept header `text/event-stream` an event for each",
    "content": {"text/plain": {}, MEDIA_TYPE: {}},
}


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
    follow: Annotated[bool, Query(description="Go on until every pod has ended")] = False,
    tail_lines: Annotated[int | None, Query(ge=0, le=100_000, description="Last lines of each pod")] = None,
    attempt: Annotated[int | None, Query(ge=0, le=2**31, description="Default: the newest that has pods")] = None,
) -> StreamingResponse:
    """Read the log of all pods of an attempt, merged by time."""
    pods = await _pods(call, job_id, namespace)
    chosen = _of_attempt(pods, attempt)
    if attempt is not None and not chosen:
        raise _no_attempt(attempt, pods)
    as_events = MEDIA_TYPE in request.headers.get("accept", "")
    lines = _followed(call.cluster, chosen, tail_lines) if follow else _read(call.cluster, chosen, tail_lines)
    first = asyncio.ensure_future(anext(lines, None))
    await asyncio.wait((first,), timeout=FIRST_S)
    if first.done():
        first.result()  # a refusal is an answer of its own
    shown = _shown(first, lines, as_events=as_events, several=len(chosen) > 1)
    body = with_heartbeat(shown) if as_events else shown

    async def close() -> None:
        first.cancel()
        await asyncio.wait((first,))
        await lines.aclose()

    return ClosingStream(body, close, media_type=MEDIA_TYPE if as_events else "text/plain")


async def _pods(call: Call, job_id: str, namespace: str | None) -> list[Object]:
    return await pods_of(call, await find(call, JOB, one_namespace(call, namespace), job_id))


async def pods_of(call: Call, job: Object) -> list[Object]:
    """The trainer's pods of all attempts, in the order of attempt and rank."""
    metadata = job["metadata"]
    own = {JOB_UID: metadata["uid"], ROLE: "trainer"}
    found, _ = await list_all(call.cluster, POD, Selection(metadata["namespace"], labels=own))
    return sorted(found, key=lambda pod: (_label(pod, ATTEMPT), _label(pod, NODE_RANK), pod["metadata"]["name"]))


def _label(pod: Object, name: str) -> int:
    text = str((pod["metadata"].get("labels") or {}).get(name) or "0")
    return int(text) if text.isdigit() else 0


def _of_attempt(pods: list[Object], attempt: int | None) -> list[Object]:
    newest = max((_label(pod, ATTEMPT) for pod in pods), default=0) if attempt is None else attempt
    return [pod for pod in pods if _label(pod, ATTEMPT) == newest]


def _no_attempt(attempt: int, pods: list[Object]) -> Problem:
    there = sorted({_label(pod, ATTEMPT) for pod in pods})
    left = f"there are those of {', '.join(map(str, there))}" if there else "no pod of the job is left"
    return Problem(404, "not-found", f"query.attempt: no pod of attempt {attempt}; {left}")


async def lines_of(cluster: Cluster, pod: Object, tail: int | None) -> list[LogLine]:
    """The log of a pod; nothing while its container has not started."""
    return [line async for line in _lines(cluster, pod, tail)]


async def _lines(cluster: Cluster, pod: Object, tail: int | None) -> AsyncGenerator[LogLine]:
    metadata = pod["metadata"]
    try:
        async for line in cluster.log(metadata["namespace"], metadata["name"], follow=False, tail=tail):
            yield log_line(metadata["name"], line)
    except ApiError as error:
        if error.status not in WAITS:
            raise


async def _read(cluster: Cluster, pods: list[Object], tail: int | None) -> AsyncGenerator[LogLine]:
    logs = [_lines(cluster, pod, tail) for pod in pods]
    try:
        async for line in merged(logs):
            yield line
    finally:
        for log in logs:
            await log.aclose()


async def merged(logs: Sequence[AsyncIterator[LogLine]]) -> AsyncIterator[LogLine]:
    """Merge the logs of several pods by time, with one line of each in memory.

    A line without a time stays behind the one before it in its pod.
    """
    first = await asyncio.gather(*(anext(log, None) for log in logs), return_exceptions=True)
    if failed := [found for found in first if isinstance(found, BaseException)]:
        raise failed[0]
    heads = [(place_in_time(line, ""), index, line) for index, line in enumerate(first) if isinstance(line, LogLine)]
    heapq.heapify(heads)
    while heads:
        time, index, line = heads[0]
        yield line
        following = await anext(logs[index], None)
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (place_in_time(following, time), index, following))


async def _followed(cluster: Cluster, pods: list[Object], tail: int | None) -> AsyncGenerator[LogLine]:
    """Yield the lines of all pods as they come, until every log has ended. Raises ApiError."""
    queue: asyncio.Queue[LogLine | None] = asyncio.Queue(maxsize=1000)

    async def pump(pod: Object) -> None:
        try:
            async for line in _following(cluster, pod, tail):
                await queue.put(line)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await queue.put(None)

    tasks = [asyncio.create_task(pump(pod), name=f"log of {pod['metadata']['name']}") for pod in pods]
    try:
        left = len(tasks)
        while left:
            line = await queue.get()
            if line is None:
                left -= 1
            else:
                yield line
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        while not queue.empty():
            queue.get_nowait()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _following(cluster: Cluster, pod: Object, tail: int | None) -> AsyncIterator[LogLine]:
    """Yield the lines of a pod from the start of its container until its end. Raises ApiError."""
    metadata = pod["metadata"]
    while True:
        try:
            async for line in cluster.log(metadata["namespace"], metadata["name"], follow=True, tail=tail):
                yield log_line(metadata["name"], line)
            return
        except ApiError as error:
            if error.status not in WAITS:
                raise
        await asyncio.sleep(LOOK_S)
        if await _never_starts(cluster, metadata):
            return


async def _never_starts(cluster: Cluster, metadata: Object) -> bool:
    """Whether a pod without a log is gone or has ended."""
    try:
        pod = await cluster.get(POD, metadata["namespace"], metadata["name"])
    except ApiError as error:
        if error.status != 404:
            raise
        return True
    return (pod.get("status") or {}).get("phase") in ENDED


async def _shown(
    first: asyncio.Future[LogLine | None], lines: AsyncIterator[LogLine], *, as_events: bool, several: bool
) -> AsyncIterator[bytes]:
    try:
        begun = await first
        if begun is not None:
            yield _line(begun, as_events=as_events, several=several)
        async for line in lines:
            yield _line(line, as_events=as_events, several=several)
    except ApiError as error:
        problem = problem_of(error).document("")
        yield event("ERROR", problem.model_dump()) if as_events else f"error: {problem.detail}\n".encode()


def _line(line: LogLine, *, as_events: bool, several: bool) -> bytes:
    if as_events:
        return event("LINE", {"time": line.time or None, "pod": line.pod, "text": line.text})
    return f"{f'[{line.pod}] ' if several else ''}{line.text}\n".encode()
