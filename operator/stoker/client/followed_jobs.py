"""Watched jobs: where a stream of changes goes on after a cut, and which changes were told. Pure but for the clock."""

from __future__ import annotations

from typing import Literal, NamedTuple

from stoker.client.errors import NoAnswer, StokerError, error_of_problem
from stoker.client.event_stream import Event
from stoker.client.reopened_stream import ReopenedStream
from stoker.gateway.models import Job
from stoker.gateway.problem import ProblemDocument

TOO_OLD = 410


class JobChange(NamedTuple):
    """One change. A job that is in none of the watched states any more is DELETED from them."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    job: Job


class FollowedJobs:
    """The changes of jobs, by one stream after the other: each once, also where a version is too old to go on from."""

    def __init__(self) -> None:
        self._stream = ReopenedStream()
        self._version = ""
        self._known: dict[str, Job] = {}
        self._listed: set[str] | None = None
        """Jobs that a stream without a version has shown; None behind its first BOOKMARK."""

    def query(self) -> dict[str, str]:
        """Return what the next stream asks for."""
        return {"watch": "true", **({"resource_version": self._version} if self._version else {})}

    def begin(self) -> None:
        """Note that a stream begins."""
        self._listed = None if self._version else set()

    def take(self, event: Event) -> list[JobChange]:
        """Return the changes that an event tells. Raises StokerError for an error."""
        if event.name == "ERROR":
            raise error_of_problem(ProblemDocument.model_validate(event.data))
        self._stream.heard()
        self._version = event.number or self._version
        return self._gone() if event.name == "BOOKMARK" else self._changed(event)

    def lost(self, error: NoAnswer | StokerError) -> None:
        """Note that a stream was cut. Raises `error` unless another one can go on, or begin anew."""
        if isinstance(error, StokerError) and error.status == TOO_OLD:
            self._version = ""
        else:
            self._stream.lost(error)

    def _changed(self, event: Event) -> list[JobChange]:
        job = Job.model_validate(event.data)
        before = self._known.get(job.job_id)
        if event.name == "DELETED":
            self._known.pop(job.job_id, None)
            return [JobChange("DELETED", job)] if before is not None else []
        if self._listed is not None:
            self._listed.add(job.job_id)
        self._known[job.job_id] = job
        if before is not None and before.resource_version == job.resource_version:
            return []
        return [JobChange("ADDED" if before is None else "MODIFIED", job)]

    def _gone(self) -> list[JobChange]:
        """Jobs that were deleted while no stream was open: the first BOOKMARK is behind all that exist."""
        listed, self._listed = self._listed, None
        if listed is None:
            return []
        return [JobChange("DELETED", self._known.pop(one)) for one in [*self._known] if one not in listed]
