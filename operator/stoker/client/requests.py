"""The requests of the client: what both the sync and the async client send, and what their answers become. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from stoker.client.errors import check_answer, foreign, invalid_request
from stoker.gateway.models import (
    Cancelled,
    Checkpoint,
    CheckpointAnswer,
    CheckpointList,
    ClusterStatus,
    Deployment,
    DeploymentList,
    Job,
    JobAnswer,
    JobList,
    MetricHistory,
    NewJob,
    NodeAnswer,
)

T = TypeVar("T")
RETRIED = frozenset({429, 502, 503})
"""Answers after which a safe request is sent again."""
JOBS = "/v1/training/jobs"
AS_EVENTS = {"Accept": "text/event-stream"}


@dataclass(frozen=True)
class Ask(Generic[T]):
    """One request and the type of its answer."""

    method: str
    path: str
    answer: type[T]
    query: Sequence[tuple[str, str]] = ()
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent twice: it reads, or a key or its meaning makes the second one do nothing."""
        safe = self.method == "GET" or (self.method == "DELETE" and ("purge", "true") not in self.query)
        return safe or "Idempotency-Key" in self.headers

    def read(self, answer: httpx.Response) -> T:
        """The answer. Raises StokerError and NoAnswer."""
        return read_as(self.answer, answer)


def read_as(wanted: type[T], answer: httpx.Response) -> T:
    """The body of an answer. Raises StokerError and NoAnswer."""
    check_answer(answer)
    try:
        return TypeAdapter(wanted).validate_json(answer.content)
    except ValidationError as error:
        raise foreign(answer) from error


class AskCheckpointsOfJob(Ask[CheckpointList]):
    """A page of a job's checkpoints: the answer is the items alone, its header `Link` has the next page."""

    def read(self, answer: httpx.Response) -> CheckpointList:
        """The page. Raises StokerError and NoAnswer."""
        items = read_as(list[Checkpoint], answer)
        following = answer.links.get("next")
        after = httpx.URL(following["url"]).params["continue"] if following else ""
        return CheckpointList(items=items, next=after, resource_version="")


class Requests:
    """Builds requests about one namespace; None is the gateway's own."""

    def __init__(self, namespace: str | None, new_key: Callable[[], str]) -> None:
        self.namespace = namespace
        self.new_key = new_key
        """Makes a key that was never used before: a request that is repeated does nothing again."""

    def submit(self, job: NewJob | Mapping[str, Any], key: str | None) -> Ask[JobAnswer]:
        """A given key makes the whole call repeatable, and the job's name `job_name-DIGITS`."""
        wanted = job if isinstance(job, NewJob) else _new_job(job)
        body = wanted.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        return Ask("POST", JOBS, JobAnswer, self._query(), body, self._key(key) if key else {})

    def job(self, job_id: str) -> Ask[Job]:
        return Ask("GET", _job(job_id), Job, self._query())

    def jobs(self, states: tuple[str, ...], after: str) -> Ask[JobList]:
        query = [*(("status", state) for state in states), *self._query(**{"continue": after})]
        return Ask("GET", JOBS, JobList, query)

    def cancel(self, job_id: str, purge: bool) -> Ask[Cancelled]:
        return Ask("DELETE", _job(job_id), Cancelled, self._query(**({"purge": "true"} if purge else {})))

    def suspend(self, job_id: str) -> Ask[JobAnswer]:
        return Ask("POST", f"{_job(job_id)}/suspend", JobAnswer, self._query())

    def resume(self, job_id: str, checkpoint_id: str | None, total_steps: int | None) -> Ask[JobAnswer]:
        given = {"checkpoint_id": checkpoint_id, "total_steps": total_steps}
        body = {name: value for name, value in given.items() if value is not None}
        return Ask("POST", f"{_job(job_id)}/resume", JobAnswer, self._query(), body, self._key(None))

    def save(self, job_id: str, pinned: bool) -> Ask[CheckpointAnswer]:
        body = {"pinned": pinned}
        return Ask("POST", f"{_job(job_id)}/checkpoint", CheckpointAnswer, self._query(), body, self._key(None))

    def checkpoints(self, job_id: str | None, after: str) -> Ask[CheckpointList]:
        """A page of the checkpoints of a job, or of all."""
        query = self._query(**{"continue": after})
        if job_id is None:
            return Ask("GET", "/v1/checkpoints", CheckpointList, query)
        return AskCheckpointsOfJob("GET", f"{_job(job_id)}/checkpoints", CheckpointList, query)

    def checkpoint(self, checkpoint_id: str) -> Ask[Checkpoint]:
        return Ask("GET", f"/v1/checkpoints/{_segment(checkpoint_id)}", Checkpoint, self._query())

    def metrics(
        self, job_id: str, after_step: int, until_step: int | None, max_points: int | None
    ) -> Ask[MetricHistory]:
        given = {"after_step": after_step, "until_step": until_step, "max_points": max_points}
        query = self._query(**{name: str(value) for name, value in given.items() if value is not None})
        return Ask("GET", f"{_job(job_id)}/metrics", MetricHistory, query)

    def deployments(self, after: str) -> Ask[DeploymentList]:
        return Ask("GET", "/v1/deployments", DeploymentList, self._query(**{"continue": after}))

    def deployment(self, deployment_id: str) -> Ask[Deployment]:
        return Ask("GET", f"/v1/deployments/{_segment(deployment_id)}", Deployment, self._query())

    def cluster(self) -> Ask[ClusterStatus]:
        return Ask("GET", "/v1/cluster/status", ClusterStatus)

    def nodes(self) -> Ask[list[NodeAnswer]]:
        return Ask("GET", "/v1/cluster/nodes", list[NodeAnswer])

    def logs(self, job_id: str, tail_lines: int | None) -> Ask[str]:
        tail = {"tail_lines": str(tail_lines)} if tail_lines is not None else {}
        return Ask("GET", f"{_job(job_id)}/logs", str, self._query(**tail))

    def followed_log(self, job_id: str, query: Mapping[str, str]) -> Ask[str]:
        return Ask("GET", f"{_job(job_id)}/logs", str, self._query(follow="true", **query), headers=AS_EVENTS)

    def watched_jobs(self, job_id: str | None, states: Sequence[str], query: Mapping[str, str]) -> Ask[str]:
        """Raises ValueError: both a job and states are given."""
        if job_id is not None and states:
            raise ValueError("job_id and states exclude each other: a watch of one job shows it in any state")
        path, chosen = JOBS if job_id is None else _job(job_id), [("status", state) for state in states]
        return Ask("GET", path, str, [*chosen, *self._query(**query)], headers=AS_EVENTS)

    def _query(self, **more: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in (("namespace", self.namespace), *more.items()) if value]

    def _key(self, key: str | None) -> dict[str, str]:
        return {"Idempotency-Key": key or self.new_key()}


def _new_job(job: Mapping[str, Any]) -> NewJob:
    """Read a job. Raises InvalidRequest."""
    try:
        return NewJob.model_validate(job)
    except ValidationError as error:
        raise invalid_request(error) from error


def _job(job_id: str) -> str:
    return f"{JOBS}/{_segment(job_id)}"


def _segment(text: str) -> str:
    """A UUID or name as one segment of a path, whatever it contains. Raises ValueError for one that is none."""
    if text in ("", ".", ".."):
        raise ValueError(f"{text!r} is no UUID and no name")
    return quote(text, safe="")
