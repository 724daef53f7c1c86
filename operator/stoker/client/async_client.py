"""The client of the gateway for asyncio; the same methods as `StokerClient`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from stoker.client.errors import GatewayFailed, NoAnswer, StokerError, check_answer, check_events
from stoker.client.event_stream import Event, EventLines
from stoker.client.followed_jobs import FollowedJobs, JobChange
from stoker.client.followed_log import FollowedLog
from stoker.client.openai_endpoint import endpoint_of, openai_client
from stoker.client.reopened_stream import REOPEN_S, SILENCE_S
from stoker.client.requests import AS_EVENTS, Ask, Requests
from stoker.client.retry import Retry
from stoker.client.waiting import ProgressBar, Wait, checked, is_settled
from stoker.gateway.models import (
    Cancelled,
    Checkpoint,
    CheckpointAnswer,
    ClusterStatus,
    Deployment,
    Job,
    JobAnswer,
    MetricHistory,
    NewJob,
    NodeAnswer,
)
from stoker.pod.error_text import text_of
from stoker.pod.whole_lines import coming_lines_of

T = TypeVar("T")


class AsyncStokerClient:
    """A client with one identity and one namespace. Every method raises StokerError or NoAnswer.

    Args:
        url: the gateway, for instance `http://127.0.0.1:8090`.
        token: bearer token: the caller's own on Kubernetes, the gateway's key on the embedded cluster.
        namespace: None is the gateway's own.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        namespace: str | None = None,
        timeout_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        new_key: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        headers = {"Authorization": f"Bearer {token.strip()}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, transport=transport)
        self._requests = Requests(namespace, new_key)
        self._sleep = sleep

    async def __aenter__(self) -> AsyncStokerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # Jobs

    async def submit(self, job: NewJob | Mapping[str, Any], *, key: str | None = None) -> JobAnswer:
        """Submit a job. With a key of your own, a repeated call answers with the first job."""
        return await self._ask(self._requests.submit(job, key))

    async def job(self, job_id: str) -> Job:
        """Read a job by its UUID or name."""
        return await self._ask(self._requests.job(job_id))

    async def jobs(self, *states: str) -> AsyncIterator[Job]:
        """Go over the jobs, page by page; only those in the given states, if any are given."""
        after: str | None = ""
        while after is not None:
            page = await self._ask(self._requests.jobs(states, after))
            for one in page.items:
                yield one
            after = page.next or None

    async def wait(self, job_id: str, *, timeout_s: float | None = None, progress: bool = True) -> Job:
        """Wait until a job is COMPLETED or SUSPENDED, with a bar on a terminal.

        Raises:
            JobFailed: it ended as FAILED or CANCELLED.
            TimeoutError.
            NoAnswer, GatewayFailed: the gateway did not answer for five minutes; a shorter restart is borne.
        """
        wait = Wait(timeout_s)
        with ProgressBar(shown=progress) as bar:
            while True:
                try:
                    job = await self.job(job_id)
                except (NoAnswer, GatewayFailed) as error:
                    wait.missed(error)
                else:
                    bar.show(job)
                    if is_settled(job):
                        return checked(job)
                    wait.heard(job)
                await self._sleep(wait.pause_s)

    async def cancel(self, job_id: str, *, purge: bool = False) -> Cancelled:
        """Cancel a job after a last save; with `purge` delete its resource. Its checkpoints stay."""
        return await self._ask(self._requests.cancel(job_id, purge))

    async def suspend(self, job_id: str) -> JobAnswer:
        """Save, and give the nodes back."""
        return await self._ask(self._requests.suspend(job_id))

    async def resume(
        self, job_id: str, checkpoint_id: str | None = None, *, total_steps: int | None = None
    ) -> JobAnswer:
        """Let a suspended job go on, or begin a new one at a checkpoint of a finished one (default: the newest)."""
        return await self._ask(self._requests.resume(job_id, checkpoint_id, total_steps))

    async def metrics(
        self, job_id: str, *, after_step: int = 0, until_step: int | None = None, max_points: int | None = None
    ) -> MetricHistory:
        """Read the metrics of a run by step. Of more than `max_points`, extremes and both ends are kept."""
        return await self._ask(self._requests.metrics(job_id, after_step, until_step, max_points))

    async def watch(self, *states: str, job_id: str | None = None) -> AsyncIterator[JobChange]:
        """Go over the jobs that there are, as ADDED, then over each change; only of these states, or of one job.

        A stream that is cut is opened again where it ended; five minutes without an answer raise.
        """
        jobs = FollowedJobs()
        while True:
            try:
                async with self._streamed(self._requests.watched_jobs(job_id, states, jobs.query())) as answer:
                    jobs.begin()
                    async for event in self._events(answer):
                        for change in jobs.take(event):
                            yield change
            except (NoAnswer, StokerError) as error:
                jobs.lost(error)
            await self._sleep(REOPEN_S)

    async def logs(self, job_id: str, *, follow: bool = False, tail_lines: int | None = None) -> AsyncIterator[str]:
        """Go over the log lines of all ranks of the newest attempt; with `follow` until the job has ended.

        A followed log goes on with later attempts, and after a cut where it ended. Five minutes without answer raise.
        """
        if follow:
            async for line in self._follow(job_id, FollowedLog(tail_lines)):
                yield line
            return
        async with self._streamed(self._requests.logs(job_id, tail_lines)) as answer:
            async for line in coming_lines_of(answer.aiter_bytes()):
                yield line

    async def _follow(self, job_id: str, log: FollowedLog) -> AsyncIterator[str]:
        while not log.ended:
            try:
                async with self._streamed(self._requests.followed_log(job_id, log.query())) as answer:
                    log.begin(answer.headers.get("Date", ""))
                    async for event in self._events(answer):
                        if (line := log.take(event)) is not None:
                            yield line
            except (NoAnswer, StokerError) as error:
                log.lost(error)
            if not log.ended:
                await self._sleep(REOPEN_S)

    @asynccontextmanager
    async def _streamed(self, ask: Ask[str]) -> AsyncIterator[httpx.Response]:
        """Open an answer that goes on. Raises StokerError and NoAnswer."""
        limits = httpx.Timeout(30.0, read=SILENCE_S)
        try:
            async with self._http.stream(
                ask.method, ask.path, params=list(ask.query), headers=dict(ask.headers), timeout=limits
            ) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                (check_events if ask.headers == AS_EVENTS else check_answer)(answer)
                yield answer
        except httpx.HTTPError as error:
            raise NoAnswer(f"{self._http.base_url}: {text_of(error)}") from error

    async def _events(self, answer: httpx.Response) -> AsyncIterator[Event]:
        events = EventLines()
        async for line in coming_lines_of(answer.aiter_bytes()):
            if (event := events.take(line)) is not None:
                yield event

    # Checkpoints

    async def save(self, job_id: str, *, pinned: bool = False) -> CheckpointAnswer:
        """Ask a running job to save now."""
        return await self._ask(self._requests.save(job_id, pinned))

    async def checkpoint(self, checkpoint_id: str) -> Checkpoint:
        return await self._ask(self._requests.checkpoint(checkpoint_id))

    async def checkpoints(self, job_id: str | None = None) -> AsyncIterator[Checkpoint]:
        """Go over the checkpoints of a job, newest first, or over all of the namespace."""
        after: str | None = ""
        while after is not None:
            page = await self._ask(self._requests.checkpoints(job_id, after))
            for one in page.items:
                yield one
            after = page.next or None

    # Serving and cluster

    async def deployment(self, deployment_id: str) -> Deployment:
        return await self._ask(self._requests.deployment(deployment_id))

    async def deployments(self) -> AsyncIterator[Deployment]:
        after: str | None = ""
        while after is not None:
            page = await self._ask(self._requests.deployments(after))
            for one in page.items:
                yield one
            after = page.next or None

    async def openai(self, deployment_id: str, *, base_url: str | None = None, api_key: str = "none") -> Any:
        """An `openai.AsyncOpenAI` of a deployment; `base_url` where its own is not reachable from here.

        Raises:
            ValueError: the deployment has no endpoint yet.
        """
        return openai_client("AsyncOpenAI", base_url or endpoint_of(await self.deployment(deployment_id)), api_key)

    async def cluster(self) -> ClusterStatus:
        """GPUs and jobs of the whole cluster."""
        return await self._ask(self._requests.cluster())

    async def nodes(self) -> list[NodeAnswer]:
        return await self._ask(self._requests.nodes())

    async def _ask(self, ask: Ask[T]) -> T:
        retry = Retry(repeatable=ask.repeatable)
        while True:
            try:
                answer = await self._http.request(
                    ask.method, ask.path, params=list(ask.query), json=ask.body, headers=dict(ask.headers)
                )
            except httpx.HTTPError as error:
                pause_s = retry.after_silence()
                if pause_s is None:
                    raise NoAnswer(f"{self._http.base_url}: {text_of(error)}") from error
            else:
                pause_s = retry.after_answer(answer)
                if pause_s is None:
                    return ask.read(answer)
            await self._sleep(pause_s)
