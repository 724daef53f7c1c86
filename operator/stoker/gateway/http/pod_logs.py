"""The logs of pods as routes read them: those that are there, merged by time, and those of a job as they come."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from stoker.gateway.cluster.interface import JOB, POD, ApiError, Cluster, Object, Selection, list_all
from stoker.gateway.domain.log_lines import LogLine, log_line, place_in_time
from stoker.gateway.domain.pod_attempts import Attempts, attempt_of, in_order
from stoker.gateway.domain.states import gets_no_more_pods
from stoker.gateway.http.caller import Call
from stoker.gateway.problem import Problem
from stoker.pod.log_position import LogRequest
from stoker.pod.log_source import Look, Meaning

JOB_UID = "stoker.dev/job-uid"
ROLE = "stoker.dev/role"
WAITS = (400, 404)
"""Answers about the log of a pod whose container has not started, or that is gone."""
RENEW_S = 60.0
"""Time after which the token of a caller who follows a log is reviewed again."""


async def pods_of(call: Call, job: Object) -> list[Object]:
    """The trainer's pods of all attempts, in the order of attempt and rank."""
    metadata = job["metadata"]
    own = {JOB_UID: metadata["uid"], ROLE: "trainer"}
    found, _ = await list_all(call.cluster, POD, Selection(metadata["namespace"], labels=own))
    return in_order(found)


async def lines_of(cluster: Cluster, pod: Object, request: LogRequest) -> list[LogLine]:
    """The log of a pod; nothing while its container has not started."""
    return [line async for line in _lines(cluster, pod, request)]


async def read_logs(cluster: Cluster, pods: Sequence[Object], request: LogRequest) -> AsyncGenerator[LogLine]:
    """Yield what the logs of pods hold now, merged by time."""
    logs = [_lines(cluster, pod, request) for pod in pods]
    try:
        async for line in merged(logs):
            yield line
    finally:
        for log in logs:
            await log.aclose()


async def _lines(cluster: Cluster, pod: Object, request: LogRequest) -> AsyncGenerator[LogLine]:
    metadata = pod["metadata"]
    try:
        async for lines in cluster.log(metadata["namespace"], metadata["name"], request, follow=False):
            for line in lines:
                yield log_line(metadata["name"], line)
    except ApiError as error:
        if error.status not in WAITS:
            raise


async def merged(logs: Sequence[AsyncIterator[LogLine]]) -> AsyncIterator[LogLine]:
    """Merge the logs of several pods by time, with one line of each in memory.

    A line without a time stays behind the one before it in its pod.
    """
    first = await asyncio.gather(*(anext(log, None) for log in logs), return_exceptions=True)
    if failed := [found for found in first if isinstance(found, BaseException)]:
        raise failed[0]
    heads = [(place_in_time(line, 0), index, line) for index, line in enumerate(first) if isinstance(line, LogLine)]
    heapq.heapify(heads)
    while heads:
        place, index, line = heads[0]
        yield line
        following = await anext(logs[index], None)
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (place_in_time(following, place), index, following))


class JobLogs:
    """The pods of a job whose logs are followed, by the rights of a caller whose token is reviewed again and again."""

    errors: tuple[type[Exception], ...] = (ApiError, Problem)

    def __init__(
        self, call: Call, job: Object, wanted: Attempts, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._call, self._job, self._wanted, self._monotonic = call, job, wanted, monotonic
        self._renewed_at = monotonic()
        self.attempts: dict[str, int] = {}
        """The attempt of each pod that was seen."""

    async def look(self) -> Look:
        await self._renew()
        pods = await pods_of(self._call, self._job)
        self.attempts |= {pod["metadata"]["name"]: attempt_of(pod) for pod in pods}
        chosen = {pod["metadata"]["uid"] for pod in self._wanted.chosen(pods)}
        return Look(pods, chosen, self._wanted.only is not None or await self._has_ended())

    async def _renew(self) -> None:
        if self._monotonic() - self._renewed_at >= RENEW_S:
            self._call = await self._call.renewed()
            self._renewed_at = self._monotonic()

    async def _has_ended(self) -> bool:
        """Whether the job gets no more pods, or is gone."""
        metadata = self._job["metadata"]
        try:
            now = await self._call.cluster.get(JOB, metadata["namespace"], metadata["name"])
        except ApiError as error:
            if error.status != 404:
                raise
            return True
        return bool(now["metadata"]["uid"] != metadata["uid"]) or gets_no_more_pods(now)

    async def read(self, pod: Object, request: LogRequest) -> AsyncIterator[Sequence[str]]:
        metadata = pod["metadata"]
        async with aclosing(
            self._call.cluster.log(metadata["namespace"], metadata["name"], request, follow=True)
        ) as parts:
            async for lines in parts:
                yield lines

    def meaning(self, error: Exception) -> Meaning:
        status = error.status if isinstance(error, ApiError) else 403
        if status in (0, 429) or status >= 500:
            return Meaning.NO_ANSWER
        return Meaning.NO_LOG if status in WAITS else Meaning.REFUSED

    def explain(self, error: Exception) -> str:
        return str(error)
