"""Errors of the client: the gateway's problem documents, and a gateway that does not answer."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from stoker.gateway.problem import FieldProblem, ProblemDocument


class StokerError(Exception):
    """The gateway refused a request; `problem` has the reason, and each wrong field in `problem.errors`."""

    def __init__(self, problem: ProblemDocument) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    @property
    def status(self) -> int:
        return self.problem.status

    @property
    def fields(self) -> list[FieldProblem]:
        """The wrong fields of the request."""
        return self.problem.errors


class JobFailed(Exception):
    """A job that was waited for ended as FAILED or CANCELLED."""


class NoAnswer(Exception):
    """The gateway does not answer."""


def error_of(answer: httpx.Response) -> StokerError:
    """The error of an answer with a status of 400 or more."""
    try:
        problem = ProblemDocument.model_validate_json(answer.content)
    except ValidationError:
        detail = answer.text[:500] or answer.reason_phrase
        problem = ProblemDocument(
            type="about:blank", title=answer.reason_phrase, status=answer.status_code, detail=detail, instance=""
        )
    return StokerError(problem)
