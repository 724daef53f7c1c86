"""The client of the gateway that blocks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from stoker.pod.whole_lines import lines_of

T = TypeVar("T")


class StokerClient:
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
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        new_key: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        headers = {"Authorization": f"Bearer {token.strip()}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, transport=transport)
        self._requests = Requests(namespace, new_key)
        self._sleep = sleep

    def __enter__(self) -> StokerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Jobs

    def submit(self, job: NewJob | Mapping[str, Any], *, key: str | None = None) -> JobAnswer:
        """Submit a job. With a key of your own, a repeated call answers with the first job."""
        return self._ask(self._requests.submit(job, key))

    def job(self, job_id: str) -> Job:
        """Read a job by its UUID or name."""
        return self._ask(self._requests.job(job_id))

    def jobs(self, *states: str) -> Iterator[Job]:
        """Go over the jobs, page by page; only those in the given states, if any are given."""
        after: str | None = ""
        while after is not None:
            page = self._ask(self._requests.jobs(states, after))
            yield from page.items
            after = page.next or None

    def wait(self, job_id: str, *, timeout_s: float | None = None, progress: bool = True) -> Job:
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
                    job = self.job(job_id)
                except (NoAnswer, GatewayFailed) as error:
                    wait.missed(error)
                else:
                    bar.show(job)
                    if is_settled(job):
                        return checked(job)
                    wait.heard(job)
                self._sleep(wait.pause_s)

    def cancel(self, job_id: str, *, purge: bool = False) -> Cancelled:
        """Cancel a job after a last save; with `purge` delete its resource. Its checkpoints stay."""
        return self._ask(self._requests.cancel(job_id, purge))

    def suspend(self, job_id: str) -> JobAnswer:
        """Save, and give the nodes back."""
        return self._ask(self._requests.suspend(job_id))

    def resume(self, job_id: str, checkpoint_id: str | None = None, *, total_steps: int | None = None) -> JobAnswer:
        """Let a suspended job go on, or begin a new one at a checkpoint of a finished one (default: the newest)."""
        return self._ask(self._requests.resume(job_id, checkpoint_id, total_steps))

    def metrics(
        self, job_id: str, *, after_step: int = 0, until_step: int | None = None, max_points: int | None = None
    ) -> MetricHistory:
        """Read the metrics of a run by step. Of more than `max_points`, extremes and both ends are kept."""
        return self._ask(self._requests.metrics(job_id, after_step, until_step, max_points))

    def watch(self, *states: str, job_id: str | None = None) -> Iterator[JobChange]:
        """Go over the jobs that there are, as ADDED, then over each change; only of these states, or of one job.

        A stream that is cut is opened again where it ended; five minutes without an answer raise.
        """
        jobs = FollowedJobs()
        while True:
            try:
                with self._streamed(self._requests.watched_jobs(job_id, states, jobs.query())) as answer:
                    jobs.begin()
                    for event in self._events(answer):
                        yield from jobs.take(event)
            except (NoAnswer, StokerError) as error:
                jobs.lost(error)
            self._sleep(REOPEN_S)

    def logs(self, job_id: str, *, follow: bool = False, tail_lines: int | None = None) -> Iterator[str]:
        """Go over the log lines of all ranks of the newest attempt; with `follow` until the job has ended.

        A followed log goes on with later attempts, and after a cut where it ended. Five minutes without answer raise.
        """
        if follow:
            yield from self._follow(job_id, FollowedLog(tail_lines))
            return
        with self._streamed(self._requests.logs(job_id, tail_lines)) as answer:
            yield from lines_of(answer.iter_bytes())

    def _follow(self, job_id: str, log: FollowedLog) -> Iterator[str]:
        while not log.ended:
            try:
                with self._streamed(self._requests.followed_log(job_id, log.query())) as answer:
                    log.begin(answer.headers.get("Date", ""))
                    for event in self._events(answer):
                        if (line := log.take(event)) is not None:
                            yield line
            except (NoAnswer, StokerError) as error:
                log.lost(error)
            if not log.ended:
                self._sleep(REOPEN_S)

    @contextmanager
    def _streamed(self, ask: Ask[str]) -> Iterator[httpx.Response]:
        """Open an answer that goes on. Raises StokerError and NoAnswer."""
        limits = httpx.Timeout(30.0, read=SILENCE_S)
        try:
            with self._http.stream(
                ask.method, ask.path, params=list(ask.query), headers=dict(ask.headers), timeout=limits
            ) as answer:
                if answer.status_code >= 400:
                    answer.read()
                (check_events if ask.headers == AS_EVENTS else check_answer)(answer)
                yield answer
        except httpx.HTTPError as error:
            raise NoAnswer(f"{self._http.base_url}: {text_of(error)}") from error

    def _events(self, answer: httpx.Response) -> Iterator[Event]:
        events = EventLines()
        for line in lines_of(answer.iter_bytes()):
            if (event := events.take(line)) is not None:
                yield event

    # Checkpoints

    def save(self, job_id: str, *, pinned: bool = False) -> CheckpointAnswer:
        """Ask a running job to save now."""
        return self._ask(self._requests.save(job_id, pinned))

    def checkpoint(self, checkpoint_id: str) -> Checkpoint:
        return self._ask(self._requests.checkpoint(checkpoint_id))

    def checkpoints(self, job_id: str | None = None) -> Iterator[Checkpoint]:
        """Go over the checkpoints of a job, newest first, or over all of the namespace."""
        after: str | None = ""
        while after is not None:
            page = self._ask(self._requests.checkpoints(job_id, after))
            yield from page.items
            after = page.next or None

    # Serving and cluster

    def deployment(self, deployment_id: str) -> Deployment:
        return self._ask(self._requests.deployment(deployment_id))

    def deployments(self) -> Iterator[Deployment]:
        after: str | None = ""
        while after is not None:
            page = self._ask(self._requests.deployments(after))
            yield from page.items
            after = page.next or None

    def openai(self, deployment_id: str, *, base_url: str | None = None, api_key: str = "none") -> Any:
        """An `openai.OpenAI` of a deployment; `base_url` where its own is not reachable from here.

        Raises:
            ValueError: the deployment has no endpoint yet.
        """
        return openai_client("OpenAI", base_url or endpoint_of(self.deployment(deployment_id)), api_key)

    def cluster(self) -> ClusterStatus:
        """GPUs and jobs of the whole cluster."""
        return self._ask(self._requests.cluster())

    def nodes(self) -> list[NodeAnswer]:
        return self._ask(self._requests.nodes())

    def _ask(self, ask: Ask[T]) -> T:
        retry = Retry(repeatable=ask.repeatable)
        while True:
            try:
                answer = self._http.request(
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
            self._sleep(pause_s)
