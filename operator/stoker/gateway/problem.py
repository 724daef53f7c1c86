"""Errors of the REST API: RFC 9457 documents that name the field, the value and what is allowed.

Values, raised by routes and turned into answers by `http/errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from pydantic import BaseModel, Field

MEDIA_TYPE = "application/problem+json"


class FieldProblem(BaseModel):
    """One wrong field."""

    field: str = Field(description="Path in the request: `optimization_config.learning_rate`, `query.limit`.")
    message: str = Field(description="What is wrong, the value, and what is allowed.")


class ProblemDocument(BaseModel):
    """Error (RFC 9457)."""

    type: str = Field(description="`urn:stoker:problem:` and a short name; the same for all errors of one sort.")
    title: str
    status: int
    detail: str
    instance: str = Field(description="Path of the request.")
    errors: list[FieldProblem] = []


class Problem(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        name: str,
        detail: str,
        *,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.name = name
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})

    def document(self, instance: str) -> ProblemDocument:
        """The document for the request at path `instance`."""
        return ProblemDocument(
            type=f"urn:stoker:problem:{self.name}",
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            instance=instance,
            errors=list(self.errors),
        )


def wrong_field(field: str, message: str) -> Problem:
    """The 422 about one field of the request."""
    return Problem(422, "invalid", f"{field}: {message}", errors=[FieldProblem(field=field, message=message)])
